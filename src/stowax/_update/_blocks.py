"""Cutting a leaf of optimizer state into blocks that stream between host and device.

A leaf is cut along its leading axes, so that a block is one piece of memory. All blocks
are alike. Where no even blocks do (a TPU moves whole tiles, and a vocabulary of 30522
rows has no even blocks of whole tiles), a *rest* is left over, smaller than a block: it
needs a second small program, and one axis alone may be cut then. An axis that is
spread over a mesh is cut within the shards: the leaf is looked at with that axis as
two, shards and places in a shard, so that every device streams its own shard and no
block crosses devices. A TPU moves whole tiles: the last axis is never cut ("lane slice
updating is not supported"), and cuts of the axis before it fall between tiles. Nor does
it slice along two axes at once ("async slice only supports slicing in 1 dimension"):
where several are cut, they are looked at as one (`rows`), or only one is cut.

`_find` asks for a cut per leaf, `_run` walks through it.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

from .._layers._axis_order import Order, inverse, lying
from .._units import format_bytes

_MEBIBYTE = 2**20
_FAR = 4
"""How many times smaller than wanted a part may be without a look at larger ones."""

_FEW = 16
"""Blocks of a leaf of up to 16 MiB, at most: a loop's turns take longer than their
bytes say. A small optimizer's state on an H200, in 65 blocks and 16: 11.1 and 4.2 ms.
"""

_TINY = 16
"""How many times smaller than worth a copy a block may be: assumed."""

_ROW_BYTES = 32  # a TPU's tile is 8 rows of 4 bytes, 16 of 2, 32 of 1 high

_WHOLE, _PARTS = 8, (4, 2, 1)
"""Rows that a TPU writes of a rest: whole eights, and what is left by powers of two.

An update of fewer than eight rows is laid out in a tile of 4, 2 or 1. Such a tile is
copied where it lies within one of the buffer's tiles: at an even place of its own size,
which these have one after the other. Of any other size the compiler ends the process
("sublane slicing size not multiple of update chunk sublane size").
"""

_PACKED_BYTES = 4
"""Narrower rows are packed in words of so many bytes, which a TPU does not part."""

_WITH_REST = frozenset(
    {
        *("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p"),
        *("TPU v6 lite", "TPU v6e", "TPU7x"),
    }
)
"""Devices whose compiler copies a part of a tile.

