"""What `_find` finds and `_run` runs: groups of equations, in order.

Pure data, with the functions that say what becomes of each leaf.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .._jaxprs._jaxpr import Program
from .._layers._axis_order import Order
from .._layers._host_layers import Partition
from ._blocks import Cut
from ._feed import Feeds, HostValue, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What becomes of one leaf that was to live in host memory.

    `way` is "streamed" (in blocks, element by element), "whole" (in host memory, but on
    the device as a whole while it is worked on) or "device" (left there); `reason` says
    why it is not streamed. `input` and `output` are flat positions in the step; what
    is only read has no output.
    """

    input: int
    output: int | None
    shape: tuple[int, ...]
    dtype: str
    way: str
    reason: str
    block: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One loop over the blocks of `cut`; everything is a value number of the program.

    `nodes` are run on every block. `reads` are inputs of the program whose block is
    fetched from host memory; `writes` says which value is written to the host buffer of
    which input. `sliced` are device arrays of the group's shape, `views` such as are
    parts of larger ones, `spread` smaller ones
    that are broadcast to it, `others` scalars. `gives` are the values that come out as
    whole arrays on the device, each with the device array in whose place it is written
    (or `None` for memory of its own). `totals` are single numbers made of all blocks;
    `gradients` are those of `reads` that are no inputs of the program.
    """

    cut: Cut
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    sliced: tuple[int, ...]
    spread: tuple[int, ...]
    others: tuple[int, ...]
    gives: tuple[tuple[int, int | None], ...]
    views: tuple[View, ...] = ()
    totals: tuple[int, ...] = ()
    gradients: tuple[HostValue, ...] = ()

    @property
    def on_device(self) -> tuple[int, ...]:
        """Values on the device that it reads."""
        wholes = (view.whole for view in self.views)
        return (*self.sliced, *self.spread, *self.others, *wholes)

    @property
    def needs(self) -> tuple[int, ...]:
        """Values that have to be there before it starts, in either memory."""
        return (*self.on_device, *(value.made for value in self.gradients))

    def beside(self, other: "Group") -> "Group":
        """Both in one loop; they are cut alike and do not depend on one another."""

        def both(mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(dict.fromkeys((*mine, *theirs)))

        return Group(
            cut=self.cut,
            nodes=tuple(sorted({*self.nodes, *other.nodes})),
            reads=both(self.reads, other.reads),
            writes=both(self.writes, other.writes),
            sliced=both(self.sliced, other.sliced),
            spread=both(self.spread, other.spread),
            others=both(self.others, other.others),
            gives=both(self.gives, other.gives),
            views=both(self.views, other.views),
            totals=both(self.totals, other.totals),
            gradients=both(self.gradients, other.gradients),
        )


def copying(
    cut: Cut,
    leaf: int,
    made: int | None = None,
    *,
    made_on_host: bool = False,
    gradient: HostValue | None = None,
) -> Group:
    """A loop that fetches a leaf, or writes `made` to the leaf's host buffer.

    `made` may be another leaf, or a `gradient` in host memory: then the loop fetches
    and writes.
    """
    fetched = leaf if made is None else made
    return Group(
        cut=cut,
        nodes=(),
        reads=(fetched,) if made is None or made_on_host else (),
        writes=() if made is None else ((made, leaf),),
        sliced=() if made is None or made_on_host else (made,),
        spread=(),
        others=(),
        gives=((leaf, None),) if made is None else (),
        gradients=() if gradient is None else (gradient,),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A step ready to be run with part of its inputs in host memory (`run_streamed`).

    `schedule` is an order in which it can run: positions of nodes, and groups.
    `host_inputs` are the inputs that live in host memory, `host_outputs` the outputs
    that come out there, each with the input whose buffer it takes; `feeds` is what
    passes between host memory and the loops of stacks. `partitions` says how inputs in
    host memory are spread over a mesh, `orders` how those lie whose axes do not lie as
    they are typed.
    """

    program: Program
    schedule: tuple[int | Group, ...]
    leaves: tuple[Leaf, ...]
    host_outputs: Mapping[int, int]
    feeds: Feeds
    partitions: Mapping[int, Partition] = dataclasses.field(default_factory=dict)
    orders: Mapping[int, Order] = dataclasses.field(default_factory=dict)

    @property
    def host_inputs(self) -> tuple[int, ...]:
        """Inputs that live in host memory, by flat position."""
        return tuple(leaf.input for leaf in self.leaves if leaf.way != "device")

    @property
    def groups(self) -> tuple[Group, ...]:
        """The loops, in the order in which they run."""
        return tuple(item for item in self.schedule if isinstance(item, Group))


def cut_in_several_ways(groups: Sequence[Group]) -> set[int]:
    """Leaves whose gradients lie in one buffer that loops would cut differently.

    That of an unrolled model's layers is laid out for the cut (`_host_layers.Rows`).
    """
    ways: dict[int, set[Any]] = {}
    leaves: dict[int, set[int]] = {}
    for group in groups:
        for value in group.gradients:
            if value.index is not None:
                way = (group.cut.rows, group.cut.row_axis)
                ways.setdefault(value.made, set()).add(way)
                leaves.setdefault(value.made, set()).add(value.leaf)
    return {i for made, found in ways.items() if len(found) > 1 for i in leaves[made]}


def report(
    program: Program,
    leaf: int,
    output: int | None,
    cut: Cut | str,
    groups: Sequence[Group],
    outside: Sequence[int],
    why: str = "",
) -> Leaf:
    """What became of a leaf; `outside` are nodes that work on it outside of loops.

    `why` says what kept it from being streamed, if something did.
    """
    aval = program.avals[leaf]
    way, reason, block = "device", str(cut), None
    if isinstance(cut, Cut):
        mine = [g for g in groups if leaf in (*g.reads, *(i for _, i in g.writes))]
        block = mine[0].cut.block if mine else cut.block
        way, reason = "streamed", ""
        if any(not g.nodes and (g.gives or g.sliced) for g in mine):
            way = "whole"
            reason = "it is returned on the device, or something takes its place"
            for position in outside[:1]:
                reason = f"{program.nodes[position].described} works on it as a whole"
        if way == "whole" and why:
            reason = why
    return Leaf(
        input=leaf,
        output=output,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        way=way,
        reason=reason,
        block=block,
    )
