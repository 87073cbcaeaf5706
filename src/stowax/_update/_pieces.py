"""Where blocks begin, and cutting them out of arrays: of the loops that are traced."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._layers._axis_order import inverse
from ._blocks import Cut


def cut_out(whole: Any, at: Sequence[Any], block: Sequence[int]) -> Any:
    """The block of this shape at `at`, none of whose numbers is negative."""
    return jax.lax.dynamic_slice(whole, _alike(at), block, allow_negative_indices=False)


def put_in(whole: Any, part: Any, at: Sequence[Any]) -> Any:
    """`whole` with `part` at `at`, none of whose numbers is negative."""
    at = _alike(at)
    return jax.lax.dynamic_update_slice(whole, part, at, allow_negative_indices=False)


def _alike(at: Sequence[Any]) -> list[Any]:
    """Places as numbers of one type: under x64 a loop may count with 64 bits."""
    return [jnp.int32(place) for place in at]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a block begins in the cut's `rows`, `typed_rows` and view.

    The shapes of the block are those that `cut` has for it.
    """

    cut: Cut
    rows: Sequence[Any]
    typed: Sequence[Any]
    view: Sequence[Any]


def place_of(cut: Cut, index: Any) -> Place:
    """The place of block `index`."""
    return Place(
        cut=cut,
        rows=starts_in_rows(cut, index),
        typed=typed_starts(cut, index),
        view=view_starts(cut, index),
    )


def places_of_rest(cut: Cut, last: Any) -> Iterator[Place]:
    """The places of the rest's parts; `last` is the number of blocks before them."""
    place, done = place_of(cut, last), 0
    axes = cut.row_axis, cut.typed_axis, cut.first_axis
    for size in cut.ends:
        rows, typed, view = (
            [a + done if k == axis else a for k, a in enumerate(starts)]
            for axis, starts in zip(
                axes, (place.rows, place.typed, place.view), strict=True
            )
        )
        yield Place(cut=cut.of_part(size), rows=rows, typed=typed, view=view)
        done += size


def starts_in_rows(cut: Cut, index: Any) -> list[Any]:
    """Where block `index` begins in the cut's `rows`."""
    if not cut.merged:
        return view_starts(cut, index)
    return [index * cut.piece[0], *[jnp.int32(0)] * (len(cut.piece) - 1)]


def view_starts(cut: Cut, index: Any) -> list[Any]:
    """Where block `index` begins in the cut's view."""
    found: list[Any] = [jnp.int32(0)] * len(cut.shape)
    for axis in reversed(range(len(cut.shape))):
        if cut.grid[axis] > 1:
            place = index if axis == cut.first_axis else index % cut.grid[axis]
            found[axis] = place * cut.block[axis]
            index = index // cut.grid[axis]
    return found


def typed_starts(cut: Cut, index: Any) -> list[Any]:
    """Where block `index` begins in the cut's `typed_rows`."""
    if cut.order is None:
        return starts_in_rows(cut, index)
    found = view_starts(cut, index)
    return [found[axis] for axis in cut.typed_axes]


def block_of(cut: Cut, whole: Any, at: Sequence[Any], index: int | None = None) -> Any:
    """The block at `at` of an array on the device, as blocks lie in host memory.

    `whole` has the cut's `typed_rows`, or with an `index` it has that many of such.
    """
    if index is None:
        block = cut_out(whole, at, cut.typed_piece)
    else:
        block = cut_out(whole, (index, *at), (1, *cut.typed_piece))[0]
    if cut.order is None:
        return block
    return jnp.reshape(jax.lax.transpose(block, inverse(cut.typed_axes)), cut.piece)


def as_typed(cut: Cut, block: Any) -> Any:
    """A block as it lies in host memory, as one of an array on the device."""
    if cut.order is None:
        return block
    return jax.lax.transpose(jnp.reshape(block, cut.block), cut.typed_axes)
