"""Seconds per run of programs, measured side by side.

Accelerators run what is dispatched in order and return at once, so a few runs are
dispatched together and waited for once: what a dispatch costs the host hides behind the
run before. Where several programs are to be compared they take turns, so that a machine
that grows warm or busy is no advantage to the one that came first. The median of the
rounds counts: one that something else disturbed is not averaged in.

No JAX in here, and the clock is an argument: what is tested is the bookkeeping.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[], Any]
"""Starts a program once; returns what it makes, to be waited for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """How to measure, and with what.

    `wait` blocks until what a run made is there. A sample is as many runs as take
    `sample_seconds`, at most `most_runs`; `rounds` samples are taken of every program,
    fewer once `most_seconds` are spent on each. With `one_by_one` every run is waited
    for: on a CPU runs that do not need one another would share its cores.
    """

    wait: Callable[[Any], Any]
    one_by_one: bool = False
    clock: Callable[[], float] = time.perf_counter
    sample_seconds: float = 0.02
    most_seconds: float = 1.0
    most_runs: int = 8
    rounds: int = 9

    def seconds(self, *runs: Run) -> list[float]:
        """The median seconds of one run of each program, in their order.

        The first run of each compiles, the second finds how long one takes: neither is
        a sample.
        """
        counts = []
        for run in runs:
            self._sample(run, 1)
            once = max(self._sample(run, 1), 1e-9)
            counts.append(
                max(1, min(self.most_runs, round(self.sample_seconds / once)))
            )
        samples: list[list[float]] = [[] for _ in runs]
        started = self.clock()
        for _ in range(self.rounds):
            for mine, run, count in zip(samples, runs, counts, strict=True):
                mine.append(self._sample(run, count))
            if self.clock() - started > self.most_seconds * len(runs):
                break
        return [statistics.median(mine) for mine in samples]

    def _sample(self, run: Run, count: int) -> float:
        started = self.clock()
        made = None
        for _ in range(count):
            made = run()
            if self.one_by_one:
                self.wait(made)
        self.wait(made)
        return (self.clock() - started) / count


def per_second(amount: float, seconds: Sequence[float]) -> list[float]:
    """What is done in a second; a clock that did not move measured nothing.

    **Raises:** `ValueError` for no time at all.

    >>> per_second(8, [2.0])
    [4.0]
    """
    if not all(each > 0 for each in seconds):
        raise ValueError("the clock did not move while it ran")
    return [amount / each for each in seconds]
