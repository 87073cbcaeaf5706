"""Finding what a training step does to each leaf of its state element by element.

Optimizer state in host memory costs no device memory only if it passes through the
device in blocks. A step written with whole arrays can be run in blocks wherever it
works element by element: `stream_update` finds those parts in the step's own jaxpr,
whatever optimizer wrote them, and says why where it cannot. `_run` runs them.

How. From each host leaf, follow the values that are made of it element by element, with
arrays of its shape and with scalars: moments, bias correction, the update, the new
parameter. All such equations that share arrays form a *group*: one loop over blocks,
which reads each leaf once and writes it once. A value that anything else needs (a norm,
a product) comes out of the loop as a whole array on the device; what is made from it
again element by element forms a group of the next *level*, in a loop after it. So
between two equations of a group there is never a way around through the outside.

Equations that lead up to a group (the gradient times the clip factor) are run inside of
it where that needs no more arrays than it saves: outside, their results would be whole
arrays. Scalars are computed outside, once.

A leaf that is needed whole (matrix functions, row statistics, another shape) is copied
in, worked on and copied out by loops of its own, one leaf after the other.
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .._jaxprs._jaxpr import Program
from .._layers._axis_order import Order
from .._layers._boundary import Emission
from ._blocks import BlockSize, Cut, cut_leaf
from ._feed import NOTHING, find_feeds, users_besides, view_of
from ._inline import inline_update
from ._kinds import elementwise, inputs_of, reduction, worked_shape
from ._lead import Lead
from ._places import places_of
from ._record import Group, Streamed, copying, cut_in_several_ways, in_order, report


def stream_update(
    jaxpr: Any,
    host_inputs: Mapping[int, int | None],
    *,
    per_device: Mapping[int, Sequence[int]] | None = None,
    orders: Mapping[int, Order] | None = None,
    size: BlockSize | None = None,
    boundary: Mapping[str, Emission] | None = None,
    returned: bool = False,
) -> Streamed:
    """Finds how `jaxpr` can run with some of its inputs in host memory.

    **Arguments:** `jaxpr` is a whole step's, traced with everything on the device.
    `host_inputs` says of each input that is to live in host memory which output it
    becomes (both flat positions), `None` of what is only read. `per_device` has the
    shapes of one device's shards of those that are spread over a mesh, `orders` how
    those lie that do not lie as they are typed: alike, if they share a loop. `boundary`
    has the loops of stacks that stand in `jaxpr`: what they read of the host inputs
    they fetch layer by layer, and leave its gradients in host memory where all that
    reads those works on blocks, or, if they may be `returned` so, the step does.
    """
    boundary, orders = boundary or {}, orders or {}
    program = inline_update(jaxpr, host_inputs, boundary)
    on_device: set[int] = set()
    while True:
        finder = _Finder(program, per_device or {}, orders, size, boundary, on_device)
        found = finder.find(host_inputs, returned)
        whole = finder.needed_whole(found)
        if not whole:
            return found
        on_device |= whole


class _Finder:
    """The state of one search; `program` is flat."""

    def __init__(
        self,
        program: Program,
        per_device: Mapping[int, Sequence[int]],
        orders: Mapping[int, Order],
        size: BlockSize | None,
        boundary: Mapping[str, Emission],
        gradients_on_device: Collection[int],
    ):
        self.program, self.per_device, self.orders = program, per_device, orders
        self.size, self.boundary = size or BlockSize(), boundary
        self.gradients_on_device = gradients_on_device
        self.feeds = NOTHING
        wanted = [o for o in program.outputs if isinstance(o, int)]
        self.live = program.closure(wanted, (), effects=True)
        self.users: Mapping[int, list[int]] = collections.defaultdict(list)
        for position in self.live:
            for number in {i for i in program.nodes[position].inputs if i is not None}:
                self.users[number].append(position)
        self.leaves: dict[int, Cut] = {}
        self.host_inputs: dict[int, int] = {}
        self.on_device: dict[int, int] = {}  # value -> first output on the device
        self.left: Mapping[int, int] = {}  # returned from where loops leave it
        self.member: dict[int, int] = {}
        self.level: list[int] = []

    def find(self, host_inputs: Mapping[int, int | None], returned: bool) -> Streamed:
        """The search, step by step."""
        cuts = {i: self._cut([i]) for i in host_inputs}
        self.leaves = {i: cut for i, cut in cuts.items() if isinstance(cut, Cut)}
        feeds = find_feeds(self.program, self.leaves, self.users, self.boundary)
        unread = {v.leaf for n, v in feeds.gradients.items() if not self._wanted(n)}
        self.feeds = feeds.without_gradients_of(unread | {*self.gradients_on_device})
        self.users = users_besides(self.program, self.feeds, self.users)
        self.host_inputs = {
            i: o for i, o in host_inputs.items() if i in self.leaves and o is not None
        }
        if returned:
            apart = {*self.host_inputs, *self.orders}
            self.left = self.feeds.returned(self.program, apart)
        hosted = set(self.host_inputs.values())
        for position, number in enumerate(self.program.outputs):
            if isinstance(number, int) and position not in hosted:
                self.on_device.setdefault(number, position)
        self.on_device = {n: k for n, k in self.on_device.items() if n not in self.left}
        self._find_members()
        elementwise = self._paired(self._groups())
        groups = [*elementwise, *self._whole(elementwise)]
        return Streamed(
            program=self.program,
            schedule=tuple(in_order(self.program, self._plain(groups), groups)),
            leaves=tuple(
                report(self.program, i, o, cuts[i], groups, self._outside(i))
                for i, o in host_inputs.items()
            ),
            host_outputs={o: i for i, o in self.host_inputs.items()},
            feeds=self.feeds,
            orders=self.orders,
        )

    def needed_whole(self, found: Streamed) -> set[int]:
        """Leaves whose gradients, or what is made of these, are needed whole."""
        grouped = {p for group in found.groups for p in group.nodes}
        returned = {o for o in self.program.outputs if isinstance(o, int)}
        whole = {
            number
            for group in found.groups
            if any(given not in returned for given, _ in group.gives)
            for number in group.reads
        } | (returned - self.left.keys())
        return {
            value.leaf
            for number, value in self.feeds.gradients.items()
            if number in whole or not grouped.issuperset(self.users[number])
        } | cut_in_several_ways(found.groups)

    def _wanted(self, number: int) -> bool:
        """Whether anything reads a value; a frozen part's gradients may have none."""
        return bool(self.users[number]) or number in self.program.outputs

    def _outside(self, leaf: int) -> list[int]:
        """Nodes outside of loops that read a leaf or make its new value."""
        nodes = list(self.users[leaf])
        if leaf in self.host_inputs:
            maker = self.program.maker.get(self.program.outputs[self.host_inputs[leaf]])
            nodes += [] if maker is None else [maker]
        return [p for p in nodes if p not in self.member]

    def _shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.program.avals[number].shape)

    def _cut(self, numbers: Sequence[int]) -> Cut | str:
        """One cut for arrays of one shape, of which those in host memory come first."""
        shape = self._shape(numbers[0])
        gradients = self.feeds.gradients
        if any(i in gradients and gradients[i].index is not None for i in numbers):
            # One buffer has all layers' gradients: one cut for all that reads of it.
            hosted = (*self.leaves, *gradients)
            numbers = [i for i in hosted if self._shape(i) == shape]
        owners = [gradients[i].leaf if i in gradients else i for i in numbers]
        shards = [self.per_device.get(i, shape) for i in owners]
        sizes = [self.program.avals[i].dtype.itemsize for i in numbers]
        smallest = tuple(min(column) for column in zip(*shards, strict=True))
        return cut_leaf(shape, smallest, sizes, self.size, self.orders.get(owners[0]))

    def _find_members(self) -> None:
        """Which nodes work on blocks, at which level, and the level of every value."""
        streaming = {*self.leaves, *self.feeds.gradients}
        given = frozenset(streaming)
        # What is made of parameters and their gradients is summed up in blocks, too.
        wide = {leaf for leaf, _ in self.feeds.chains.values()} | given - {*self.leaves}
        level = [0] * len(self.program.avals)
        for position in self.live:
            node = self.program.nodes[position]
            inputs = [i for i in node.inputs if i is not None]
            own = max((level[i] for i in inputs), default=0)
            shape = worked_shape(self.program, node)
            mine = [i for i in inputs if i in streaming and self._shape(i) == shape]
            if mine and elementwise(self.program, node):
                self.member[position] = own
                streaming.update(node.outputs)
                if not wide.isdisjoint(mine):
                    wide.update(node.outputs)
            elif mine and reduction(self.program, node) and mine[0] in wide:
                self.member[position] = own
                own += 1
            else:
                made = [level[i] for i in inputs if i in streaming - given]
                own = max(own, 1 + max(made, default=-1))
            for output in node.outputs:
                level[output] = max(own, level[output] if output in given else 0)
        self.level = level
        self._postpone()

    def _postpone(self) -> None:
        """Moves members to the level where they are first used.

        What is made of a leaf alone (its decay) may be needed in a later loop only:
        there the leaf is read, and nothing waits on the device in between.
        """
        returned = {o for o in self.program.outputs if isinstance(o, int)}
        for position in sorted(self.member, reverse=True):
            outputs = self.program.nodes[position].outputs
            users = [u for o in outputs for u in self.users[o]]
            if not users or not returned.isdisjoint(outputs):
                continue
            if all(u in self.member for u in users):
                self.member[position] = min(self.member[u] for u in users)
                for output in outputs:
                    self.level[output] = self.member[position]

    def _components(self) -> list[list[int]]:
        """Members of one level that share arrays, each list in the program's order."""
        parent = {position: position for position in self.member}

        def root(position: int) -> int:
            while parent[position] != position:
                parent[position] = parent[parent[position]]
                position = parent[position]
            return position

        seen: dict[tuple[int, int], int] = {}
        for position, own in self.member.items():
            node = self.program.nodes[position]
            shape = worked_shape(self.program, node)
            for number in (*node.inputs, *node.outputs):
                if number is not None and self._shape(number) == shape:
                    first = seen.setdefault((number, own), position)
                    parent[root(position)] = root(first)
        parts: dict[int, list[int]] = collections.defaultdict(list)
        for position in self.member:
            parts[root(position)].append(position)
        return list(parts.values())

    def _groups(self) -> list[Group]:
        """The loops for all components in which a host leaf is."""
        parts, lead = self._components(), self._lead()
        nodes = [lead.extended(part) for part in parts]
        readers: dict[int, set[int]] = collections.defaultdict(set)
        for k, own in enumerate(nodes):
            for number in inputs_of(self.program, own):
                readers[number].add(k)
        groups = []
        for k, (part, own) in enumerate(zip(parts, nodes, strict=True)):

            def needed(number: int, own: Sequence[int] = own, k: int = k) -> bool:
                plain = [p for p in self.users[number] if p not in self.member]
                elsewhere = readers[number] - {k} or not set(own).issuperset(plain)
                return number in self.on_device or bool(elsewhere)

            groups.append(self._group(part, own, needed))
        return [group for group in groups if group is not None]

    def _group(
        self,
        part: Sequence[int],
        nodes: Sequence[int],
        needed: Callable[[int], bool],
    ) -> Group | None:
        """The loop for one component, or `None` if no host leaf is in it.

        `needed` says whether a value is wanted outside of the loop.
        """
        program = self.program
        shape = worked_shape(program, program.nodes[part[0]])
        made = {o for p in nodes for o in program.nodes[p].outputs}
        inputs = inputs_of(self.program, nodes)
        there = {*self.leaves, *self.feeds.gradients}
        reads = [i for i in inputs if i in there and self._shape(i) == shape]
        writes = [
            (program.outputs[o], i)
            for i, o in self.host_inputs.items()
            if program.outputs[o] in made and self._shape(i) == shape
        ]
        if not reads and not writes:
            return None
        sliced = [i for i in inputs if self._shape(i) == shape and i not in reads]
        views = [view for i in sliced if (view := view_of(program, i))]
        hosted = list(dict.fromkeys([*reads, *(i for _, i in writes)]))
        cut = self._cut([*hosted, *sliced])
        sliced = [i for i in sliced if i not in {view.number for view in views}]
        gives = [
            number
            for p in part
            for number in program.nodes[p].outputs
            if needed(number) and not reduction(program, program.nodes[p])
        ]
        totals = [
            program.nodes[p].outputs[0]
            for p in part
            if reduction(program, program.nodes[p])
        ]
        if not (writes or gives or totals):
            return None  # on the way to a stack's loop, which does it itself
        return Group(
            cut=cut if isinstance(cut, Cut) else self._cut_of(hosted[0]),
            nodes=tuple(nodes),
            reads=tuple(reads),
            writes=tuple(writes),
            sliced=tuple(sliced),
            spread=tuple(i for i in inputs if self._shape(i) not in ((), shape)),
            others=tuple(i for i in inputs if self._shape(i) == ()),
            gives=tuple(
                places_of(program, self.users, self.on_device, (gives, sliced, nodes))
            ),
            views=tuple(views),
            totals=tuple(totals),
            gradients=tuple(
                self.feeds.gradients[i] for i in reads if i in self.feeds.gradients
            ),
        )

    def _cut_of(self, number: int) -> Cut:
        gradient = self.feeds.gradients.get(number)
        return self.leaves[gradient.leaf if gradient else number]

    def _lead(self) -> Lead:
        return Lead(
            program=self.program,
            users=self.users,
            member=self.member,
            level=self.level,
            on_device=self.on_device,
            hosted=self.feeds.gradients,
            written={
                leaf: self.level[number]
                for leaf, output in self.host_inputs.items()
                if isinstance(number := self.program.outputs[output], int)
            },
        )

    def _paired(self, groups: Sequence[Group]) -> list[Group]:
        """`groups`, those with one leaf two by two.

        A buffer goes in or out, not both at once: it takes two to keep both directions
        of the link busy. Loops of one level do not depend on one another.
        """
        paired: list[Group] = []
        single: dict[tuple[Cut, int], int] = {}
        for group in groups:
            level = max(self.member.get(p, 0) for p in group.nodes)
            written = tuple(leaf for _, leaf in group.writes)
            first = None
            if len(group.reads) == 1 and group.reads == written:
                first = single.pop((group.cut, level), None)
                if first is None:
                    single[group.cut, level] = len(paired)
            if first is None:
                paired.append(group)
            else:
                paired[first] = paired[first].beside(group)
        return paired

    def _whole(self, groups: Sequence[Group]) -> list[Group]:
        """Loops that only copy: leaves needed or made as whole arrays."""
        written = {i for group in groups for _, i in group.writes}
        rest = {
            i: self.program.outputs[o]
            for i, o in self.host_inputs.items()
            if i not in written and self.program.outputs[o] != i
        }
        copies = [
            copying(self.leaves[leaf], leaf, value, made_on_host=value in self.leaves)
            for leaf, value in rest.items()
        ]
        needed = set(self.leaves) & self.on_device.keys()
        needed.update(i for g in groups for i in g.spread if i in self.leaves)
        for position in self._plain([*groups, *copies]):
            served = self.feeds.served.get(position, ())
            inputs = self.program.nodes[position].inputs
            read = {i for k, i in enumerate(inputs) if k not in served}
            needed.update(self.leaves.keys() & read)
        return [*copies, *(copying(self.leaves[i], i) for i in sorted(needed))]

    def _plain(self, groups: Sequence[Group]) -> list[int]:
        """Positions of the nodes that run outside of all loops."""
        given = {number for group in groups for number, _ in group.gives}
        wanted = [*self.on_device, *self.left.values()]
        wanted += [i for group in groups for i in group.needs]
        given |= {number for group in groups for number in group.totals}
        given.update(range(self.program.input_count + self.program.const_count))
        return self.program.closure(
            wanted, given, effects=True, served=self.feeds.served
        )
