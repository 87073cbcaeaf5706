"""One loop over blocks of arrays in host memory: what it carries, and its iterations.

A loop's iteration fetches the block of each leaf, computes, and writes what the
iteration *before* it computed. So blocks go in and out at once, which takes two leaves:
a buffer that is read and written in one iteration is either read first or written
first, or the compiler copies it whole. The largest leaf is written first and then read,
the others are read first and then written; while the one goes out, the others come in.
`_after` makes the order a dependency. No block is left over after a loop: copies
outside of loops would be moved, some to the very beginning of the step, and hold
memory.

Of an array that even blocks do not fill there is a *rest*, smaller than one of them.
Its parts go the same way after the loop (`Loop.end`): they are read from what the loop
has left, so nothing of them can be moved to before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._jaxprs._jaxpr import Node, Program
from .._layers._axis_order import as_it_lies
from .._layers._host_layers import split
from .._layers._host_slots import empty_array, to_device, to_host
from ._awaited import after_all, can_wait_for, in_turn, zero_after
from ._feed import HostValue
from ._pieces import (
    Place,
    as_typed,
    block_of,
    cut_out,
    place_of,
    places_of_rest,
    put_in,
    starts_in_rows,
)
from ._record import Group
from ._totals import first_total, joined_totals, next_total


def scope_name(leaf: int) -> str:
    """Named scope of the copies of the leaf that is the step's input `leaf`."""
    return f"stowax.state.{leaf}"


def gradient_scope(leaf: int) -> str:
    """Named scope of the copies of a gradient in host memory, by its parameter."""
    return f"stowax.gradient.{leaf}"


