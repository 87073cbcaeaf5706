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
A leaf's new value is written by the last loop that reads its old one (`_levels`).

Equations that lead up to a group (the gradient times the clip factor) are run inside of
it where that needs no more arrays than it saves: outside, their results would be whole
arrays. Scalars are computed outside, once.

A leaf that is needed whole (matrix functions, row statistics, another shape) is copied
in, worked on and copied out by loops of its own, one leaf after the other.

What is found is proven before anybody runs it (`_proof`). A leaf for which that fails
goes whole, or stays on the device.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._jaxprs._jaxpr import Program
from .._layers._axis_order import Order
from .._layers._boundary import Emission
from ._blocks import BlockSize, Cut, cut_leaf
from ._feed import NOTHING, find_feeds, users_besides
from ._groups import Parts, form_groups, joined, paired, whole_groups
from ._inline import inline_update
from ._levels import NO_LEVELS, Levels, Question, find_levels
from ._order import in_order
from ._proof import Unproven, not_proven, prove
from ._record import Group, Streamed, cut_in_several_ways, report


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
    held = Held()
    while True:
        finder = _Finder(program, per_device or {}, orders, size, boundary, held)
        found = finder.find(host_inputs, returned)
        gradients = finder.needed_whole(found) - held.gradients
        if gradients:
            held = held.with_gradients(gradients)
            continue
        unproven = prove(found)
        if not unproven:
            return found
        held = held.further(unproven, found.host_inputs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Leaves that are not to stream, or not all of them, each with the reason.

    The `gradients` of some are on the device; `whole` leaves are worked on as a whole,
    and those in `device` do not leave it.
    """

    gradients: frozenset[int] = frozenset()
    whole: Mapping[int, str] = dataclasses.field(default_factory=dict)
    device: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def with_gradients(self, leaves: Collection[int]) -> "Held":
        """The same, with these leaves' gradients on the device, too."""
        return dataclasses.replace(self, gradients=self.gradients.union(leaves))

    def further(self, unproven: Sequence[Unproven], hosted: Sequence[int]) -> "Held":
        """Each leaf of which something is unproven one step nearer to the device.

        Where that names none that could go, all that are `hosted` do.

        **Raises:** `InternalError` where no leaf is left that could stay.
        """
        why = {one.leaf: one.reason for one in reversed(unproven)}
        new = {i: why[i] for i in hosted if i in why}
        new = new or dict.fromkeys(hosted, unproven[0].reason)
        if not new:
            raise not_proven(unproven)
        staying = {i: r for i, r in new.items() if i in self.whole}
        whole = {i: r for i, r in new.items() if i not in self.whole}
        return Held(
            gradients=self.gradients.union(new),
            whole={**self.whole, **whole},
            device={**self.device, **staying},
        )


class _Finder:
    """The state of one search; `program` is flat."""

    def __init__(
        self,
        program: Program,
        per_device: Mapping[int, Sequence[int]],
        orders: Mapping[int, Order],
        size: BlockSize | None,
        boundary: Mapping[str, Emission],
        held: Held,
    ):
        self.program, self.per_device, self.orders = program, per_device, orders
        self.size, self.boundary = size or BlockSize(), boundary
        self.held = held
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
        self.levels: Levels = NO_LEVELS

    def find(self, host_inputs: Mapping[int, int | None], returned: bool) -> Streamed:
        """The search, step by step."""
        cuts = {i: self.held.device.get(i) or self._cut([i]) for i in host_inputs}
        self.leaves = {i: cut for i, cut in cuts.items() if isinstance(cut, Cut)}
        feeds = find_feeds(self.program, self.leaves, self.users, self.boundary)
        unread = {v.leaf for n, v in feeds.gradients.items() if not self._wanted(n)}
        self.feeds = feeds.without_gradients_of(unread | self.held.gradients)
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
        parts = self._parts()
        elementwise = form_groups(parts)
        whole = whole_groups(parts, elementwise, self._plain)
        groups = paired(parts, joined(parts, [*elementwise, *whole]))
        plain, why = self._plain(groups), self.held.whole
        return Streamed(
            program=self.program,
            schedule=tuple(in_order(self.program, plain, groups, self.feeds)),
            leaves=tuple(
                report(
                    *(self.program, i, o, cuts[i], groups, self._outside(i)),
                    why.get(i, ""),
                )
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
        } | self.on_device.keys()
        return (
            {
                value.leaf
                for number, value in self.feeds.gradients.items()
                if number in whole or not grouped.issuperset(self.users[number])
            }
            | cut_in_several_ways(found.groups)
            | self._without_rest(found.groups)
        )

    def _without_rest(self, groups: Sequence[Group]) -> set[int]:
        """Leaves whose gradients are cut with a rest that could not be fetched.

        A layer's part of a buffer would begin within a tile of it, and of narrower
        types than the leaf's a TPU reads no odd number of rows.
        """
        avals = self.program.avals
        return {
            value.leaf
            for group in groups
            if group.cut.ends
            for value in group.gradients
            if value.index is not None
            or avals[value.number].dtype.itemsize < avals[value.leaf].dtype.itemsize
        }

    def _wanted(self, number: int) -> bool:
        """Whether anything reads a value; a frozen part's gradients may have none."""
        return bool(self.users[number]) or number in self.program.outputs

    def _outside(self, leaf: int) -> list[int]:
        """Nodes outside of loops that read a leaf or make its new value."""
        nodes = list(self.users[leaf])
        if leaf in self.host_inputs:
            maker = self.program.maker.get(self.program.outputs[self.host_inputs[leaf]])
            nodes += [] if maker is None else [maker]
        return [p for p in nodes if p not in self.levels.member]

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

    def _cut_or_none(self, numbers: Sequence[int]) -> Cut | None:
        cut = self._cut(numbers)
        return cut if isinstance(cut, Cut) else None

    def _parts(self) -> Parts:
        """What the loops are made of, and when they run."""
        results = {i: self.program.outputs[o] for i, o in self.host_inputs.items()}
        results = {
            i: number
            for i, number in results.items()
            if isinstance(number, int) and number != i
        }
        question = Question(
            program=self.program,
            live=self.live,
            users=self.users,
            feeds=self.feeds,
            streaming=[i for i in self.leaves if i not in self.held.whole],
            results=results,
            on_device=self.on_device,
        )
        self.levels = find_levels(question)
        return Parts(
            program=self.program,
            users=self.users,
            feeds=self.feeds,
            levels=self.levels,
            leaves=self.leaves,
            whole=frozenset(self.held.whole),
            results=results,
            on_device=self.on_device,
            cut=self._cut_or_none,
        )

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