For a TPU v4 it ends the process ("strided host DMA"); a GPU needs no tiles, and has run
with even blocks alone.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """How large blocks are, in bytes per device of the widest array of a leaf.

    A leaf is cut into about `count` blocks. One more than that is copied, so fewer
    would lose time, and more would be small: of a small model's leaf there are no more
    than `_FEW`, or than its MiBs. No block is larger than `largest_bytes`, nor smaller
    than `smallest_bytes`, if the leaf has parts that are not. Leaves under `leaf_bytes`
    are not worth a loop. Blocks are whole tiles of a TPU where they have to be `tiled`,
    and may leave a `rest` on some devices.
    """

    count: int = 64
    smallest_bytes: int = _MEBIBYTE
    largest_bytes: int = 32 * _MEBIBYTE
    leaf_bytes: int = 4 * _MEBIBYTE
    tiled: bool = True
    rest: bool = True

    @classmethod
    def least(
        cls, least_bytes: int, platform: str = "tpu", device_kind: str = ""
    ) -> "BlockSize":
        """Blocks on a platform where `least_bytes` are worth a copy of their own.

        `device_kind` is what JAX calls the device.
        """
        return cls(
            smallest_bytes=least_bytes,
            leaf_bytes=4 * least_bytes,
            tiled=platform == "tpu",
            rest=device_kind in _WITH_REST,
        )

    def target(self, leaf_bytes: int) -> int:
        """Bytes of a block of a leaf that has `leaf_bytes` on each device."""
        wanted = min(leaf_bytes // self.count, self.largest_bytes // 4)
        small = min(leaf_bytes // _FEW, _MEBIBYTE)
        return max(self.smallest_bytes, wanted, small)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A leaf in blocks, in row-major order.

    `view` has the sizes that each axis of the leaf is looked at with: itself, or shards
    and places in a shard. `block` is a block's shape in that view, of all shards.

    A leaf may lie in host memory with its axes in another `order` than typed: then the
    view is of the leaf as it lies. Arrays on the device lie as they are typed, and
    blocks are cut out of those in `typed_rows`.

    Where blocks do not fill the one axis that is cut, `ends` are the sizes along it of
    the parts of the rest, one after the other.
    """

    view: tuple[tuple[int, ...], ...]
    block: tuple[int, ...]
    order: Order = None
    ends: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The leaf's shape in the view."""
        return tuple(size for sizes in self.view for size in sizes)

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks along each axis of the view."""
        return tuple(s // b for s, b in zip(self.shape, self.block, strict=True))

    @property
    def merged(self) -> int:
        """How many leading axes of the view are joined to the one that is cut last.

        They can be if a block has one place on each of them: then it is a piece of the
        joined axis.
        """
        last = max((a for a, n in enumerate(self.grid) if n > 1), default=0)
        return last if all(n == 1 for n in self.block[:last]) else 0

    @property
    def one_axis(self) -> bool:
        """Whether blocks follow one another along one axis of `rows`."""
        return self.merged > 0 or sum(n > 1 for n in self.grid) == 1

    @property
    def rows(self) -> tuple[int, ...]:
        """The leaf's shape as it is sliced: the view's, leading axes joined."""
        joined = self.merged + 1
        return (math.prod(self.shape[:joined]), *self.shape[joined:])

    @property
    def piece(self) -> tuple[int, ...]:
        """A block's shape in `rows`."""
        return self.block[self.merged :]

    @property
    def row_axis(self) -> int:
        """The axis of `rows` that is cut, the first one if several are."""
        return 0 if self.merged else self.first_axis

    @property
    def typed_axes(self) -> tuple[int, ...]:
        """The axes of the view, in the order in which the leaf's type has them."""
        ends = list(itertools.accumulate(len(sizes) for sizes in self.view))
        sizes = zip(ends, self.view, strict=True)
        own = [range(end - len(parts), end) for end, parts in sizes]
        order = self.order or tuple(range(len(own)))
        return tuple(axis for k in inverse(order) for axis in own[k])

    @property
    def typed_axis(self) -> int:
        """The axis of `typed_rows` that is cut, the first one if several are."""
        if self.order is None:
            return self.row_axis
        return self.typed_axes.index(self.first_axis)

    @property
    def typed_rows(self) -> tuple[int, ...]:
        """The shape in which arrays of the leaf's type are sliced on the device."""
        if self.order is None:
            return self.rows
        return tuple(self.shape[axis] for axis in self.typed_axes)

    @property
    def typed_piece(self) -> tuple[int, ...]:
        """A block's shape in `typed_rows`."""
        if self.order is None:
            return self.piece
        return tuple(self.block[axis] for axis in self.typed_axes)

    def spread(self, partition: Sequence[Any]) -> tuple[Any, ...]:
        """How `rows` are spread over a mesh, if the axes as they lie are like this.

        Of an axis that is looked at as two it is the shards that are spread.
        """
        parts = zip(self.view, partition, strict=True)
        viewed = [p for sizes, one in parts for p in (one, *[None] * (len(sizes) - 1))]
        joined = next((p for p in viewed[: self.merged + 1] if p is not None), None)
        return (joined, *viewed[self.merged + 1 :])

    @property
    def count(self) -> int:
        """Number of blocks, without the rest."""
        return math.prod(self.grid)

    def of_part(self, size: int) -> "Cut":
        """The same with a part of the rest for a block: for its shapes alone."""
        block = list(self.block)
        block[self.first_axis] = size
        return dataclasses.replace(self, block=tuple(block), ends=())

    @property
    def first_axis(self) -> int:
        """The first axis of the view that is cut."""
        return next(axis for axis, n in enumerate(self.grid) if n > 1)

    def viewed(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The view's shape for an array with the axes as they lie, some of size one."""
        return tuple(
            part
            for size, sizes in zip(shape, self.view, strict=True)
            for part in (sizes if size == math.prod(sizes) else (1,) * len(sizes))
        )


def cut_leaf(
    shape: Sequence[int],
    per_device: Sequence[int],
    itemsizes: Sequence[int],
    size: BlockSize,
    order: Order = None,
) -> Cut | str:
    """The cut of a leaf, or why there is none.

    **Arguments:** `per_device` is the shape of one device's shard. `itemsizes` are
    those of all arrays that are cut along with the leaf, `order` that of its axes.
    """
    shape, per_device = lying(shape, order), lying(per_device, order)
    current = math.prod(per_device) * max(itemsizes)
    if current == 0:
        return "it has no elements"
    if current < size.leaf_bytes:
        return f"it is small ({format_bytes(current)})"
    if len(shape) < 2:
        return "it has no rows to cut between"
    every = range(len(shape) - 1)
    cuts = [_cut_along(every, shape, per_device, itemsizes, size)]
    if not cuts[0].one_axis:
        cuts = [_cut_along((a,), shape, per_device, itemsizes, size) for a in every]
    shards = math.prod(shape) // math.prod(per_device)

    def weight(cut: Cut) -> int:
        return math.prod(cut.block) * max(itemsizes) // shards

    best = min(cuts, key=weight)
    tiny = not size.tiled and weight(best) * _TINY < size.smallest_bytes
    none = weight(best) > size.largest_bytes or best.count < 2 or tiny
    if size.rest and (none or weight(best) * _FAR < size.target(current)):
        found = (_with_rest(a, shape, per_device, itemsizes, size) for a in every)
        with_rest = next((cut for cut in found if cut), None)
        if with_rest:
            return dataclasses.replace(with_rest, order=order)
    if not none:
        return dataclasses.replace(best, order=order)
    rows, narrow = per_device[-2], min(itemsizes)
    if size.rest and rows % _packed(narrow):
        by = f"a TPU copies rows of {narrow}-byte numbers by {_packed(narrow)}"
        return f"it cannot be cut into blocks: it has {rows} rows, and {by}"
    evenly = "" if size.rest else " evenly"
    return f"its shape {tuple(shape)} cannot be cut{evenly} into small blocks"


def _packed(itemsize: int) -> int:
    """Rows of a type that share the words of a TPU's memory."""
    return max(1, _PACKED_BYTES // itemsize)


def _with_rest(
    cut_axis: int,
    shape: Sequence[int],
    per_device: Sequence[int],
    itemsizes: Sequence[int],
    size: BlockSize,
) -> Cut | None:
    """The cut along one axis in blocks of about the size wanted, and a rest.

    `None` where there are no two such blocks, or rows that a TPU does not write. Rows
    are those of one matrix: several lie in tiles of several, in parts of the rest.
    """
    whole, mine = shape[cut_axis], per_device[cut_axis]
    current = math.prod(per_device) * max(itemsizes)
    rows = cut_axis == len(shape) - 2
    tile = _ROW_BYTES // min(itemsizes) if rows else 1
    most = max(mine * size.target(current) // current, tile if rows else 0)
    fitting = range(most // tile * tile, most // 2, -tile)
    large = current * most > mine * size.largest_bytes
    parted = rows and mine % _packed(min(itemsizes))
    several = rows and math.prod(per_device[:cut_axis]) > 1
    if whole % mine or large or parted or several or not fitting:
        return None
    part = min(fitting, key=lambda part: mine % part)
    rest = mine % part
    if mine < 2 * part:
        return None
    eights = rest - rest % _WHOLE if rows else rest
    ends = (eights, *(n for n in _PARTS if rows and rest & n))
    view: list[tuple[int, ...]] = [(n,) for n in shape]
    block = [[n] for n in shape]
    view[cut_axis] = (whole,) if whole == mine else (whole // mine, mine)
    block[cut_axis] = [part] if whole == mine else [whole // mine, part]
    return Cut(
        view=tuple(view),
        block=tuple(n for parts in block for n in parts),
        ends=tuple(n for n in ends if n),
    )


def _cut_along(
    axes: Collection[int],
    shape: Sequence[int],
    per_device: Sequence[int],
    itemsizes: Sequence[int],
    size: BlockSize,
) -> Cut:
    """The cut along some of the axes, the first ones first."""
    current = math.prod(per_device) * max(itemsizes)
    target = size.target(current)
    view: list[tuple[int, ...]] = []
    block: list[int] = []
    for axis, (whole, mine) in enumerate(zip(shape, per_device, strict=True)):
        part = mine
        if axis in axes and current > target and whole % mine == 0:
            rows = size.tiled and axis == len(shape) - 2
            tile = _ROW_BYTES // min(itemsizes) if rows else 1
            most = mine * size.largest_bytes // current
            part = _part(mine, math.ceil(current / target), max(1, tile), most)
        current = current // mine * part
        if part == mine:
            view.append((whole,))
            block.append(whole)
        else:
            view.append((whole,) if whole == mine else (whole // mine, mine))
            block += [part] if whole == mine else [whole // mine, part]
    return Cut(view=tuple(view), block=tuple(block))


def _part(length: int, pieces: int, multiple: int, most: int) -> int:
    """The largest even part of an axis that makes `pieces`, or the smallest at all.

    Where that is far smaller, and a larger one, up to `most`, is nearer to what is
    wanted, that one: a vocabulary of 30522 is cut in 6 parts, not in 5087.
    """
    parts = [p for p in _divisors(length) if p % multiple == 0 and p < length]
    smaller = [p for p in parts if length // p >= pieces]
    larger = [p for p in parts if length // p < pieces]
    if not smaller or not larger:
        return max(smaller, default=min(larger, default=length))
    wanted, below, above = length / pieces, smaller[-1], larger[0]
    far = below * _FAR < wanted and above / wanted < wanted / below
    return above if far and above <= most else below


def _divisors(length: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
    return sorted({*small, *(length // d for d in small)})
