"""Batch size against memory and time, as plain records: what `stowax.fit` found.

No JAX in here; `report` prints these and draws them.
"""

import dataclasses
import json
from typing import Literal

Way = Literal["as written", "plan"]
"""How a step runs: as its author wrote it, or under a plan."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """One batch size, run one way: predicted, and compiled where it was worth it.

    `predicted_bytes` are those of a device; for a plan that was not compiled, the least
    that any needs. `predicted_seconds` is the planner's model of a step (0: nobody
    asked it). `device_bytes`, `host_bytes` and `step_seconds` are of the compiled
    program, per device, the last simulated from its schedule; all are 0 where nothing
    was compiled, the last also where the compiler refused. `fits` is what the compiled
    program says, or the prediction where there is none.
    """

    batch: int
    way: Way
    predicted_bytes: int
    predicted_seconds: float
    fits: bool
    device_bytes: int = 0
    host_bytes: int = 0
    step_seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether the figures are those of a compiled program."""
        return self.device_bytes > 0

    @property
    def per_second(self) -> float:
        """Items of the batch in a second, by the compiled schedule; 0 without one."""
        return self.batch / self.step_seconds if self.step_seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitRecord:
    """What `stowax.fit` found for one budget.

    `largest_as_written` and `largest` are the largest batches whose compiled programs
    fit, the second under a plan if that is larger; 0 where none was found.
    `next_as_written` and `next` are the smallest that are known, or predicted, not to
    (0: nothing is known to be too large). `trials` are all that were looked at, by
    batch. `seconds` is the wall time that it took.
    """

    step: str
    target: str
    compile_only: bool
    budget_bytes: int
    host_budget_bytes: int
    largest_as_written: int
    next_as_written: int
    largest: int
    next: int
    trials: tuple[BatchTrial, ...]
    seconds: float

    @property
    def front(self) -> tuple[BatchTrial, ...]:
        """Compiled trials that fit and are not beaten, the smallest batch first.

        None that fits has a batch as large and takes as little time for a step.
        """
        known = self._known
        return tuple(one for one in known if not any(_beats(o, one) for o in known))

    @property
    def fastest(self) -> BatchTrial | None:
        """The compiled trial that fits and makes the most items in a second."""
        return max(self._known, key=lambda trial: trial.per_second, default=None)

    @property
    def _known(self) -> list[BatchTrial]:
        return [t for t in self.trials if t.compiled and t.fits and t.step_seconds]

    def to_json(self) -> str:
        """The record as JSON text; `front` is marked in the trials."""
        fields = [f.name for f in dataclasses.fields(FitRecord)]
        record = {name: getattr(self, name) for name in fields if name != "trials"}
        front = self.front
        record["trials"] = [
            dataclasses.asdict(trial)
            | {"per_second": trial.per_second, "front": trial in front}
            for trial in self.trials
        ]
        return json.dumps(record, indent=1)


def _beats(one: BatchTrial, other: BatchTrial) -> bool:
    """Whether one is as large and as fast as another, and better in one of the two."""
    larger, faster = one.batch - other.batch, other.step_seconds - one.step_seconds
    return larger >= 0 and faster >= 0 and (larger > 0 or faster > 0)
