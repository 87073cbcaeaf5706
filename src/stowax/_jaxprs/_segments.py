"""Straight-line code, cut into segments at places where little crosses.

What stands outside of repeated layers is a list of operations. Cut into segments, it
can be treated as layers are: what crosses a cut is at hand in the backward pass, what
lies between two cuts is kept or computed again. Computing everything again takes what
crosses all cuts, and what one segment holds: many cuts make the first large, few the
second. `find_segments` looks for the cuts with the least sum of both, by dynamic
programming over the list for a row of segment sizes. For n equal blocks that comes to
the square root of n (Chen et al., *Training Deep Nets with Sublinear Memory Cost*,
2016); a network that narrows and widens is cut where it is narrow.

Bytes within a segment are those of products and loops, and of what these read: what
lies between is computed where it is read. They are of the whole arrays, whatever mesh
they are spread over. They decide where cuts are, and nothing else.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ._jaxpr import Program

_KERNELS = frozenset(
    {
        "cond",
        "conv_general_dilated",
        "custom_vjp_call",
        "dot_general",
        "gather",
        "ragged_dot_general",
        "scan",
        "scatter",
        "scatter_add",
        "sort",
        "while",
    }
)
"""Operations that write arrays and read them, by and large."""

_SIZES = 12
"""How many sizes of segments are tried: each is the last one by the root of two."""

_WORTH = 0.9
"""Part of all bytes that cuts must come down to: else the code stays whole."""

_LATER = np.iinfo(np.int64).max


def find_segments(
    program: Program, runs: Sequence[Sequence[int]]
) -> list[list[list[int]]]:
    """Where to cut each run: its segments, as positions of nodes, in order.

    **Arguments:** `runs` are positions of nodes, each list in an order in which they
    can run, with nothing between two of them.

    **Returns:** for each run its segments; none for all, where no cuts need clearly
    less than the whole.

    >>> from stowax._jaxprs._jaxpr import Program
    >>> from stowax._jaxprs._segments import find_segments
    >>> def model(x, weights):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> w = jnp.ones((8, 8))
    >>> program = Program(jax.make_jaxpr(model)(w, [w] * 9))
    >>> find_segments(program, [range(19)])[0][0]
    [0, 1, 2, 3, 4]
    """
    readers = _readers(program)
    lists = [_listed(program, run, readers) for run in runs]
    whole = sum(int(one.weight.sum()) for one in lists)
    if not whole:
        return [[] for _ in runs]
    best, cuts = _WORTH * whole, [[] for _ in runs]
    for number in range(1, _SIZES + 1):
        size = whole / 2 ** (number / 2)
        found = [_cut(one, size) for one in lists]
        needed = sum(f.crossing for f in found) + max(f.largest for f in found)
        if needed < best:
            best, cuts = needed, [f.ends for f in found]
    return [
        [list(run[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        for run, ends in zip(runs, cuts, strict=True)
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """A run as numbers: bytes that each node makes, and the last place that reads them.

    `weight` is `made` of what is an array even if nothing is cut.
    """

    made: np.ndarray
    weight: np.ndarray
    last: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """Where segments end, the bytes that cross, and the bytes within the largest."""

    ends: list[int]
    crossing: int
    largest: int


def _readers(program: Program) -> Mapping[int, list[int]]:
    """By value, the positions of the nodes that read it; -1 is an output."""
    found: dict[int, list[int]] = {}
    for position, node in enumerate(program.nodes):
        for number in node.inputs:
            if number is not None:
                found.setdefault(number, []).append(position)
    for output in program.outputs:
        if isinstance(output, int):
            found.setdefault(output, []).append(-1)
    return found


def _listed(
    program: Program, run: Sequence[int], readers: Mapping[int, list[int]]
) -> _Listed:
    place = {position: k for k, position in enumerate(run)}
    made, weight, last = (np.zeros(len(run), dtype=np.int64) for _ in range(3))
    for k, position in enumerate(run):
        node = program.nodes[position]
        read = [n for n in node.outputs if n in readers]
        made[k] = sum(_bytes(program.avals[n]) for n in read)
        touching = (p for n in read for p in readers[n] if p >= 0)
        kernel = any(
            program.nodes[p].equation.primitive.name in _KERNELS
            for p in (position, *touching)
        )
        weight[k] = made[k] if kernel else 0
        last[k] = max(
            (place.get(p, _LATER) for n in read for p in readers[n]), default=k
        )
    return _Listed(made=made, weight=weight, last=last)


def _bytes(aval: object) -> int:
    size, dtype = getattr(aval, "size", 0), getattr(aval, "dtype", None)
    return int(size) * int(getattr(dtype, "itemsize", 0))


def _cut(one: _Listed, size: float) -> _Cuts:
    """The cuts that least crosses, with at most `size` bytes between two of them.

    A node that makes more is a segment of its own. What crosses several cuts counts at
    the first of them.
    """
    count = len(one.made)
    until = np.concatenate([[0], np.cumsum(one.weight)])
    needed = np.zeros(count + 1, dtype=np.int64)  # up to a cut before node k
    before = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        first = int(np.searchsorted(until, until[end] - size, side="left"))
        first = min(first, end - 1)
        if end < count:
            crosses = np.where(one.last[first:end] >= end, one.made[first:end], 0)
            crosses = crosses[::-1].cumsum()[::-1]
        else:
            crosses = np.zeros(end - first, dtype=np.int64)
        costs = needed[first:end] + crosses + 1  # of two alike the one with fewer cuts
        chosen = int(costs.argmin())
        needed[end], before[end] = costs[chosen], first + chosen
    ends = [count] if count else []
    while ends and before[ends[0]] > 0:
        ends.insert(0, int(before[ends[0]]))
    starts = [0, *ends][:-1]
    within = [int(until[b] - until[a]) for a, b in zip(starts, ends, strict=True)]
    return _Cuts(
        ends=ends,
        crossing=int(needed[count]) - len(ends),
        largest=max(within, default=0),
    )
