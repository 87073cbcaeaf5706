"""Where a sequence of operations repeats itself as a chain: the arithmetic of it.

No JAX in here: `_repeats` turns a jaxpr into the arrays of `Flow`, and `find_chains`
returns the stretches in which one block of operations stands several times in a row,
each block fed by the one before. Everything over the length of the program is numpy;
Python loops run over candidate periods and over stretches, of which there are few.

The search goes: distances between equal costly operations give candidate periods;
comparing the sequence with itself shifted by a period gives stretches; a stretch is cut
into blocks where the fewest bytes cross from one block to the next; then every operand
is checked. Equal operations alone prove nothing: heads that stand side by side look
like layers that stand in a row, and only the check of the operands tells.
"""

import dataclasses

import numpy as np

OUTSIDE = np.int64(-(2**62))
"""In `relations`: an operand from before the chain, or a literal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A program as arrays: N operations, M operands (operation by operation).

    `codes` are equal for operations that may share a block, `exact` for those that are
    the same in every parameter as well. `work` is in multiply-adds or elements written;
    `costly` marks products, convolutions and what contains them. The operands of
    operation i are those from `offsets[i]` up to `offsets[i + 1]`. `makers` is the
    position of the operation that makes an operand (−1 for none) and `places` which of
    its outputs it is; `bytes` its size, `floating` whether derivatives flow through it.
    """

    codes: np.ndarray
    exact: np.ndarray
    work: np.ndarray
    costly: np.ndarray
    offsets: np.ndarray
    makers: np.ndarray
    places: np.ndarray
    bytes: np.ndarray
    floating: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """`count` blocks of `period` operations from position `start` on.

    `apart` are the positions within a block that are not part of it: they take one row
    each of an array made before the chain, another row in every block.
    """

    start: int
    period: int
    count: int
    apart: tuple[int, ...]
    saved: float

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


