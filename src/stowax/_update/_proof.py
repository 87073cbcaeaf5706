"""Proof that a schedule computes what the step says, whoever made the schedule.

A host buffer holds a leaf's old value until a loop writes the new one. Whoever reads
the old value after that gets the new one, and nothing looks wrong but the numbers. So
`prove` runs a schedule once with *versions* in place of arrays: every buffer and every
array on the device is known by the number of the value that it holds. Each read is
checked against what is there at that moment, each loop's equations against what blocks
allow, and at the end each result against the program.

It takes a program and a finished schedule, and nothing else: not levels, not why a loop
was formed. It runs on every plan, in milliseconds. `run_streamed` refuses a schedule
that is not proven.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from .. import _jax
from .._errors import InternalError
from .._jaxprs._jaxpr import Node, Program
from .._layers._axis_order import lying
from ._blocks import Cut
from ._host import runs_on_host
from ._proof_blocks import why_not_on_blocks, why_not_total
from ._proof_feeds import why_no_chain, why_no_gradient, why_no_view
from ._record import Group, Streamed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """What could not be proven: of which leaf (`None`: of no one leaf), and why."""

    leaf: int | None
    reason: str


def not_proven(unproven: Sequence[Unproven]) -> InternalError:
    """The error for a schedule that must not run."""
    first = unproven[0]
    of = "" if first.leaf is None else f" for the step's flat argument {first.leaf}"
    more = f" (and {len(unproven) - 1} more)" if len(unproven) > 1 else ""
    return InternalError(
        f"stowax: the streamed update is not proven to give the step's numbers{of}: "
        f"{first.reason}{more}. This is a mistake of stowax's own; nothing was run. "
        "Please report it. Until it is mended, plan with pin={'optimizer state': "
        "'keep', 'parameter': 'keep'}."
    )


def prove(streamed: Streamed, on_host: Collection[int] = ()) -> list[Unproven]:
    """What of a schedule could not be proven; empty if it gives the step's numbers.

    **Arguments:** `on_host` are the leaves that the host's processor updates.
    """
    proof = _Proof(streamed, on_host)
    for item in streamed.schedule:
        if isinstance(item, Group):
            proof.group(item)
        else:
            proof.node(item)
    proof.end()
    return list(dict.fromkeys(proof.found))


class _Proof:
    """A run with versions: `buffer` has what each host buffer holds.

    `device` are the values that are on the device, `lying` those that loops of stacks
    have left in host memory, `only_read` the leaves that are never written.
    """

    def __init__(self, streamed: Streamed, on_host: Collection[int]):
        self.streamed, self.on_host = streamed, on_host
        self.program: Program = streamed.program
        self.found: list[Unproven] = []
        hosted = {*streamed.host_inputs}
        self.buffer = {leaf: leaf for leaf in streamed.host_outputs.values()}
        self.only_read = hosted - self.buffer.keys()
        inputs = range(self.program.input_count)
        self.device = {i for i in inputs if i not in hosted}
        first = self.program.input_count
        self.device.update(range(first, first + self.program.const_count))
        self.lying: set[int] = set()
        self.ran: collections.Counter[int] = collections.Counter()
        self.rows: dict[int, tuple[object, ...]] = {}
        if len(self.buffer) < len(streamed.host_outputs):
            self._say(None, "two results take the place of one array")
        for leaf in self.buffer.keys() - hosted:
            self._say(leaf, "its result is in host memory, and it is not")

    def _say(self, leaf: int | None, reason: str, node: Node | None = None) -> None:
        what = f"{node.described} " if node else ""
        self.found.append(Unproven(leaf=leaf, reason=what + reason))

    def _leaf_of(self, number: int) -> int | None:
        """The leaf that a value stands for: itself, or that of a gradient."""
        gradient = self.streamed.feeds.gradients.get(number)
        if gradient is not None:
            return gradient.leaf
        return number if number in self.buffer or number in self.only_read else None

    def _old(self, leaf: int, node: Node | None = None) -> None:
        """A leaf's buffer has to hold its old value still: something reads that."""
        if self.buffer.get(leaf, leaf) != leaf:
            self._say(leaf, _STALE if node else f"a loop {_STALE}", node)

    def _available(
        self, number: int, node: Node | None, leaf: int | None = None
    ) -> None:
        """A whole value has to be on the device, for a node or a loop."""
        if number not in self.device:
            mine = self._leaf_of(number)
            what = "a value" if mine is None else "it"
            reason = f"needs {what} on the device, where it is not"
            reason = reason if node else f"a loop {reason}"
            self._say(leaf if mine is None else mine, reason, node)

    def node(self, position: int) -> None:
        """A node outside of loops."""
        node, feeds = self.program.nodes[position], self.streamed.feeds
        self.ran[position] += 1
        served = feeds.served.get(position, ())
        for k, number in enumerate(node.inputs):
            if k in served:
                self._fed(number, node)
            elif number is not None:
                self._available(number, node)
        gone = set(feeds.host_outputs(self.program, position)) if served else set()
        for k, number in enumerate(node.outputs):
            (self.lying if k in gone else self.device).add(number)

    def _fed(self, number: int | None, node: Node) -> None:
        """What a loop of a stack fetches from host memory, layer by layer."""
        chain = self.streamed.feeds.chains.get(-1 if number is None else number)
        if chain is None or number is None:
            self._say(None, "fetches a value that comes from no leaf", node)
            return
        leaf, _ = chain
        if leaf not in self.buffer and leaf not in self.only_read:
            self._say(leaf, "fetches it from host memory, where it is not", node)
        elif (reason := why_no_chain(self.program, number, chain)) is not None:
            self._say(leaf, reason)
        else:
            self._old(leaf, node)

    def group(self, group: Group) -> None:
        """One loop over blocks: all reads, then all that it makes, then all writes."""
        if runs_on_host(group, self.on_host):
            for number in (*group.sliced, *group.spread, *(n for n, _ in group.gives)):
                self._say(
                    self._leaf_of(number), "the host updates what it does not have"
                )
        self._cut(group)
        blocks = self._reads(group)
        made = self._nodes(group, blocks)
        for leaf, count in collections.Counter(i for _, i in group.writes).items():
            if count > 1:
                self._say(leaf, "two values are written to it in one loop")
        for value, leaf in group.writes:
            if leaf not in self.buffer:
                self._say(leaf, "a loop writes to it, and it is not in host memory")
            elif value not in made:
                self._say(leaf, "its new value is written where it was not made")
            elif not _same_kind(self.program, value, leaf):
                self._say(leaf, "a value of another type is written to it")
            self.buffer[leaf] = value
        taken = [place for _, place in group.gives if place is not None]
        for number, place in group.gives:
            self._given(group, number, place, made, taken)
        self.device.update(group.totals)

    def _given(
        self,
        group: Group,
        number: int,
        place: int | None,
        made: Collection[int],
        taken: Sequence[int],
    ) -> None:
        """A whole array that comes out of a loop."""
        leaf = self._owner(group)
        if number not in made:
            self._say(leaf, "a loop gives a value that it does not make")
        if place is not None and (
            place not in group.sliced
            or taken.count(place) > 1
            or not _same_kind(self.program, number, place)
        ):
            self._say(leaf, "a loop's result takes the place of another array")
        self.device.add(number)

    def _owner(self, group: Group) -> int | None:
        """A leaf to name where something is wrong with a loop."""
        named = (*(i for _, i in group.writes), *group.reads, *group.spread)
        leaves = (self._leaf_of(number) for number in named)
        return next((leaf for leaf in leaves if leaf is not None), None)

    def _cut(self, group: Group) -> None:
        """Whether blocks are all of every array of a loop, which lies as they do."""
        cut, program, orders = group.cut, self.program, self.streamed.orders
        owner = self._owner(group)
        if not _complete(cut):
            self._say(owner, "its blocks do not make up the whole of it")
        arrays = (*group.reads, *group.sliced, *(i for _, i in group.writes))
        for number in (*arrays, *(view.number for view in group.views)):
            shape = tuple(program.avals[number].shape)
            mine = self._leaf_of(number)
            if not shape or lying(shape, cut.order) != _whole(cut):
                self._say(
                    owner if mine is None else mine, "it is not cut as its loop is"
                )
            elif mine is None or number in group.sliced:
                continue  # on the device, as it is typed
            elif orders.get(mine) != cut.order:
                self._say(mine, "its axes lie otherwise than its loop's blocks")

    def _reads(self, group: Group) -> set[int]:
        """The values whose blocks, or which themselves, a loop begins with."""
        gradients = {value.number: value for value in group.gradients}
        for number in group.reads:
            if number in gradients:
                self._gradient(group, number)
            elif number in self.buffer or number in self.only_read:
                self._old(number)
            else:
                self._say(
                    self._owner(group), "a loop fetches what is not in host memory"
                )
        leaf = self._owner(group)
        for number in (*group.sliced, *group.spread, *group.others):
            self._available(number, None, leaf)
        for view in group.views:
            self._available(view.whole, None, leaf)
            if (reason := why_no_view(self.program, view)) is not None:
                self._say(leaf, reason)
        if any(self.program.avals[number].shape for number in group.others):
            self._say(leaf, "a loop takes an array for a single number")
        views = (view.number for view in group.views)
        return {*group.reads, *group.sliced, *group.others, *views}

    def _gradient(self, group: Group, number: int) -> None:
        """A gradient that a loop reads where the layers' loop has left it."""
        value = next(v for v in group.gradients if v.number == number)
        feeds = self.streamed.feeds
        if feeds.gradients.get(number) != value or value.made not in self.lying:
            self._say(value.leaf, "its gradient is not in host memory where it is read")
            return
        reason = why_no_gradient(self.program, feeds, value)
        if reason is not None:
            self._say(value.leaf, reason)
        if value.index is not None:
            partition = self.streamed.partitions.get(value.leaf)
            spread = None if partition is None else group.cut.spread(partition)
            rows = (group.cut.rows, group.cut.row_axis, spread)
            if self.rows.setdefault(value.made, rows) != rows:
                self._say(
                    value.leaf, "loops cut the buffer of its gradient differently"
                )

    def _nodes(self, group: Group, blocks: Collection[int]) -> set[int]:
        """All values that a loop has for a block in the end."""
        program, leaf = self.program, self._owner(group)
        shape = _typed(group.cut)
        there = {*blocks}
        spread = {i for i in group.spread if i in self.device}
        made: list[int] = []
        for position in group.nodes:
            node = program.nodes[position]
            made += node.outputs
            if node.outputs and node.outputs[0] in group.totals:
                continue  # made of all blocks, once these are there
            for number in node.inputs:
                if number is not None and number not in there | spread:
                    self._say(leaf, f"reads in a loop {_late(group, number)}", node)
            reason = why_not_on_blocks(program, node, shape, there)
            if reason is not None:
                self._say(leaf, reason, node)
            there.update(node.outputs)
        self._totals(group, there, made, shape)
        return there

    def _totals(
        self,
        group: Group,
        there: Collection[int],
        made: Collection[int],
        shape: tuple[int, ...],
    ) -> None:
        """Numbers that a loop makes of all blocks."""
        for number in group.totals:
            position = self.program.maker.get(number)
            if position is None or number not in made:
                self._say(self._owner(group), "a loop sums up what it does not make")
                continue
            node = self.program.nodes[position]
            reason = why_not_total(self.program, node, shape, there)
            if reason is not None:
                self._say(self._owner(group), reason, node)

    def end(self) -> None:
        """Whether every result is where it is to be, and is what the program says."""
        feeds = self.streamed.feeds
        for k, number in enumerate(self.program.outputs):
            leaf = self.streamed.host_outputs.get(k)
            if leaf is not None:
                if self.buffer.get(leaf) == number:
                    continue
                none = self.buffer.get(leaf) == leaf
                what = "is not written" if none else "is written over"
                self._say(leaf, f"its new value {what}")
            elif isinstance(number, int) and number not in self.device:
                if number in feeds.gradients and feeds.place(number) in self.lying:
                    continue
                self._say(self._leaf_of(number), "a result of the step is not made")
        for position, node in enumerate(self.program.nodes):
            if _jax.has_effects(node.equation) and self.ran[position] != 1:
                self._say(None, f"runs {self.ran[position]} times", node)


