"""Putting an array into host memory in an order of its axes that is not its type's.

`jax.device_put` does it on the device, with the whole array there, once as it lay and
once as it is to lie. Arrays that are kept in host memory may be too large for that. So
a large one goes through the device in blocks of its first axis: `lay_out`, for
`plan.place`.
"""

import functools
from typing import Any

import jax

from .. import _jax
from .._jax_layouts import in_layout
from .._layers._axis_order import as_it_is_typed, as_it_lies, lying
from .._layers._host_slots import to_device, to_host

LARGEST_BLOCK = 32 * 2**20
"""Bytes of a block; arrays under two of them go through the device whole."""

_ROW_BYTES = 32  # blocks are cut between a TPU's tiles (`_update._blocks`)


def lay_out(leaf: Any, sharding: Any, order: tuple[int, ...]) -> Any:
    """An array in host memory, placed by `sharding`, its axes in this order there.

    One that is spread over devices goes through them whole, each device's own part.
    """
    rows = _rows(leaf.shape, leaf.dtype.itemsize)
    if not rows or len(sharding.device_set) > 1:
        return jax.device_put(leaf, in_layout(sharding, order))
    here = leaf.sharding if isinstance(leaf, jax.Array) else None
    ready = here is not None and (
        here.memory_kind in (None, "device") and here.device_set == sharding.device_set
    )
    if not ready:
        leaf = jax.device_put(leaf, sharding)
    return in_blocks(sharding, order, rows)(leaf)


def _rows(shape: tuple[int, ...], itemsize: int) -> int:
    """How much of the first axis a block has; 0 where no blocks are needed or even."""
    row = itemsize
    for size in shape[1:]:
        row *= size
    if shape[0] * row < 2 * LARGEST_BLOCK:
        return 0
    tile = _ROW_BYTES // itemsize
    fitting = range(tile, LARGEST_BLOCK // row + 1, tile)
    return max((n for n in fitting if shape[0] % n == 0), default=0)


@functools.lru_cache(maxsize=64)
def in_blocks(sharding: Any, order: tuple[int, ...], rows: int) -> Any:
    """The jitted copy into that order, `rows` of the first axis at a time."""

    def copied(source: Any) -> Any:
        buffer = _jax.empty_on_host(lying(source.shape, order), source.dtype)
        axis = order.index(0)

        def step(i: Any, buffer: Any) -> Any:
            part = jax.lax.dynamic_slice_in_dim(source, i * rows, rows, 0)
            part = to_host(as_it_lies(to_device(part), order))
            return jax.lax.dynamic_update_slice_in_dim(buffer, part, i * rows, axis)

        buffer = jax.lax.fori_loop(0, source.shape[0] // rows, step, buffer)
        return as_it_is_typed(buffer, order)

    return jax.jit(copied, out_shardings=in_layout(sharding, order))
