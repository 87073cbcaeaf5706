"""Primitives of our own, known to JAX by their types alone; serves JAX 0.10 to 0.12.

A marked function stands in a recorded step as one equation (`_step._recording`). Such
an equation has no meaning to JAX: it cannot be compiled. Where a transformation meets
one, a rule of ours says what comes of it, or stops with `Unplannable`.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.lax as _lax
import jax.numpy as _jnp
import numpy as np
from jax._src import core as _core
from jax._src import custom_derivatives as _custom_derivatives
from jax._src import effects as _effects
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax.sharding import NamedSharding, PartitionSpec

from ._jax import open_jaxpr

_JAXS_OWN = str(pathlib.Path(_core.__file__).parents[1])
_ZERO: Any = getattr(_ad, "Zero")  # noqa: B009


class Unplannable(Exception):
    """Why a marked function cannot be planned where it is called."""


def opaque_primitive(
    name: str,
    *,
    batched: Callable[..., Any],
    forwards: Callable[..., Any],
    again: Callable[..., Any],
) -> Callable[..., Any]:
    """A function that binds a new primitive.

    **Arguments:** `batched(axis, values, dimensions, **parameters)` is what `jax.vmap`
    makes of the equation, `forwards(values, tangents, **parameters)` what `jax.jvp`
    does, and `again` what a derivative in reverse or a transpose does.

    **Returns:** `bind(operands, results=…, effects=…, **parameters)`, where `results`
    are the types of what comes out.
    """
    primitive = _core.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_effectful_abstract_eval
    def types(*_: Any, results: Any, effects: Any, **__: Any) -> Any:
        return list(results), set(effects)

    _batching.primitive_batchers[primitive] = batched
    _batching.fancy_primitive_batchers[primitive] = batched
    _ad.primitive_jvps[primitive] = forwards
    _ad.primitive_linearizations[primitive] = again
    _ad.primitive_transposes[primitive] = again

    def bind(
        operands: Sequence[Any], results: Sequence[Any], effects: Any, **parameters: Any
    ) -> list[Any]:
        return primitive.bind(
            *operands,
            results=tuple(results),
            effects=frozenset(effects),
            **parameters,
        )

    return bind


def refuse(reason: str) -> Callable[..., Any]:
    """A rule that stops a transformation, and says why nothing is planned there."""

    def rule(*_: Any, **__: Any) -> Any:
        raise Unplannable(reason)

    return rule


def is_zero(tangent: Any) -> bool:
    """Whether `jax.jvp` knows of a tangent that it is zero."""
    return type(tangent) is _ZERO


def zero_of(value: Any) -> Any:
    """A tangent of `value` that `jax.jvp` knows to be zero."""
    return _ZERO(tangent_type(value))


def instantiated(tangent: Any) -> Any:
    """A tangent as an array."""
    return tangent.instantiate() if is_zero(tangent) else tangent


def may_be_no_derivative(equation: Any) -> bool:
    """Whether an equation is a `jax.custom_jvp` whose rule may be no derivative.

    That is the user's rules, for functions of JAX's too, and that of `lax.custom_root`,
    which holds at a root alone. Of rules by `defjvps` JAX 0.10 to 0.12 does not say who
    wrote them: there JAX's functions are known by their names.
    """
    if equation.primitive.name != "custom_jvp_call":
        return False
    function = open_jaxpr(equation.params["call_jaxpr"]).debug_info
    rule = getattr(equation.params.get("jvp_jaxpr_fun"), "debug_info", None)
    files = [(about and about.func_filename) or "" for about in (function, rule)]
    if not all(file.startswith(_JAXS_OWN) for file in files):
        return True
    if files[1] == _custom_derivatives.__file__:
        return function.func_name not in _BY_DEFJVPS
    return function.func_name == "_custom_root"


# Of one argument, element by element: their second derivatives are symmetric.
_BY_DEFJVPS = frozenset({"relu", "relu6", "log1mexp", "logit"})


def in_front(value: Any, dimension: int | None, axis: Any) -> Any:
    """A value with `axis`, `jax.vmap`'s, in front; without it, it is repeated there."""
    if dimension is not None:
        return _jnp.moveaxis(value, dimension, 0)
    aval, spread = _core.typeof(value), axis.explicit_mesh_axis
    kept, shape = tuple(range(1, aval.ndim + 1)), (axis.size, *aval.shape)
    if spread is None or aval.sharding.mesh.empty:
        return _lax.broadcast_in_dim(value, shape, kept)
    parts = PartitionSpec(spread, *aval.sharding.spec)
    sharding = NamedSharding(aval.sharding.mesh, parts)
    return _lax.broadcast_in_dim(value, shape, kept, out_sharding=sharding)


def effects_of(jaxpr: Any) -> frozenset[Any]:
    """The effects that running a jaxpr has, but for those of axis names."""
    effects = open_jaxpr(jaxpr).effects
    return frozenset(e for e in effects if not isinstance(e, _core.NamedAxisEffect))


def is_ordered(effect: Any) -> bool:
    """Whether operations with this effect have to run one after the other."""
    return _effects.ordered_effects.contains(effect)


def only_prints(equation: Any) -> bool:
    """Whether an equation has no effects but those of `jax.debug`, in no fixed order.

    A derivative rule of our own may have these inside (JAX 0.10 to 0.12).
    """
    allowed = _effects.custom_derivatives_allowed_effects
    return all(allowed.contains(e) and not is_ordered(e) for e in equation.effects)


def type_of(shape: Sequence[int], dtype: Any) -> Any:
    """The type of an array on no mesh."""
    return _core.ShapedArray(tuple(shape), np.dtype(dtype))


def tangent_type(value: Any) -> Any:
    """The type of what a derivative gives for a value."""
    return _core.typeof(value).to_tangent_aval()
