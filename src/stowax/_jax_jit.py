"""What a function that `jax.jit` made was told.

Served: JAX 0.10 to 0.12.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
from jax._src.named_sharding import UnspecifiedValue as _Unspecified
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

_Jitted = _jaxlib.PjitFunction


def jit_info(function: Any) -> Any:
    """What a function of `jax.jit` was told; `None` of any other.

    What wraps one (`jax.grad`, a decorator of the user's) has its attributes, too, and
    is another function: only the type tells (JAX 0.10 to 0.12).
    """
    return function._jit_info if isinstance(function, _Jitted) else None


def is_pmapped(function: Any) -> bool:
    """Whether `jax.pmap` made it: a function of its module (JAX 0.10 to 0.12)."""
    return (
        isinstance(function, types.FunctionType)
        and function.__globals__.get("__name__") == jax.pmap.__module__
        and hasattr(function, "lower")
    )


def has_shardings(info: Any) -> bool:
    """Whether `jax.jit` was told where arguments, results or anything else belongs."""
    own = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    layouts = (*info.in_layouts_leaves, *info.out_layouts_leaves)
    options = info.compiler_options_kvs
    return bool(
        any(not isinstance(s, _Unspecified) for s in own)
        or any(layout is not None for layout in layouts)
        or options
    )


def spread_as_told(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose results lie as its own `out_shardings` say where it is nested.

    Over Explicit axes JAX heeds them at the outermost `jax.jit` only; further inside
    it is the types that count. JAX 0.10 to 0.12.
    """
    info = jit_info(function)
    if info is None or all(_explicit(s) is None for s in info.out_shardings_leaves):
        return function
    told = info.out_shardings_treedef.unflatten(info.out_shardings_leaves)

    def spread(sharding: Any, results: Any) -> Any:
        if (parts := _explicit(sharding)) is None:
            return results
        explicit, auto = parts

        def lie(value: Any) -> Any:
            value = jax.sharding.reshard(value, explicit)
            return jax.lax.with_sharding_constraint(value, auto) if auto else value

        return jax.tree.map(lie, results)

    @functools.wraps(function)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return jax.tree.map(spread, told, out, is_leaf=lambda node: node is None)

    return outermost


def _explicit(told: Any) -> tuple[NamedSharding, NamedSharding | None] | None:
    """What a sharding over a mesh with Explicit axes says of these, and of others."""
    spec = told if isinstance(told, PartitionSpec) else getattr(told, "spec", None)
    if told is spec:
        mesh = jax.sharding.get_abstract_mesh()
    else:
        mesh = getattr(told, "mesh", None)
    if spec is None or mesh is None or not mesh.explicit_axes:
        return None
    auto = None
    if mesh.auto_axes:
        auto = NamedSharding(mesh, _of_axes(spec, mesh.auto_axes))
    return NamedSharding(mesh, _of_axes(spec, mesh.explicit_axes)), auto


def _of_axes(spec: PartitionSpec, axes: Any) -> PartitionSpec:
    """The part of `spec` that is over these axes of its mesh."""

    def part(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        mine = tuple(name for name in names if name in axes)
        return mine or None

    return PartitionSpec(*map(part, spec))
