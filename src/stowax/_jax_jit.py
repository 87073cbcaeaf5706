"""What a function that `jax.jit` made was told.

Served: JAX 0.10 to 0.12.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src.named_sharding import UnspecifiedValue as _Unspecified
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

_Jitted = _jaxlib.PjitFunction


def jit_info(function: Any) -> Any:
    """What a function of `jax.jit` was told; `None` of any other.

    What wraps one (`jax.grad`, a decorator of the user's) has its attributes, too, and
    is another function: only the type tells (JAX 0.10 to 0.12).
    """
    return function._jit_info if isinstance(function, _Jitted) else None


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
    if info is None or not any(_is_explicit(s) for s in info.out_shardings_leaves):
        return function
    told = info.out_shardings_treedef.unflatten(info.out_shardings_leaves)

    def spread(sharding: Any, results: Any) -> Any:
        if not _is_explicit(sharding):
            return results
        return jax.tree.map(lambda a: jax.sharding.reshard(a, sharding), results)

    @functools.wraps(function)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return jax.tree.map(spread, told, out, is_leaf=lambda node: node is None)

    return outermost


def _is_explicit(sharding: Any) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and len(mesh.explicit_axes) == len(mesh.axis_names)
