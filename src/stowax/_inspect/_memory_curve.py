"""Memory over the time of a step: places with their roles, loops written out.

`read_memory` joins three things that the compiler leaves: where arrays lie and how long
(`_buffers`), what runs in which order (`Program`), and how long that takes
(`Timeline`). The compiler's schedule has a loop's body once. Here it is written out,
trip by trip: a stack that is reserved as a whole fills up in the forward loop and
empties in the backward one.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .._records._memory import (
    MEMORY_ROLES,
    Block,
    Loop,
    MemoryCurve,
    MemoryRole,
    MemoryTimeline,
    Moment,
    held_part,
)
from .._records._memory_places import Layout, Place
from .._records._program import HOST_SPACE, Program
from .._records._timeline import Timeline
from ._memory_roles import facts_of, role_of, telling

_MOST_MOMENTS = 6000
"""Moments of a curve; a longer one keeps the highest of neighbours."""

# XLA's numbers of memories that are the device's: on a TPU, 1 and up are on the chip
# beside the cores and no part of its memory figures. On a GPU 1 is for collectives.
_DEVICE_SPACES = {"tpu": {0}, "gpu": {0, 1}, "cpu": {0}}


def read_memory(
    module: bytes,
    assignment: bytes,
    program: Program,
    timeline: Timeline,
    *,
    platform: str,
    arguments: Mapping[str, str],
    compiler_peak_bytes: int,
) -> MemoryTimeline:
    """What lies in a device's and its host's memory while `program` runs.

    **Arguments:** `module` and `assignment` are serialized, as `_buffers.read_layout`
    takes them; `arguments` has the roles of the program's arguments by name.

    **Raises:** `ArgumentError` if the bytes cannot be read.
    """
    # protobuf is loaded only when a program is read
    from .._hlo._buffers import read_layout

    layout = read_layout(module, assignment)
    seconds, loops = _schedule_times(layout, program, timeline)
    facts = facts_of(layout, arguments, _crossing(program), loops)
    kept = _DEVICE_SPACES.get(platform, {0})
    curves = {}
    for name, spaces in (("device", kept), ("host", {HOST_SPACE})):
        places = [p for p in layout.places if p.space in spaces]
        blocks = [_block(p, role_of(p, facts), loops) for p in places]
        curves[name] = _curve(blocks, layout, seconds, loops)
    return MemoryTimeline(
        **curves,
        loops=tuple(loops),
        peak_bytes=_as_the_compiler_counts(layout),
        compiler_peak_bytes=compiler_peak_bytes,
    )


def _as_the_compiler_counts(layout: Layout) -> int:
    """The peak by XLA's own rule, to be compared with what it reports.

    All arguments, outputs and constants, wherever they lie, and the largest sum of
    temporaries that one memory holds at a time: on chips with a large one beside the
    cores that may be that one.
    """
    lasting = sum(p.bytes for p in layout.places if p.kind != "temporary")
    most = 0
    for space in {p.space for p in layout.places}:
        change = np.zeros(len(layout.schedule) + 1, dtype=np.int64)
        for place in layout.places:
            if place.space == space and place.kind == "temporary":
                change[place.first] += place.bytes
                change[place.last + 1] -= place.bytes
        most = max(most, int(np.cumsum(change).max(initial=0)))
    return lasting + most


def _crossing(program: Program) -> Iterator[str]:
    """Instructions whose results or operands are on their way over the link."""
    by_name = {
        item.name: item
        for computation in program.computations.values()
        for item in computation.instructions
    }
    for transfer in program.transfers:
        if transfer.direction == "host-to-host":
            continue
        yield transfer.start
        yield transfer.done
        if transfer.direction == "device-to-host" and transfer.start in by_name:
            for name in by_name[transfer.start].operands:
                # The value that leaves; not the whole stack that a slot is cut from.
                if name in by_name and by_name[name].result_bytes <= transfer.bytes:
                    yield name


def _block(place: Place, role: MemoryRole, loops: Sequence[Loop]) -> Block:
    best = telling(place)
    largest = max(place.members, key=lambda m: m.array_bytes, default=None)
    source = place.source or (best.source if best else "")
    shape = ""
    if largest is not None and largest.dtype:
        shape = f"{largest.dtype}[{','.join(map(str, largest.dimensions))}]"
    trips = {loop.body: loop.trips for loop in loops}
    filled = next(
        (
            m.computation
            for m in place.members
            if m.updates and m.dimensions[:1] == (trips.get(m.computation),)
        ),
        "",
    )
    if not source and place.kind == "temporary":
        source = next((m.source for m in place.members if m.source), "")
    return Block(
        name=best.instruction if best else "",
        bytes=place.bytes,
        array_bytes=min(place.bytes, largest.array_bytes if largest else place.bytes),
        shape=shape,
        role=role,
        framework_name=place.argument or (best.framework_name if best else ""),
        source=source,
        first=place.first,
        last=place.last,
        filled_in=filled,
        emptied_in=_emptied_in(place, loops, filled),
    )


def _emptied_in(place: Place, loops: Sequence[Loop], filled: str) -> str:
    """The loop that reads a stack slot by slot: the last that it lives through."""
    written = next((loop for loop in loops if loop.body == filled), None)
    if written is None:
        return ""
    later = [
        loop.body
        for loop in loops
        if loop.trips == written.trips and written.last < loop.first <= place.last
    ]
    return later[-1] if later else ""


def _schedule_times(
    layout: Layout, program: Program, timeline: Timeline
) -> tuple[np.ndarray, list[Loop]]:
    """Seconds of every position of the flat schedule, one time, and the loops."""
    spent: dict[str, float] = collections.defaultdict(float)
    for interval in timeline.intervals:
        if interval.lane == "compute":
            spent[interval.name] += interval.seconds
    loops = []
    turns = np.ones(len(layout.schedule))
    for computation in program.computations.values():
        for item in computation.instructions:
            if item.opcode != "while" or not item.called:
                continue
            first, last = layout.spans[item.called[0]]
            trips = 1 if item.trips is None else item.trips
            turns[first : last + 1] *= max(1, trips)
            loops.append(
                Loop(
                    body=item.called[0],
                    trips=trips,
                    first=first,
                    last=last,
                    framework_name=item.op_name,
                    source=item.source,
                )
            )
    seconds = np.zeros(len(layout.schedule))
    for position, (computation, name) in enumerate(layout.schedule):
        runs = program.computations.get(computation)
        if runs is not None and runs.executions:
            # A turn passes every branch: each takes its share of the turns.
            share = min(1.0, runs.executions / turns[position])
            seconds[position] = spent[name] / turns[position] * share
    return seconds, sorted(loops, key=lambda loop: (loop.first, -loop.last))


def _curve(
    blocks: Sequence[Block],
    layout: Layout,
    seconds: np.ndarray,
    loops: Sequence[Loop],
) -> MemoryCurve:
    positions = len(layout.schedule)
    change = np.zeros((positions + 1, len(MEMORY_ROLES)), dtype=np.int64)
    for block in blocks:
        role = MEMORY_ROLES.index(block.role)
        change[block.first, role] += block.bytes
        change[block.last + 1, role] -= block.bytes
    alive = np.cumsum(change, axis=0)[:positions]
    totals = alive.sum(axis=1) if positions else np.zeros(1)
    peak = int(totals.argmax())
    walk = _Walk(blocks, alive, change, seconds, loops)
    moments = tuple(walk.moments())
    reached = next((m.seconds for m in moments if m.position == peak), 0.0)
    return MemoryCurve(
        peak_bytes=int(totals[peak]),
        peak_position=peak,
        peak_instruction=layout.schedule[peak][1] if positions else "",
        peak_seconds=reached,
        blocks=tuple(sorted(blocks, key=lambda b: (-b.bytes, b.first))),
        moments=moments,
    )


class _Walk:
    """The flat schedule run through, loops as often as they run."""

    def __init__(
        self,
        blocks: Sequence[Block],
        alive: np.ndarray,
        change: np.ndarray,
        seconds: np.ndarray,
        loops: Sequence[Loop],
    ):
        self.alive, self.seconds, self.loops = alive, seconds, loops
        self.blocks = [b for b in blocks if b.filled_in or b.emptied_in]
        self.places = {loop.body: loop for loop in loops}
        # Only where something comes or goes is there anything to tell.
        self.changes: np.ndarray = np.any(change[: len(seconds)], axis=1)
        if len(self.changes):
            self.changes[[0, -1]] = True
        trips = sum(loop.trips for loop in loops) or 1
        self.per_trip = max(2, _MOST_MOMENTS // trips)
        self.now = 0.0

    def moments(self) -> Iterator[Moment]:
        """All moments, in time."""
        yield from self._range(0, len(self.seconds) - 1, None, 0)

    def _range(
        self, first: int, last: int, inside: Loop | None, trip: int
    ) -> Iterator[Moment]:
        shown = self._shown(first, last, inside)
        position = first
        while position <= last:
            inner = self._loop_at(position, inside, last)
            if inner is not None:
                for k in range(inner.trips):
                    yield from self._range(inner.first, inner.last, inner, k)
                position = inner.last + 1
                continue
            if position in shown:
                yield self._moment(position, inside, trip)
            self.now += float(self.seconds[position])
            position += 1

    def _loop_at(self, position: int, inside: Loop | None, last: int) -> Loop | None:
        """The outermost loop below `inside` that begins at a position."""
        for loop in self.loops:
            if loop.first == position and loop is not inside and loop.last <= last:
                return loop
        return None

    def _shown(self, first: int, last: int, inside: Loop | None) -> set[int]:
        """The positions of a stretch that make moments, the highest where many are."""
        found = np.flatnonzero(self.changes[first : last + 1]) + first
        most = _MOST_MOMENTS if inside is None else self.per_trip
        if len(found) > most:
            totals = self.alive.sum(axis=1)
            parts = np.array_split(found, most)
            found = [part[totals[part].argmax()] for part in parts if len(part)]
        return {int(position) for position in found} | ({first} if inside else set())

    def _moment(self, position: int, inside: Loop | None, trip: int) -> Moment:
        body = inside.body if inside else ""
        empty = sum(
            round(b.bytes * (1 - held_part(b, position, body, trip, self.places)))
            for b in self.blocks
            if b.first <= position <= b.last
        )
        return Moment(
            seconds=self.now,
            position=position,
            bytes=tuple(int(n) for n in self.alive[position]),
            empty=empty,
            loop=body,
            trip=trip,
        )
