"""Layouts of arrays, which JAX has in `jax.experimental`: one more shim (`_jax`).

All of it serves JAX 0.10 to 0.12.
"""

from collections.abc import Sequence
from typing import Any


def _layout() -> Any:
    from jax.experimental import layout  # on demand: it is slow to load

    return layout


def row_major(value: Any) -> Any:
    """`value`, in memory in the order that its shape says."""
    order = _layout().Layout(major_to_minor=tuple(range(value.ndim)))
    return _layout().with_layout_constraint(value, order)


def in_layout(sharding: Any, order: Sequence[int]) -> Any:
    """`sharding`, of arrays whose axes lie in this order, major first.

    JAX takes it for the sharding of a `jax.ShapeDtypeStruct`, for the place of
    `jax.device_put`, and for a result's sharding.
    """
    return _layout().Format(_layout().Layout(major_to_minor=tuple(order)), sharding)


def laid_out(leaf: Any) -> Any:
    """The sharding of an array or a spec, with its layout where it says one."""
    form = getattr(leaf, "format", None)
    return leaf.sharding if getattr(form, "layout", None) is None else form


def order_of(leaf: Any) -> tuple[int, ...] | None:
    """In what order the axes of an array or a spec lie; `None` where it is not said."""
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    return None if layout is None else tuple(layout.major_to_minor)