_STALE = "reads its old value after the new one has taken its place"


def _late(group: Group, number: int) -> str:
    if number in group.totals:
        return "a sum that the loop has not finished"
    return "a value that is not there yet"


def _same_kind(program: Program, one: int, other: int) -> bool:
    a, b = program.avals[one], program.avals[other]
    return a.shape == b.shape and a.dtype == b.dtype


def _whole(cut: Cut) -> tuple[int, ...]:
    """The shape of what a cut cuts, as it lies."""
    return tuple(math.prod(sizes) for sizes in cut.view)


def _typed(cut: Cut) -> tuple[int, ...]:
    """The same, as it is typed."""
    whole = _whole(cut)
    if cut.order is None:
        return whole
    typed = dict(zip(cut.order, whole, strict=True))
    return tuple(typed[axis] for axis in range(len(whole)))


def _complete(cut: Cut) -> bool:
    """Whether blocks and rest are all of what a cut cuts, each element once."""
    if not all(cut.block) or cut.count < 2:
        return False
    sizes: Iterable[tuple[int, int]] = zip(cut.shape, cut.block, strict=True)
    over = {axis: size % block for axis, (size, block) in enumerate(sizes)}
    left = {axis: n for axis, n in over.items() if n}
    if not cut.ends:
        return not left
    # The rest begins where one more block would: one axis is cut, and no other.
    alone = sum(n > 1 for n in cut.grid) == 1
    return alone and min(cut.ends) > 0 and left == {cut.first_axis: sum(cut.ends)}