class Loop:
    """One group's loop.

    Its carry: host buffers by leaf, results by number, blocks that wait to be written
    by leaf, totals by number, and a number that is zero, which no compiler knows. Every
    place in host memory is computed with it: a GPU's compiler is wrong about places
    that it works out beforehand (`_hlo._offsets`).
    """

    def __init__(
        self,
        program: Program,
        group: Group,
        env: Mapping[int, Any],
        in_turn: bool,
        spread: Mapping[int, Any],
    ):
        self.in_turn, self.spread = in_turn, spread
        self.program, self.group, cut = program, group, group.cut
        self.scalars = {i: env[i] for i in group.others}
        self.sliced = {i: jnp.reshape(env[i], cut.typed_rows) for i in group.sliced}
        self.views = {
            v: jnp.reshape(env[v.whole], (-1, *cut.typed_rows)) for v in group.views
        }
        self.env = env
        self.makes = {leaf: value for value, leaf in group.writes}
        avals = program.avals
        both = [leaf for leaf in group.reads if leaf in self.makes]
        weight = {leaf: avals[leaf].dtype.itemsize for leaf in both}
        self.first = max(both, key=weight.__getitem__, default=None)
        """The leaf that is written before it is read."""

    def start(self, host: Mapping[int, Any], signs: Sequence[Any]) -> Any:
        """The carry of the first iteration, which begins after `signs` are there."""
        group, avals = self.group, self.program.avals
        leaves = dict.fromkeys([i for i in group.reads if i in host] + [*self.makes])
        buffers = {leaf: jnp.reshape(host[leaf], group.cut.rows) for leaf in leaves}
        results = {
            number: empty_array(group.cut.typed_rows, avals[number])
            if place is None
            else self.sliced[place]
            for number, place in group.gives
        }
        waiting, piece = {}, group.cut.piece
        # Written over by the next iteration; there when the loop may begin.
        (blank,) = after_all([0], signs if self.first is None else ())
        for leaf in self.makes:
            if leaf == self.first:
                # Its first block goes back as it came, before it is read.
                at = after_all([0] * len(piece), signs)
                waiting[leaf] = self._fetch(buffers[leaf], leaf, at, piece)
            else:
                waiting[leaf] = jnp.full(piece, blank, avals[leaf].dtype)
        # Signs may be constants: a compiler knows those.
        data = [waiting[self.first]] if self.first is not None else []
        data = data or [*self.sliced.values(), *self.views.values()][:1]
        data = data or self._arguments()[:1]
        zero = zero_after([*data, *signs])
        totals = {n: first_total(self.program, n, piece) for n in group.totals}
        return buffers, results, waiting, totals, zero

    def _arguments(self) -> list[Any]:
        """The step's own on the device, for a loop that only brings leaves there."""
        given = range(self.program.input_count)
        there = [self.env[i] for i in given if i in self.env]
        return [value for value in there if can_wait_for(value)]

    def step(self, i: Any, carry: Any) -> Any:
        """Iteration `i`: writes block `i - 1`, fetches and computes block `i`.

        The last one, `i == count`, only writes: what it computes is dropped.
        """
        buffers, results, waiting, totals, zero = carry
        buffers, totals, cut = dict(buffers), dict(totals), self.group.cut
        i = jnp.int32(i)
        place = place_of(cut, jnp.minimum(jnp.maximum(i, zero), cut.count - 1))
        # Two ways to the same place: were the index of the first write the other
        # writes' too, a GPU's compiler would compute both at once, after the fetch.
        first, before = (
            starts_in_rows(cut, jnp.maximum(i - 1, zero)),
            starts_in_rows(cut, jnp.maximum(jnp.maximum(i, zero) - 1, 0)),
        )
        fetched = {}
        for leaf in sorted(buffers, key=lambda leaf: leaf != self.first):
            block = waiting.get(leaf)
            if leaf == self.first:
                buffers[leaf] = self._write(buffers[leaf], block, leaf, first)
                fetched[leaf] = self._fetch(buffers[leaf], leaf, place.rows, cut.piece)
                continue
            if leaf in self.group.reads:
                fetched[leaf] = self._fetch(buffers[leaf], leaf, place.rows, cut.piece)
            if block is not None:
                at = before
                if leaf in fetched and self.in_turn:
                    at, block = in_turn(at, block, fetched[leaf], zero)
                buffers[leaf] = self._write(buffers[leaf], block, leaf, at)
        blocks = self._blocks(fetched, results, place)
        values = self._compute(blocks, place)
        written = {}
        for number, whole_at in self.group.gives:
            whole = results[number]
            own = whole_at is None
            old = block_of(cut, whole, place.typed) if own else blocks[whole_at]
            last = jax.lax.broadcast(i >= cut.count, cut.piece)
            new = jax.lax.select(last, old, values[number])
            written[number] = put_in(whole, as_typed(cut, new), place.typed)
        made = {leaf: values[value] for leaf, value in self.makes.items()}
        for number, total in totals.items():
            more = next_total(self.program, number, total, values)
            last = jax.lax.broadcast(i >= cut.count, total.shape)
            totals[number] = jax.lax.select(last, total, more)
        return buffers, written, made, totals, zero

    def end(self, carry: Any) -> Any:
        """The carry of the last iteration, once the rest is done, too.

        What waits in it is the rest's, already written.
        """
        buffers, results, _, totals, zero = carry
        cut = self.group.cut
        if not cut.ends:
            return carry
        # A TPU's compiler checks a place that it knows.
        last = jnp.maximum(zero, cut.count) if self.in_turn else jnp.int32(cut.count)
        buffers, results, totals = dict(buffers), dict(results), dict(totals)
        made: dict[int, Any] = {}
        for place in places_of_rest(cut, last):
            piece = place.cut.piece
            fetched = {
                leaf: self._fetch(buffer, leaf, place.rows, piece)
                for leaf, buffer in buffers.items()
                if leaf in self.group.reads
            }
            values = self._compute(self._blocks(fetched, results, place), place)
            for number, whole in results.items():
                new = as_typed(place.cut, values[number])
                results[number] = put_in(whole, new, place.typed)
            made = {leaf: values[value] for leaf, value in self.makes.items()}
            for leaf, block in made.items():
                at = place.rows
                if leaf in fetched and self.in_turn:
                    at, block = in_turn(at, block, fetched[leaf], zero)
                buffers[leaf] = self._write(buffers[leaf], block, leaf, at)
            for number, total in totals.items():
                own = first_total(self.program, number, piece)
                own = next_total(self.program, number, own, values)
                totals[number] = joined_totals(self.program, number, total, own)
        return buffers, results, made, totals, zero

    def _blocks(
        self, fetched: Mapping[int, Any], results: Mapping[int, Any], place: Place
    ) -> dict[int, Any]:
        """The block at a place of every array that the loop reads, by number.

        `fetched` are those that are there already.
        """
        cut, typed = place.cut, place.typed
        # What is written in an input's place is read from there, too: the input itself
        # beside it would be a second array.
        taken = {into: results[number] for number, into in self.group.gives}
        found = dict(fetched)
        for i, array in self.sliced.items():
            found[i] = block_of(cut, taken.get(i, array), typed)
        for view, whole in self.views.items():
            found[view.number] = block_of(cut, whole, typed, view.index)
        for value in self.group.gradients:
            found[value.number] = self.fetch_gradient(value, place.rows, cut.piece)
        for leaf in self.group.reads:
            if leaf not in found:  # nothing takes its place
                whole = jnp.reshape(self.env[leaf], cut.rows)
                found[leaf] = self._fetch(whole, leaf, place.rows, cut.piece)
        return found

    def _fetch(
        self, buffer: Any, leaf: int, at: Sequence[Any], piece: Sequence[int]
    ) -> Any:
        with jax.named_scope(scope_name(leaf)):
            block = to_device(cut_out(buffer, at, piece))
            return split(block, self.spread.get(leaf))

    def fetch_gradient(
        self, value: HostValue, at: Sequence[Any], piece: Sequence[int]
    ) -> Any:
        """The block at `at` of a gradient that a stack's loop left in host memory."""
        cut, shape, at = self.group.cut, [*self.group.cut.rows], [*at]
        if value.index is not None:
            axis = cut.row_axis  # where the layers are, too (`_fed`)
            at[axis] += value.index * shape[axis]
            shape[axis] = -1
        with jax.named_scope(gradient_scope(value.leaf)):
            whole = jnp.reshape(self.env[value.made], shape)
            return to_device(cut_out(whole, at, piece))

    def _write(self, buffer: Any, block: Any, leaf: int, at: Sequence[Any]) -> Any:
        with jax.named_scope(scope_name(leaf)):
            block = split(block, self.spread.get(leaf))
            return put_in(buffer, to_host(block), at)

    def _compute(self, blocks: Mapping[int, Any], place: Place) -> dict[int, Any]:
        """Every value of the group, of the blocks at a place."""
        group = self.group
        values = {**blocks, **self.scalars}
        for position in group.nodes:
            node = self.program.nodes[position]
            if node.outputs[0] in group.totals:
                continue  # made of all blocks
            operands = [
                atom.val
                if number is None
                else values[number]
                if number in values
                else self._spread(node, number, place)
                for number, atom in zip(node.inputs, node.equation.invars, strict=True)
            ]
            if node.equation.primitive.name == "broadcast_in_dim":
                # A literal is a number of Python's; the equation says of which type.
                small = jnp.asarray(operands[0], node.equation.outvars[0].aval.dtype)
                axes = range(small.ndim)
                out = [jax.lax.broadcast_in_dim(small, place.cut.piece, axes)]
            elif node.equation.primitive.name == "sharding_constraint":
                out = operands
            else:
                out = _jax.bind_here(node.equation, operands)
            values.update(zip(node.outputs, out, strict=True))
        return values

    def _spread(self, node: Node, number: int, place: Place) -> Any:
        """Of an array that is broadcast, the part that belongs to the place."""
        cut, whole = place.cut, self.env[number]
        axes = node.equation.params.get("broadcast_dimensions", range(whole.ndim))
        shape = [1] * len(cut.view)
        for axis, size in zip(axes, whole.shape, strict=True):
            shape[axis] = size
        whole = as_it_lies(jnp.reshape(whole, shape), cut.order)
        whole = jnp.reshape(whole, cut.viewed(whole.shape))
        cuts = [mine == size for mine, size in zip(whole.shape, cut.shape, strict=True)]
        starts = [a if c else 0 for a, c in zip(place.view, cuts, strict=True)]
        block = [b if c else 1 for b, c in zip(cut.block, cuts, strict=True)]
        return jnp.reshape(cut_out(whole, starts, block), block[cut.merged :])
