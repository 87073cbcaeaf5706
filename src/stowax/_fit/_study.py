"""What is known of each batch size: predicted at first, planned and compiled if asked.

A batch size is another step: it is made, traced and surveyed once. Its prediction says
what it needs as it is written and under the smallest plan; its plan is the proof.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._errors import ArgumentError, StepError, StowaxError
from .._explain._describe import unplanned_seconds
from .._plan._finding import Found, find, search_for
from .._plan._opened import Opened, opened
from .._plan._plan import Plan
from .._plan._record import written_down
from .._records._fit import BatchTrial
from .._search._space import Attempt
from .._survey._survey import predict
from .._units import format_bytes

StepOfBatch = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A batch size before anything is compiled for it. Bytes per device.

    `written_bytes` are those of the step as it is written, its state donated where that
    is allowed, `least_bytes` those of the smallest plan.
    """

    opening: Opened
    budget: int
    written_bytes: int
    written_seconds: float
    least_bytes: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Study:
    """Batch sizes of one step, each looked at once.

    `wishes` are those of `stowax.plan`, by name; `say` takes lines of progress.
    """

    step_of_batch: StepOfBatch
    budget: Any
    wishes: Mapping[str, Any]
    say: Callable[[str], None]
    probes: dict[int, Probe] = dataclasses.field(default_factory=dict)
    found: dict[int, Found] = dataclasses.field(default_factory=dict)
    plans: dict[int, Plan] = dataclasses.field(default_factory=dict)

    def probe(self, batch: int) -> Probe:
        """What a batch size is predicted to need.

        **Raises:** `ArgumentError` for a function that makes no step, `StepError` for
        one that cannot be made or traced for this size.
        """
        if batch not in self.probes:
            self.say(f"batch {batch}: tracing and predicting")
            opening = self._opened(batch)
            with opening.again() as asked:
                budget = int(asked.budgets[0])
                search = search_for(asked, budget)
                space = search.rolled
                donate = bool(asked.donates) or space.may_donate
                written = predict(space.survey, None, donate=donate)
                least, _ = search.smallest_budget()
                problem = space.problem(budget)
                self.probes[batch] = Probe(
                    opening=opening,
                    budget=budget,
                    written_bytes=written.device_total,
                    written_seconds=unplanned_seconds(space.survey, problem),
                    least_bytes=min(least, written.device_total),
                )
                asked.programs.last = None  # not one of every batch at once
            probe = self.probes[batch]
            self.say(
                f"batch {batch}: predicted {format_bytes(probe.written_bytes)} as "
                f"written, at least {format_bytes(probe.least_bytes)} under a plan"
            )
        return self.probes[batch]

    def _opened(self, batch: int) -> Any:
        quiet = {**self.wishes, "progress": False}
        try:
            step, args = _made(self.step_of_batch, batch)
            return opened(step, args, self.budget, **quiet)
        except StowaxError:
            raise
        except Exception as error:
            raise StepError(
                f"step_of_batch: the step for a batch of {batch} fails with "
                f"{type(error).__name__}: {error}. If a batch has to divide by "
                "something, such as devices or microbatches, say so: multiple_of=4, "
                "or --multiple-of 4."
            ) from error

    def planned(self, batch: int) -> Plan:
        """The plan for a batch size, its program compiled."""
        if batch not in self.plans:
            opening = self.probe(batch).opening
            self.say(f"batch {batch}: planning and compiling")
            with opening.again() as asked:
                (found,) = find(dataclasses.replace(asked, say=self.say))
                self.found[batch] = found
                self.plans[batch] = written_down(found, taken_apart=opening.taken_apart)
        return self.plans[batch]

    def written(self, batch: int) -> Attempt | None:
        """The step as it is written, as it was compiled; that which needs the least."""
        if batch not in self.found:
            return None
        log = self.found[batch].search.log
        return min(
            (attempt for attempt in log if attempt.decisions is None),
            key=lambda attempt: attempt.measured.compiled_bytes,
            default=None,
        )

    def fits_as_written(self, batch: int) -> bool | None:
        """Whether a batch size fits as it is written; `None`: nothing was compiled."""
        attempt = self.written(batch)
        if attempt is None:
            return None
        return self.found[batch].search.fits(attempt)

    def copied(self) -> "Study":
        """What is known now, while another thread learns more: what comes last, first.

        A plan is noted after its programs, and these after the size's prediction.
        """
        plans, found = self.plans.copy(), self.found.copy()
        probes = self.probes.copy()
        return dataclasses.replace(self, probes=probes, found=found, plans=plans)

    def trials(self) -> tuple[BatchTrial, ...]:
        """All that is known, by batch."""
        return tuple(
            trial for batch in sorted(self.probes) for trial in self._trials(batch)
        )

    def _trials(self, batch: int) -> list[BatchTrial]:
        probe = self.probes[batch]
        plan = self.plans.get(batch)
        trials = [self._as_written(batch)]
        if plan is None:
            fits = probe.least_bytes <= probe.budget
            trials.append(
                BatchTrial(
                    batch=batch,
                    way="plan",
                    predicted_bytes=probe.least_bytes,
                    predicted_seconds=0.0,
                    fits=fits,
                )
            )
        elif plan.outcome != "unneeded" and plan.decisions:
            trials.append(
                BatchTrial(
                    batch=batch,
                    way="plan",
                    predicted_bytes=plan.predicted_device_bytes,
                    predicted_seconds=plan.search.model_seconds,
                    fits=plan.fits,
                    device_bytes=plan.device_bytes,
                    host_bytes=plan.host_bytes,
                    step_seconds=plan.step_seconds,
                )
            )
        return trials

    def _as_written(self, batch: int) -> BatchTrial:
        probe, attempt = self.probes[batch], self.written(batch)
        trial = BatchTrial(
            batch=batch,
            way="as written",
            predicted_bytes=probe.written_bytes,
            predicted_seconds=probe.written_seconds,
            fits=probe.written_bytes <= probe.budget,
        )
        if attempt is None:
            return trial
        measured = attempt.measured
        return dataclasses.replace(
            trial,
            fits=self.found[batch].search.fits(attempt),
            device_bytes=measured.compiled_bytes,
            host_bytes=measured.host_bytes,
            step_seconds=measured.step_seconds,
        )


def _made(
    step_of_batch: StepOfBatch, batch: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """**Raises:** `ArgumentError` for a function that does not return step and args."""
    made: Any = step_of_batch(batch)
    if isinstance(made, tuple) and len(made) == 2:
        step, args = made
        if callable(step) and isinstance(args, tuple | list):
            return step, tuple(args)
    raise ArgumentError(
        "step_of_batch",
        f"a function that returned {type(made).__name__} for a batch of {batch}",
        "Return (step, args): the training step, and a tuple of its arguments for a "
        "batch of that size.",
    )
