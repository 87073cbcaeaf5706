"""Which equations work on blocks, and in which loop: their levels.

What is made of host leaves element by element runs in loops over blocks. A value that
needs all blocks of another one (a norm, a product) ends a loop: what is made of it runs
in a loop of the next *level*. Nodes outside of loops have levels, too: one of level `k`
needs only loops below `k`, and a loop of level `k` only nodes up to `k`.

A host buffer holds a leaf's old value until its new one is written. So the write has a
level of its own: that of the last loop that reads the old value. If the new value is
made earlier, its maker runs again in that loop. The maker may read other leaves there,
which postpones their writes in turn: `find_levels` repeats this until nothing changes.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from .._jaxprs._jaxpr import Program
from ._feed import Feeds
from ._kinds import elementwise, inputs_of, reduction, shape_of, worked_shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """`member` has the nodes that are in loops, with the level of theirs.

    `value` has the level of every value, `written` that of the write of each leaf.
    `again` are nodes that run once more, at the level of a write.
    """

    member: Mapping[int, int]
    value: Sequence[int]
    written: Mapping[int, int]
    again: frozenset[tuple[int, int]]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Every run of a node in a loop, with its level, in the program's order."""
        return sorted({*self.member.items(), *self.again})


NO_LEVELS = Levels(member={}, value=(), written={}, again=frozenset())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `find_levels` has to know.

    `live` are the nodes that run, `users` the nodes that read each value (without loops
    of stacks that fetch it). `streaming` are the leaves that go through loops over
    blocks. `results` has the new value of each leaf in host memory that gets another
    one, `on_device` are values that the step returns on the device.
    """

    program: Program
    live: Sequence[int]
    users: Mapping[int, Sequence[int]]
    feeds: Feeds
    streaming: Collection[int]
    results: Mapping[int, int]
    on_device: Collection[int]


def find_levels(question: Question) -> Levels:
    """The levels of everything."""
    member, value = _first(question)
    written: dict[int, int] = {}
    while True:
        _postpone(question, member, value, written)
        later = _written(question, member, value, written)
        if later == written:
            break
        written = later
    maker = question.program.maker
    again = {
        (position, written[leaf])
        for leaf, number in question.results.items()
        if (position := maker.get(number)) in member
        and member[position] < written[leaf]
    }
    return Levels(member=member, value=value, written=written, again=frozenset(again))


def _first(question: Question) -> tuple[dict[int, int], list[int]]:
    """Members and values with the lowest level that each can have."""
    program, gradients = question.program, question.feeds.gradients
    streaming = {*question.streaming, *gradients}
    given = frozenset(streaming)
    # What is made of parameters and their gradients is summed up in blocks, too.
    fed = {leaf for leaf, _ in question.feeds.chains.values()}
    wide = {*fed.intersection(streaming), *gradients}
    member: dict[int, int] = {}
    level = [0] * len(program.avals)
    for position in question.live:
        node = program.nodes[position]
        inputs = [i for i in node.inputs if i is not None]
        own = max((level[i] for i in inputs), default=0)
        shape = worked_shape(program, node)
        mine = [i for i in inputs if i in streaming and shape_of(program, i) == shape]
        if mine and elementwise(program, node):
            member[position] = own
            streaming.update(node.outputs)
            if not wide.isdisjoint(mine):
                wide.update(node.outputs)
        elif mine and reduction(program, node) and mine[0] in wide:
            member[position] = own
            own += 1
        else:
            made = [level[i] for i in inputs if i in streaming - given]
            own = max(own, 1 + max(made, default=-1))
        for output in node.outputs:
            level[output] = max(own, level[output] if output in given else 0)
    return member, level


def _postpone(
    question: Question,
    member: dict[int, int],
    value: list[int],
    written: Mapping[int, int],
) -> None:
    """Moves members to the level where they are first used.

    What is made of a leaf alone (its decay) may be needed in a later loop only: there
    the leaf is read, and nothing waits on the device in between. A write is a use, too.
    """
    writes: dict[int, list[int]] = {}
    for leaf, number in question.results.items():
        writes.setdefault(number, []).append(written.get(leaf, 0))
    returned = set(question.on_device)
    for position in sorted(member, reverse=True):
        outputs = question.program.nodes[position].outputs
        users = [u for o in outputs for u in question.users[o]]
        if not returned.isdisjoint(outputs) or any(u not in member for u in users):
            continue
        levels = [member[u] for u in users]
        levels += [level for o in outputs for level in writes.get(o, ())]
        ends = int(reduction(question.program, question.program.nodes[position]))
        first = min(levels, default=0) - ends  # a total is read in a later loop
        if first > member[position]:
            member[position] = first
            for output in outputs:
                value[output] = first + ends


def _written(
    question: Question,
    member: Mapping[int, int],
    value: Sequence[int],
    written: Mapping[int, int],
) -> dict[int, int]:
    """The level of each leaf's write, given what was found before."""
    program, results = question.program, question.results
    found = {i: max(value[n], written.get(i, 0)) for i, n in results.items()}

    def read(leaf: int, level: int) -> None:
        if leaf in found:
            found[leaf] = max(found[leaf], level)

    for position, level in member.items():
        for number in inputs_of(program, [position]):
            if shape_of(program, number) == worked_shape(
                program, program.nodes[position]
            ):
                read(number, level)
    for leaf, level in _fetched(question, value):
        read(leaf, level)
    for leaf, number in results.items():
        read(number, found[leaf])  # another leaf's old value takes its place
        position = program.maker.get(number)
        if position is not None and position in member:
            for operand in inputs_of(program, [position]):
                read(operand, found[leaf])
    return found


def _fetched(question: Question, value: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The leaves that loops of stacks fetch, with the levels of those loops."""
    for position, numbers in question.feeds.served.items():
        inputs = question.program.nodes[position].inputs
        level = max((value[i] for i in inputs if i is not None), default=0)
        for k in numbers:
            if (fed := inputs[k]) is not None:
                yield question.feeds.chains[fed][0], level
