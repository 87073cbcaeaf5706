"""What a function that `jax.jit` made was told.

Served: JAX 0.10 to 0.12.
"""

from typing import Any

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