def find_chains(flow: Flow) -> list[Chain]:
    """The chains of a program in order, none overlapping another.

    The period that removes the most work from the program is taken first; what lies
    before, between and after its chains is searched again.
    """
    found: list[Chain] = []
    segments = [(0, len(flow.codes))]
    while segments:
        low, high = segments.pop()
        chains = sorted(_best_period(flow, low, high), key=lambda c: c.start)
        if not chains:
            continue
        found += chains
        edges = [low, *(e for c in chains for e in (c.start, c.stop)), high]
        segments += [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return sorted(found, key=lambda c: c.start)


_LEAST_COUNT = 2  # blocks of a chain
# Part of the program's work (multiply-adds of products, elements written elsewhere).
# Two products that happen to follow one another in a large program are no loop.
_LEAST_SHARE = 0.02
_REACH = 512  # equal operations a block may hold
_TRIES = 256  # periods looked at in one segment
_SMALL = 4096  # segments without costly operations are searched up to this length


def _best_period(flow: Flow, low: int, high: int) -> list[Chain]:
    best: list[Chain] = []
    best_key = (0.0, 0.0)
    for period, bound in _periods(flow, low, high):
        if bound < best_key[0] * (1 - 1e-9):
            continue
        chains = _chains_of_period(flow, low, high, period)
        saved = sum(c.saved for c in chains)
        covered = sum(c.saved * c.count / (c.count - 1) for c in chains)
        margin = 1 + 1e-6  # of two that are equal, the period that was tried first
        better = saved > best_key[0] * margin or (
            saved * margin > best_key[0] and covered > best_key[1] * margin
        )
        if chains and better:
            best, best_key = chains, (saved, covered)
    return best


def _periods(flow: Flow, low: int, high: int) -> list[tuple[int, float]]:
    """Candidate periods with the work they could remove, most first, then shortest."""
    anchors = low + np.flatnonzero(flow.costly[low:high])
    if len(anchors) < 2:
        if high - low > _SMALL:
            return []
        anchors = np.arange(low, high)
    order = np.lexsort((anchors, flow.codes[anchors]))
    positions = anchors[order]
    codes = flow.codes[positions]
    gaps = []
    for reach in range(1, min(_REACH, len(positions) - 1) + 1):
        same = codes[reach:] == codes[:-reach]
        if not same.any():
            break
        gaps.append((positions[reach:] - positions[:-reach])[same])
    if not gaps:
        return []
    periods, times = np.unique(np.concatenate(gaps), return_counts=True)
    fits = periods * 2 <= high - low
    periods, times = periods[fits], times[fits]
    often = np.argsort(-times, kind="stable")[:_TRIES]
    result = []
    for period in periods[often].tolist():
        same = flow.codes[low : high - period] == flow.codes[low + period : high]
        result.append((period, float(flow.work[low : high - period][same].sum())))
    return sorted(result, key=lambda pair: (-pair[1], pair[0]))


def _chains_of_period(flow: Flow, low: int, high: int, period: int) -> list[Chain]:
    same = flow.codes[low : high - period] == flow.codes[low + period : high]
    steps = np.diff(np.concatenate(([0], same.view(np.int8), [0])))
    begins, ends = np.flatnonzero(steps == 1) + low, np.flatnonzero(steps == -1) + low
    long = ends - begins >= period * (_LEAST_COUNT - 1)
    chains = []
    stop = low
    for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
        begin = max(begin, stop)
        if end + period - begin < _LEAST_COUNT * period:
            continue
        chain = _cut(flow, begin, end + period, period)
        if chain is not None:
            chains.append(chain)
            stop = chain.stop
    return chains


def _cut(flow: Flow, begin: int, end: int, period: int) -> Chain | None:
    """The best chain within a stretch of equal operations."""
    crossing = _crossing_bytes(flow, begin, end)
    length = end - begin
    rotations = np.arange(min(period, length - _LEAST_COUNT * period + 1))
    counts = (length - rotations) // period
    inner = crossing[period : length // period * period].reshape(-1, period)
    carried = inner.min(axis=0)[rotations]
    order = np.lexsort((-rotations, carried, -counts))
    full = carried[order[0]]
    if (
        counts[0] >= 4
    ):  # lose a layer if the others then hand over half as much, or less
        cheapest = np.lexsort((-rotations, -counts, carried))
        order = cheapest if 2 * carried[cheapest[0]] <= full else order
    best = None
    for rotation in rotations[order[:8]].tolist():
        count = (length - rotation) // period
        chain = _verified(flow, begin + rotation, period, count)
        if chain is not None and (best is None or chain.count > best.count):
            best = chain
        if best is not None and best.count >= count:
            break
    return best


def _crossing_bytes(flow: Flow, begin: int, end: int) -> np.ndarray:
    """Bytes that go across each cut from `begin` to `end`, made and read in between."""
    first, last = flow.offsets[begin], flow.offsets[end]
    readers = np.repeat(np.arange(begin, end), np.diff(flow.offsets[begin : end + 1]))
    makers = flow.makers[first:last]
    inside = makers >= begin
    makers, readers = makers[inside], readers[inside]
    places, sizes = flow.places[first:last][inside], flow.bytes[first:last][inside]
    order = np.lexsort((readers, places, makers))
    makers, readers = makers[order], readers[order]
    places, sizes = places[order], sizes[order]
    last_read = np.ones(len(makers), bool)
    last_read[:-1] = (makers[1:] != makers[:-1]) | (places[1:] != places[:-1])
    change = np.zeros(end - begin + 1, np.float64)
    np.add.at(change, makers[last_read] + 1 - begin, sizes[last_read])
    np.add.at(change, readers[last_read] + 1 - begin, -sizes[last_read].astype(float))
    return np.cumsum(change)


def relations(
    flow: Flow, start: int, period: int, count: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Where each operand of each block comes from, relative to its block.

    **Returns:** `relation`, one row per block and one column per operand:
    ``distance * width + output`` with `distance` the position of the maker from the
    start of the reading block (negative: in the block before) and ``width =
    flow_width(flow)``, or `OUTSIDE`; `makers` in the same layout, −1 for operands that
    any block can have from the start; and the positions that are kept apart from the
    blocks.
    """
    columns = slice(flow.offsets[start], flow.offsets[start + period * count])
    makers = flow.makers[columns].reshape(count, -1)
    places = flow.places[columns].reshape(count, -1)
    exact = flow.exact[start : start + period * count].reshape(count, period)
    apart = np.flatnonzero((exact != exact[0]).any(axis=0))
    if len(apart):
        within = (makers >= start) & np.isin((makers - start) % period, apart)
        makers = np.where(within, -1, makers)
    distance = makers - (start + period * np.arange(count))[:, None]
    near = (makers >= 0) & (distance >= -period)
    relation = np.where(near, distance * flow_width(flow) + places, OUTSIDE)
    return relation, makers, tuple(apart.tolist())


def flow_width(flow: Flow) -> int:
    """One more than the highest output number of any operation."""
    return int(flow.places.max(initial=0)) + 1


def _verified(flow: Flow, start: int, period: int, count: int) -> Chain | None:
    """The longest chain among these blocks whose operands come from where they may.

    That is: the same block, the one before (at the same place in each), or before
    the chain.
    """
    relation, makers, apart = relations(flow, start, period, count)
    same = (relation[1:] == relation[:-1]).all(axis=1)
    inner = np.where(relation >= 0, relation, -1)
    joins = (inner[1:] == inner[:-1]).all(axis=1)
    edges = np.flatnonzero(~same) + 1
    groups = zip([0, *edges.tolist()], [*edges.tolist(), count], strict=True)
    best = (0, 0)
    for low, high in groups:
        # The first block of a chain may have its carry from anywhere before.
        low = low - 1 if low > 0 and joins[low - 1] else low
        outside = relation[high - 1] == OUTSIDE
        reach = makers[low:high, outside].max(axis=1, initial=-1)
        for first, last in _closed(reach, low, high, start, period):
            if last - first > best[1] - best[0]:
                best = (first, last)
    first, last = best
    if last - first < _LEAST_COUNT:
        return None
    at = start + first * period
    if not _is_chain(flow, relation, first, at, period, apart):
        return None
    block = float(flow.work[at : at + period].sum())
    share = block * (last - first) / max(float(flow.work.sum()), 1.0)
    if share < _LEAST_SHARE:
        return None
    saved = block * (last - first - 1)
    return Chain(start=at, period=period, count=last - first, apart=apart, saved=saved)


def _closed(
    reach: np.ndarray, low: int, high: int, start: int, period: int
) -> list[tuple[int, int]]:
    """Ranges of blocks that read nothing from the middle of the chain they form.

    `reach` is, per block from `low` on, the last operation outside that the block
    reads. Either the chain ends before the first offender, or it begins after what is
    read.
    """
    bad = np.flatnonzero(reach >= start + low * period)
    if not len(bad):
        return [(low, high)]
    ranges = [(low, low + int(bad[0]))]
    later = (int(reach.max()) - start) // period + 1
    if later < high and reach[later - low :].max() < start + later * period:
        ranges.append((later, high))
    return ranges


def _is_chain(
    flow: Flow,
    relation: np.ndarray,
    first: int,
    at: int,
    period: int,
    apart: tuple[int, ...],
) -> bool:
    """Whether rows kept apart are taken from outside, and blocks truly feed on."""
    pattern = relation[first + 1]
    base = flow.offsets[at]
    rows = (pattern[flow.offsets[at + p] - base] == OUTSIDE for p in apart)
    return all(rows) and _feeds_itself(flow, pattern, at, period)


def _feeds_itself(flow: Flow, pattern: np.ndarray, at: int, period: int) -> bool:
    """Whether what some block hands on depends on what it was handed, differentiably.

    Heads that stand side by side, cut in the middle, also hand something on: the rest
    of the work of one head. But nothing of it reaches a third block.
    """
    width = flow_width(flow)
    columns = slice(flow.offsets[at], flow.offsets[at + period])
    floating = flow.floating[columns]
    carried = (pattern < 0) & (pattern != OUTSIDE) & floating
    places = np.unique(pattern[carried]).tolist()
    number = {place: i for i, place in enumerate(places)}
    bounds = (flow.offsets[at : at + period + 1] - flow.offsets[at]).tolist()
    codes, is_floating = pattern.tolist(), floating.tolist()
    depends = [0] * period  # bit i: on carry i
    for position in range(period):
        mask = 0
        for column in range(bounds[position], bounds[position + 1]):
            code = codes[column]
            if code >= 0:
                mask |= depends[code // width] if is_floating[column] else 0
            elif code in number and is_floating[column]:
                mask |= 1 << number[code]
        depends[position] = mask
    # Carry i of the next block is made at `place`; follow it through the blocks.
    reach = [depends[place // width + period] for place in places]
    return any(_on_cycle(reach, i) for i in range(len(places)))


def _on_cycle(reach: list[int], start: int) -> bool:
    seen, todo = 0, reach[start]
    while todo & ~seen:
        new = (todo & ~seen).bit_length() - 1
        seen |= 1 << new
        todo |= reach[new]
    return bool(seen >> start & 1)
