"""Primitives of our own, known to JAX by their types alone; serves JAX 0.10 to 0.12.

A marked function stands in a recorded step as one equation (`_step._recording`). Such
an equation has no meaning to JAX: it cannot be compiled, batched or differentiated.
Where a transformation meets one, it stops with `Unplannable` and says which one it was.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import mesh as _mesh
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching

from ._jax import open_jaxpr


class Unplannable(Exception):
    """Why a marked function cannot be planned where it is called."""


def opaque_primitive(
    name: str, batched: str, differentiated: str
) -> Callable[..., Any]:
    """A function that binds a new primitive.

    **Arguments:** `batched` and `differentiated` say why nothing is planned where
    `jax.vmap` or a derivative meets the equation.

    **Returns:** `bind(operands, results=…, effects=…, **parameters)`, where `results`
    are the types of what comes out.
    """
    primitive = _core.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_effectful_abstract_eval
    def types(*_: Any, results: Any, effects: Any, **__: Any) -> Any:
        return list(results), set(effects)

    def refuse(reason: str) -> Callable[..., Any]:
        def rule(*_: Any, **__: Any) -> Any:
            raise Unplannable(reason)

        return rule

    _batching.primitive_batchers[primitive] = refuse(batched)
    _batching.fancy_primitive_batchers[primitive] = refuse(batched)
    _ad.primitive_jvps[primitive] = refuse(differentiated)

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


def in_manual_mesh() -> bool:
    """Whether what is traced is one device's part of a program (`jax.shard_map`)."""
    return bool(_mesh.get_abstract_mesh().manual_axes)
