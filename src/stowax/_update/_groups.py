"""The loops over blocks: which equations share one, what it reads, writes and gives.

`_levels` has said which equations work on blocks, and when. Those of one level that
share arrays are a *component*: one loop. `form_groups` makes the loops of components,
and `whole_groups` those that only copy: leaves needed or made as whole arrays.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._jaxprs._jaxpr import Program
from ._blocks import Cut
from ._feed import Feeds, view_of
from ._kinds import inputs_of, reduction, shape_of, worked_shape
from ._lead import Lead
from ._levels import Levels
from ._order import needed_together
from ._places import places_of
from ._record import Group, copying


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What loops are made of.

    `leaves` has the cut of each leaf in host memory, `whole` those that go whole.
    `results` are the new values of those that get one, `on_device` the values that the
    step returns on the device (each with its first output). `cut` gives the cut for
    arrays of one shape, `None` if there is none for all.
    """

    program: Program
    users: Mapping[int, Sequence[int]]
    feeds: Feeds
    levels: Levels
    leaves: Mapping[int, Cut]
    whole: frozenset[int]
    results: Mapping[int, int]
    on_device: Mapping[int, int]
    cut: Callable[[Sequence[int]], Cut | None]

    def streams(self, number: int) -> bool:
        """Whether blocks of a value are fetched from host memory."""
        if number in self.leaves:
            return number not in self.whole
        return number in self.feeds.gradients

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of a value."""
        return shape_of(self.program, number)

    def cut_for(self, hosted: Sequence[int], others: Iterable[int]) -> Cut:
        """The cut of a loop; the first host array's own where there is none for all."""
        cut = self.cut([*hosted, *others])
        gradient = self.feeds.gradients.get(hosted[0])
        return cut or self.leaves[gradient.leaf if gradient else hosted[0]]


def form_groups(parts: Parts) -> list[Group]:
    """The loops for all components in which a host leaf is."""
    program, levels = parts.program, parts.levels
    lead = Lead(
        program=program,
        users=parts.users,
        levels=levels,
        on_device=parts.on_device,
        hosted=parts.feeds.gradients,
    )
    components = _components(program, levels)
    nodes = [lead.extended(own, level) for level, own in components]
    inputs = [inputs_of(program, own) for own in nodes]
    readers: dict[int, set[int]] = collections.defaultdict(set)
    for k, read in enumerate(inputs):
        for number in read:
            readers[number].add(k)

    wanted = {
        *parts.on_device,
        *(n for i, n in parts.results.items() if i in parts.whole),
    }

    def needed(k: int, number: int) -> bool:
        """Whether a value is wanted outside of loop `k`, which makes it."""
        plain = [p for p in parts.users[number] if p not in levels.member]
        elsewhere = readers[number] - {k} or not set(nodes[k]).issuperset(plain)
        return number in wanted or bool(elsewhere)

    writes = _writes(parts, components, nodes, inputs)
    groups = [
        _group(parts, component, own, writes[k], functools.partial(needed, k))
        for k, (component, own) in enumerate(zip(components, nodes, strict=True))
    ]
    return [group for group in groups if group is not None]


def _components(program: Program, levels: Levels) -> list[tuple[int, list[int]]]:
    """Members of one level that share arrays, with it, in the program's order."""
    parent = {run: run for run in levels.runs}

    def root(run: tuple[int, int]) -> tuple[int, int]:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for run in levels.runs:
        position, level = run
        node = program.nodes[position]
        shape = worked_shape(program, node)
        for number in (*node.inputs, *node.outputs):
            if number is not None and shape_of(program, number) == shape:
                first = seen.setdefault((number, level), run)
                parent[root(run)] = root(first)
    found: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for run in levels.runs:
        found[root(run)].append(run[0])
    return [(level, own) for (_, level), own in found.items()]


def _writes(
    parts: Parts,
    components: Sequence[tuple[int, Sequence[int]]],
    nodes: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[int]],
) -> list[list[tuple[int, int]]]:
    """For each component the values that it writes, each with its leaf.

    A new value is written where its maker runs at the level of the write, or else where
    it passes through; one that nothing makes or reads on blocks is not here.
    """
    maker = parts.program.maker
    there: dict[int, list[int]] = collections.defaultdict(list)
    makers: dict[tuple[int, int], int] = {}
    for k, (level, own) in enumerate(components):
        makers.update({(position, level): k for position in own})
        made = [o for p in nodes[k] for o in parts.program.nodes[p].outputs]
        shape = worked_shape(parts.program, parts.program.nodes[own[0]])
        for number in {*made, *inputs[k]}:
            if parts.shape(number) == shape:
                there[number].append(k)
    writes: list[list[tuple[int, int]]] = [[] for _ in components]
    for leaf, number in parts.results.items():
        if leaf in parts.whole or number in parts.whole:
            continue
        level, position = parts.levels.written[leaf], maker.get(number, -1)
        if position in parts.levels.member:
            at = [makers[position, level]]
        else:
            at = [k for k in there[number] if components[k][0] == level]
        if at:
            mine = [k for k in at if leaf in inputs[k]]
            writes[(mine or at)[0]].append((number, leaf))
    return writes


