"""A program's events cut into the steps of its loop, and summed by line.

Nobody says where a step begins. It is the call of one jitted function from one line,
over and over; of several such calls, the one that handles the most bytes (a step
handles the whole state), and of about as much, the one called most often. What the user
jitted comes before what a library did: an optimizer outside of jit calls some of these.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .._records._audit import Event
from .._where import NOWHERE, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The loop: where its step is called, and which events begin its steps."""

    events: tuple[Event, ...]
    starts: tuple[int, ...] = ()
    place: Place = NOWHERE
    thread: int = 0

    @property
    def count(self) -> int:
        """Number of steps seen."""
        return len(self.starts)

    @property
    def consecutive(self) -> tuple[tuple[int, int], ...]:
        """Where steps begin that were seen from one to the next: both events."""
        pauses = [k for k, event in enumerate(self.events) if event.what == "pause"]
        return tuple(
            (before, after)
            for before, after in itertools.pairwise(self.starts)
            if bisect.bisect(pauses, before) == bisect.bisect(pauses, after)
        )

    @property
    def seconds(self) -> tuple[float, ...]:
        """Durations of the steps that were seen from one to the next."""
        return tuple(
            self.events[after].at - self.events[before].at
            for before, after in self.consecutive
        )

    def step_of(self, event: int) -> int:
        """Number of the step in which an event lies, or -1 for before them all."""
        return bisect.bisect_right(self.starts, event) - 1

    def inside(self) -> Iterator[tuple[int, int, Event]]:
        """Step, number and event of all that the loop's thread did in its steps."""
        if not self.starts:
            return
        for number in range(self.starts[0], len(self.events)):
            event = self.events[number]
            if event.thread == self.thread:
                yield self.step_of(number), number, event

    def is_regular(self, steps: Iterable[int]) -> bool:
        """Whether what happens in these steps happens in most: in half, and twice."""
        seen = len({step for step in steps if step >= 0})
        return seen >= 2 and 2 * seen >= self.count


def steps_of(events: tuple[Event, ...]) -> Steps:
    """The steps of the loop in `events`; none where nothing repeats."""
    marked = [k for k, event in enumerate(events) if event.what == "step"]
    if marked:
        calls = [e for e in events[marked[0] :] if e.what == "call"]
        first = calls[0] if calls else events[marked[0]]
        return Steps(
            events=events,
            starts=tuple(marked),
            place=first.place,
            thread=events[marked[0]].thread,
        )
    for what in ("call", "operation"):
        groups: dict[object, list[int]] = defaultdict(list)
        for number, event in enumerate(events):
            if event.what == what and event.place is not NOWHERE:
                groups[event.place, event.name, event.key, event.thread].append(number)
        repeated = [group for group in groups.values() if len(group) > 1]
        if repeated:
            most = max(events[group[-1]].bytes for group in repeated)
            large = [g for g in repeated if 2 * events[g[-1]].bytes >= most]
            own = [g for g in large if not events[g[-1]].library]
            starts = max(own or large, key=len)
            return Steps(
                events=events,
                starts=tuple(starts),
                place=events[starts[0]].place,
                thread=events[starts[0]].thread,
            )
    return Steps(events=events)


@dataclass(frozen=True, slots=True)
class Line:
    """What regularly happens at a line: its events, and the steps they lie in."""

    place: Place
    events: tuple[Event, ...]
    steps: tuple[int, ...]
    total: int  # steps of the loop

    @property
    def count(self) -> float:
        """Events a step."""
        return rate(len(self.events), self.total)

    @property
    def bytes(self) -> int:
        """Bytes a step."""
        return round(sum(event.bytes for event in self.events) / self.total)

    @property
    def seconds(self) -> float:
        """Seconds a step."""
        return sum(event.seconds for event in self.events) / self.total


def rate(count: int, steps: int) -> float:
    """`count` a step, whole where it is about whole: ends of loops are ragged."""
    found = count / max(steps, 1)
    return round(found) if found > 0.7 and abs(found - round(found)) < 0.3 else found


def regular_lines(steps: Steps, wanted: Callable[[Event, int], bool]) -> list[Line]:
    """Lines with events that are `wanted` (event, its number) in most of the steps."""
    found: dict[tuple[str, int], list[tuple[int, Event]]] = defaultdict(list)
    for step, number, event in steps.inside():
        if wanted(event, number):
            found[event.place[:2]].append((step, event))
    lines = []
    for pairs in found.values():
        if steps.is_regular(step for step, _ in pairs):
            lines.append(
                Line(
                    pairs[0][1].place,
                    tuple(event for _, event in pairs),
                    tuple(step for step, _ in pairs),
                    steps.count,
                )
            )
    return lines
