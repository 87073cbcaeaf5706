"""What a function that `jax.jit` made was told.

Served: JAX 0.10 to 0.12.
"""

from typing import Any

from jax._src.named_sharding import UnspecifiedValue as _Unspecified


def jit_info(function: Any) -> Any:
    """What a function of `jax.jit` was told; `None` of any other."""
    return getattr(function, "_jit_info", None)


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