def _group(
    parts: Parts,
    component: tuple[int, Sequence[int]],
    nodes: Sequence[int],
    writes: Sequence[tuple[int, int]],
    needed: Callable[[int], bool],
) -> Group | None:
    """The loop for one component, or `None` if no host leaf is in it.

    `needed` says whether a value is wanted outside of the loop.
    """
    program, (level, own) = parts.program, component
    shape = worked_shape(program, program.nodes[own[0]])
    inputs = inputs_of(program, nodes)
    reads = [i for i in inputs if parts.streams(i) and parts.shape(i) == shape]
    if not reads and not writes:
        return None
    # What runs once more has been given the first time.
    first = [p for p in own if parts.levels.member[p] == level]
    totals = [
        program.nodes[p].outputs[0]
        for p in first
        if reduction(program, program.nodes[p])
    ]
    gives = [
        number
        for p in first
        for number in program.nodes[p].outputs
        if number not in totals and needed(number)
    ]
    if not (writes or gives or totals):
        return None  # on the way to a stack's loop, which does it itself
    sliced = [i for i in inputs if parts.shape(i) == shape and i not in reads]
    views = [view for i in sliced if (view := view_of(program, i))]
    hosted = list(dict.fromkeys([*reads, *(i for _, i in writes)]))
    cut = parts.cut_for(hosted, sliced)
    sliced = [i for i in sliced if i not in {view.number for view in views}]
    return Group(
        cut=cut,
        nodes=tuple(nodes),
        reads=tuple(reads),
        writes=tuple(writes),
        sliced=tuple(sliced),
        spread=tuple(i for i in inputs if parts.shape(i) not in ((), shape)),
        others=tuple(i for i in inputs if parts.shape(i) == ()),
        gives=_placed(parts, gives, sliced, nodes),
        views=tuple(views),
        totals=tuple(totals),
        gradients=_gradients(parts, reads),
    )


def _placed(
    parts: Parts, gives: Sequence[int], sliced: Sequence[int], nodes: Sequence[int]
) -> tuple[tuple[int, int | None], ...]:
    loop = gives, sliced, nodes
    return tuple(places_of(parts.program, parts.users, parts.on_device, loop))


def _gradients(parts: Parts, reads: Sequence[int]) -> tuple[Any, ...]:
    gradients = parts.feeds.gradients
    return tuple(gradients[i] for i in reads if i in gradients)


def joined(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """`groups`, those in one that write over what the others read."""
    groups = list(groups)
    gone: set[int] = set()
    for first, *rest in needed_together(groups):
        one = functools.reduce(Group.beside, (groups[k] for k in rest), groups[first])
        hosted = list(dict.fromkeys([*one.reads, *(i for _, i in one.writes)]))
        gives = [number for number, _ in one.gives]
        groups[first] = dataclasses.replace(
            one,
            cut=parts.cut_for(hosted, (*one.sliced, *(v.number for v in one.views))),
            gives=_placed(parts, gives, one.sliced, one.nodes),
        )
        gone.update(rest)
    return [group for k, group in enumerate(groups) if k not in gone]


def paired(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """`groups`, those with one leaf two by two.

    A buffer goes in or out, not both at once: it takes two to keep both directions of
    the link busy. Loops of one level do not depend on one another.
    """
    result: list[Group] = []
    single: dict[tuple[Cut, int], int] = {}
    for group in groups:
        written = tuple(leaf for _, leaf in group.writes)
        first = None
        if group.nodes and len(group.reads) == 1 and group.reads == written:
            key = group.cut, parts.levels.written[written[0]]
            first = single.pop(key, None)
            if first is None:
                single[key] = len(result)
        if first is None:
            result.append(group)
        else:
            result[first] = result[first].beside(group)
    return result


def whole_groups(
    parts: Parts,
    groups: Sequence[Group],
    plain: Callable[[Sequence[Group]], Sequence[int]],
) -> list[Group]:
    """Loops that only copy.

    `plain` gives the nodes that run outside of all loops, if these are the loops.
    """
    written = {i for group in groups for _, i in group.writes}
    gradients, feeds = parts.feeds.gradients, parts.feeds
    copies = [
        copying(
            parts.leaves[leaf],
            leaf,
            number,
            made_on_host=parts.streams(number),
            gradient=gradients.get(number),
        )
        for leaf, number in parts.results.items()
        if leaf not in written
    ]
    every = [*groups, *copies]
    needed = {i for group in every for i in group.on_device}
    needed.update(parts.on_device)
    for position in plain(every):
        served = feeds.served.get(position, ())
        inputs = parts.program.nodes[position].inputs
        needed.update(
            i for k, i in enumerate(inputs) if k not in served and i is not None
        )
    whole = sorted(needed & parts.leaves.keys())
    return [*copies, *(copying(parts.leaves[i], i) for i in whole)]
