"""Finding what a training step does to each leaf of its state element by element.

Optimizer state in host memory costs no device memory only if it passes through the
device in blocks. A step written with whole arrays can be run in blocks wherever it
works element by element: `stream_update` finds those parts in the step's own jaxpr,
whatever optimizer wrote them, and says why where it cannot. `_update_run` runs them.

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
from collections.abc import Mapping, Sequence
from typing import Any

from . import _jax
from ._jaxpr import Node, Program
from ._update_blocks import BlockSize, Cut, cut_leaf
from ._update_inline import ELEMENTWISE, inline_update
from ._update_record import Group, Streamed, in_order, report, view_of


def stream_update(
    jaxpr: Any,
    host_inputs: Mapping[int, int],
    *,
    per_device: Mapping[int, Sequence[int]] | None = None,
    size: BlockSize | None = None,
) -> Streamed:
    """Finds how `jaxpr` can run with some of its inputs in host memory.

    **Arguments:** `jaxpr` is a whole step's, traced with everything on the device.
    `host_inputs` says of each input that is to live in host memory which output it
    becomes (both flat positions). `per_device` has the shapes of one device's shards of
    those that are spread over a mesh.
    """
    finder = _Finder(inline_update(jaxpr, host_inputs), per_device or {}, size)
    return finder.find(dict(host_inputs))


class _Finder:
    """The state of one search; `program` is flat."""

    def __init__(
        self,
        program: Program,
        per_device: Mapping[int, Sequence[int]],
        size: BlockSize | None,
    ):
        self.program, self.per_device = program, per_device
        self.size = size or BlockSize()
        wanted = [o for o in program.outputs if isinstance(o, int)]
        self.live = program.closure(wanted, (), effects=True)
        self.users: dict[int, list[int]] = collections.defaultdict(list)
        for position in self.live:
            for number in {i for i in program.nodes[position].inputs if i is not None}:
                self.users[number].append(position)
        self.leaves: dict[int, Cut] = {}
        self.host_inputs: dict[int, int] = {}
        self.on_device: dict[int, int] = {}  # value -> first output on the device
        self.member: dict[int, int] = {}
        self.level: list[int] = []

    def find(self, host_inputs: dict[int, int]) -> Streamed:
        """The search, step by step."""
        cuts = {i: self._cut([i]) for i in host_inputs}
        self.leaves = {i: cut for i, cut in cuts.items() if isinstance(cut, Cut)}
        self.host_inputs = {i: o for i, o in host_inputs.items() if i in self.leaves}
        hosted = set(self.host_inputs.values())
        for position, number in enumerate(self.program.outputs):
            if isinstance(number, int) and position not in hosted:
                self.on_device.setdefault(number, position)
        self._find_members()
        groups = [self._group(part) for part in self._components()]
        elementwise = self._paired([group for group in groups if group is not None])
        groups = [*elementwise, *self._whole(elementwise)]
        return Streamed(
            program=self.program,
            schedule=tuple(in_order(self.program, self._plain(groups), groups)),
            leaves=tuple(
                report(self.program, i, o, cuts[i], groups, self._outside(i))
                for i, o in host_inputs.items()
            ),
            host_outputs={o: i for i, o in self.host_inputs.items()},
        )

    def _outside(self, leaf: int) -> list[int]:
        """Nodes outside of loops that read a leaf or make its new value."""
        nodes = list(self.users[leaf])
        if leaf in self.host_inputs:
            maker = self.program.maker.get(self.program.outputs[self.host_inputs[leaf]])
            nodes += [] if maker is None else [maker]
        return [p for p in nodes if p not in self.member]

    def _shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.program.avals[number].shape)

    def _bytes(self, number: int) -> int:
        aval = self.program.avals[number]
        return aval.size * aval.dtype.itemsize

    def _cut(self, numbers: Sequence[int]) -> Cut | str:
        """One cut for arrays of one shape, of which those in host memory come first."""
        shape = self._shape(numbers[0])
        shards = [self.per_device.get(i, shape) for i in numbers]
        sizes = [self.program.avals[i].dtype.itemsize for i in numbers]
        smallest = tuple(min(column) for column in zip(*shards, strict=True))
        return cut_leaf(shape, smallest, sizes, self.size)

    def _elementwise(self, node: Node) -> bool:
        """Whether every output element is made of the inputs' elements in its place."""
        shapes = {self._shape(o) for o in node.outputs}
        name = node.equation.primitive.name
        if len(shapes) != 1 or () in shapes or _jax.has_effects(node.equation):
            return False
        if name == "broadcast_in_dim":
            return len(node.inputs) == 1  # no sizes that are data
        if name not in ELEMENTWISE:
            return False
        (shape,) = shapes
        return all(
            self._shape(i) == () or _spreads(self._shape(i), shape)
            for i in node.inputs
            if i is not None
        )

    def _find_members(self) -> None:
        """Which nodes work on blocks, at which level, and the level of every value."""
        streaming = set(self.leaves)
        level = [0] * len(self.program.avals)
        for position in self.live:
            node = self.program.nodes[position]
            inputs = [i for i in node.inputs if i is not None]
            own = max((level[i] for i in inputs), default=0)
            shape = self._shape(node.outputs[0]) if node.outputs else ()
            joins = self._elementwise(node) and any(
                i in streaming and self._shape(i) == shape for i in inputs
            )
            if joins:
                self.member[position] = own
                streaming.update(node.outputs)
            else:
                made = [level[i] for i in inputs if i in streaming - self.leaves.keys()]
                own = max(own, 1 + max(made, default=-1))
            for output in node.outputs:
                level[output] = own
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
            shape = self._shape(node.outputs[0])
            for number in (*node.inputs, *node.outputs):
                if number is not None and self._shape(number) == shape:
                    first = seen.setdefault((number, own), position)
                    parent[root(position)] = root(first)
        parts: dict[int, list[int]] = collections.defaultdict(list)
        for position in self.member:
            parts[root(position)].append(position)
        return list(parts.values())

    def _group(self, part: Sequence[int]) -> Group | None:
        """The loop for one component, or `None` if no host leaf is in it."""
        program, leaves = self.program, self.leaves
        shape = self._shape(program.nodes[part[0]].outputs[0])
        nodes = self._with_lead_in(part)
        made = {o for p in nodes for o in program.nodes[p].outputs}
        inputs = self._inputs_of(nodes)
        reads = [i for i in inputs if i in leaves and self._shape(i) == shape]
        writes = [
            (program.outputs[o], i)
            for i, o in self.host_inputs.items()
            if program.outputs[o] in made and self._shape(i) == shape
        ]
        if not reads and not writes:
            return None
        sliced = [i for i in inputs if self._shape(i) == shape and i not in leaves]
        views = [view for i in sliced if (view := view_of(program, i))]
        hosted = list(dict.fromkeys([*reads, *(i for _, i in writes)]))
        cut = self._cut([*hosted, *sliced])
        sliced = [i for i in sliced if i not in {view.number for view in views}]
        gives = [
            number
            for p in part
            for number in program.nodes[p].outputs
            if number in self.on_device or not set(nodes).issuperset(self.users[number])
        ]
        return Group(
            cut=cut if isinstance(cut, Cut) else leaves[hosted[0]],
            nodes=tuple(nodes),
            reads=tuple(reads),
            writes=tuple(writes),
            sliced=tuple(sliced),
            spread=tuple(i for i in inputs if self._shape(i) not in ((), shape)),
            others=tuple(i for i in inputs if self._shape(i) == ()),
            gives=tuple(self._places(gives, sliced, nodes)),
            views=tuple(views),
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

    def _inputs_of(self, nodes: Sequence[int]) -> list[int]:
        """What nodes read and do not make, in order of first use."""
        made = {o for p in nodes for o in self.program.nodes[p].outputs}
        read = [i for p in nodes for i in self.program.nodes[p].inputs]
        return list(dict.fromkeys(i for i in read if i is not None and i not in made))

    def _with_lead_in(self, part: Sequence[int]) -> list[int]:
        """`part` and what leads up to it and had better run on blocks, too.

        A whole array is saved wherever its maker can run inside, on arrays that are
        there anyway (those of the loop, and inputs of the step), or on one in its
        place. What others use as well exists anyhow: it is made a second time only if
        that needs no other array.
        """
        mine = set(part)
        while True:
            inputs = set(self._inputs_of(sorted(mine)))
            for number in sorted(inputs, reverse=True):
                lead = self._lead_to(number, mine, inputs, self.member[part[0]])
                if lead:
                    mine |= lead
                    break
            else:
                return sorted(mine)

    def _lead_to(
        self, number: int, mine: set[int], inputs: set[int], level: int
    ) -> set[int]:
        """Nodes that make `number` and may as well run inside; none if that costs."""
        shape, maker = self._shape(number), self.program.maker

        def inside(value: int) -> bool:
            position = maker.get(value)
            return (
                position is not None
                and position not in self.member
                and self._shape(value) == shape
                and self.level[value] <= level
                and self._elementwise(self.program.nodes[position])
            )

        def alone(value: int, nodes: set[int]) -> bool:
            return nodes.issuperset(self.users[value]) and value not in self.on_device

        if shape == () or not inside(number):
            return set()
        lead = {maker[number]}
        while True:
            read = set(self._inputs_of(sorted(lead)))
            more = {v for v in read if inside(v) and alone(v, mine | lead)}
            if not more:
                break
            lead |= {maker[v] for v in more}
        new = sum(
            self._bytes(v)
            for v in read - inputs
            if self._shape(v) == shape
            and v >= self.program.input_count
            and view_of(self.program, v) is None
        )
        saved = self._bytes(number) if alone(number, mine) else 0
        return lead if new <= saved else set()

    def _places(
        self, gives: Sequence[int], sliced: Sequence[int], nodes: Sequence[int]
    ) -> list[tuple[int, int | None]]:
        """For each given array the one in whose memory it is written.

        Results of the step take inputs of the step, in the order in which `jax.jit`
        pairs donated arguments with results; others take what nobody needs afterwards.
        """
        count, mine = self.program.input_count, set(nodes)
        donated = sorted(i for i in sliced if i < count)
        spent = [i for i in sliced if i >= count and mine.issuperset(self.users[i])]
        spent = [
            i for i in spent if i in self.program.maker and i not in self.on_device
        ]
        places = []
        last = len(self.program.outputs)
        for number in sorted(gives, key=lambda n: self.on_device.get(n, last)):
            pool = donated if number in self.on_device else spent
            kind = self.program.avals[number].dtype
            fit = [i for i in pool if self.program.avals[i].dtype == kind]
            places.append((number, fit[0] if fit else None))
            if fit:
                pool.remove(fit[0])
        return places

    def _whole(self, groups: Sequence[Group]) -> list[Group]:
        """Loops that only copy: leaves needed or made as whole arrays."""
        written = {i for group in groups for _, i in group.writes}
        rest = {
            i: self.program.outputs[o]
            for i, o in self.host_inputs.items()
            if i not in written and self.program.outputs[o] != i
        }
        copies = [
            self._copy(leaf, reads=(value,) if value in self.leaves else (), made=value)
            for leaf, value in rest.items()
        ]
        needed = set(self.leaves) & self.on_device.keys()
        needed.update(i for g in groups for i in g.spread if i in self.leaves)
        for position in self._plain([*groups, *copies]):
            needed.update(self.leaves.keys() & set(self.program.nodes[position].inputs))
        return [*copies, *(self._copy(i, reads=(i,)) for i in sorted(needed))]

    def _copy(self, leaf: int, *, reads: tuple[int, ...], made: Any = None) -> Group:
        """A loop that fetches `reads`, or writes `made` to the leaf's host buffer.

        `made` may be another leaf: then the loop fetches and writes.
        """
        return Group(
            cut=self.leaves[leaf],
            nodes=(),
            reads=reads,
            writes=() if made is None else ((made, leaf),),
            sliced=tuple(n for n in (made,) if n is not None and not reads),
            spread=(),
            others=(),
            gives=((leaf, None),) if made is None else (),
        )

    def _plain(self, groups: Sequence[Group]) -> list[int]:
        """Positions of the nodes that run outside of all loops."""
        given = {number for group in groups for number, _ in group.gives}
        wanted = [*self.on_device]
        wanted += [i for group in groups for i in group.on_device]
        count = self.program.input_count + self.program.const_count
        at_hand = {*given, *range(count)}
        return self.program.closure(wanted, at_hand, effects=True)


def _spreads(small: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an operand is of `shape`, but for axes of one element."""
    return len(small) == len(shape) and all(
        mine in (1, size) for mine, size in zip(small, shape, strict=True)
    )
