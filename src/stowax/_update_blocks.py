"""Cutting a leaf of optimizer state into blocks that stream between host and device.

A leaf is cut along its leading axes, so that a block is one piece of memory, or along
the next axis that can be cut where those are spread over a mesh: every device then
streams its own shard, and no block crosses devices. All blocks are alike; there is no
remainder, which would need a second program. A TPU moves whole tiles, so cuts of the
last two axes fall between them.

`_update_find` asks for a cut per leaf, `_update_run` walks through it.
"""

import dataclasses
import math
from collections.abc import Sequence

_MEBIBYTE = 2**20
# What a TPU's memory is tiled by: 8 rows (of 4 bytes) by 128 columns; a vector by 1024.
_COLUMNS, _ROW_BYTES, _VECTOR = 128, 32, 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """How large blocks are, in bytes per device of the widest array of a leaf.

    A leaf is cut into about `count` blocks: one more than that is copied, so fewer would
    lose time, and more would be small. No block is smaller than `smallest_bytes` or
    larger than `largest_bytes`. Leaves under `leaf_bytes` are not worth a loop.
    """

    count: int = 64
    smallest_bytes: int = _MEBIBYTE
    largest_bytes: int = 32 * _MEBIBYTE
    leaf_bytes: int = 4 * _MEBIBYTE

    def target(self, leaf_bytes: int) -> int:
        """Bytes of a block of a leaf that has `leaf_bytes` on each device."""
        wanted = leaf_bytes // self.count
        return max(self.smallest_bytes, min(wanted, self.largest_bytes // 4))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A leaf of `shape` in `count` blocks of shape `block`, in row-major order."""

    shape: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks along each axis."""
        return tuple(s // b for s, b in zip(self.shape, self.block, strict=True))

    @property
    def count(self) -> int:
        """Number of blocks."""
        return math.prod(self.grid)

    @property
    def first_axis(self) -> int:
        """The first axis that is cut."""
        return next(axis for axis, n in enumerate(self.grid) if n > 1)


def cut_leaf(
    shape: Sequence[int],
    per_device: Sequence[int],
    itemsizes: Sequence[int],
    size: BlockSize,
) -> Cut | str:
    """The cut of a leaf, or why there is none.

    **Arguments:** `per_device` is the shape of one device's shard: axes that differ
    from `shape` are spread over a mesh and stay whole. `itemsizes` are those of all
    arrays that are cut along with the leaf.
    """
    shape, block, itemsize = tuple(shape), list(per_device), max(itemsizes)
    leaf_bytes = math.prod(block) * itemsize
    if leaf_bytes == 0:
        return "it has no elements"
    if leaf_bytes < size.leaf_bytes:
        return f"it is small ({leaf_bytes} bytes)"
    target = size.target(leaf_bytes)
    for axis, (whole, mine) in enumerate(zip(shape, per_device, strict=True)):
        current = math.prod(block) * itemsize
        if current <= target:
            break
        if whole == mine:
            multiple = _multiple(axis, len(shape), min(itemsizes))
            block[axis] = _part(mine, math.ceil(current / target), multiple)
    cut = Cut(
        shape=shape,
        block=tuple(
            s if p != s else b for s, p, b in zip(shape, per_device, block, strict=True)
        ),
    )
    if math.prod(block) * itemsize > size.largest_bytes or cut.count < 2:
        spread = [a for a, p in enumerate(per_device) if p != shape[a]]
        but = f" without cutting axes {spread}, which are sharded" if spread else ""
        return f"its shape {shape} cannot be cut evenly into small blocks{but}"
    return cut


def _multiple(axis: int, rank: int, itemsize: int) -> int:
    """What the size of a part of this axis has to be a multiple of."""
    if rank == 1:
        return _VECTOR
    if axis == rank - 1:
        return _COLUMNS
    if axis == rank - 2:
        return max(1, _ROW_BYTES // itemsize)
    return 1


def _part(length: int, pieces: int, multiple: int) -> int:
    """The largest even part of an axis that makes at least `pieces`, else the smallest."""
    parts = [p for p in _divisors(length) if p % multiple == 0]
    enough = [p for p in parts if length // p >= pieces]
    return max(enough, default=min(parts, default=length))


def _divisors(length: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
    return sorted({*small, *(length // d for d in small)})
