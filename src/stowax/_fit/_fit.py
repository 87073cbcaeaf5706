"""`stowax.fit`: the largest batch for a budget, and what each size costs in time.

Predictions bracket the largest batch as it is written and under a plan; then only the
ends of the brackets are compiled, and a few sizes below them for their step time. Where
a compiler needs more or less than was predicted, the bracket moves by that factor.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from .._errors import ArgumentError
from .._files import check_writable, write_whole
from .._plan import _asked
from .._plan._plan import Plan
from .._records._fit import FitRecord
from .._target._machine import Target
from .._units import parse_bytes, parse_share
from ._bracket import bracket
from ._study import StepOfBatch, Study

_FIRST = 8
"""Units of the first batch that is looked at: of very small ones less is known."""

_MOST_COMPILES = 3
"""Batch sizes that are planned to find the largest of one kind."""

_FULL = 0.97
"""Part of the budget that a program has to fill for no larger batch to be tried."""

_LARGER = 1.02
"""By how much a batch has to be larger to be worth another program."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit(FitRecord):
    """What `stowax.fit` found; `print` shows what the command line does.

    `plans` has the plan of each batch size that was compiled.
    """

    plans: Mapping[int, Plan]

    def __str__(self) -> str:
        from ..report import fit_text

        return fit_text(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the front of batch size and throughput as a page with a picture.

        **Raises:** `ArgumentError` if nothing can be written there;
        `MissingExtraError` without the extra `[report]`.
        """
        from ..report import fit_page

        check_writable(path, "path")
        write_whole(path, fit_page(self))


def fit(
    step_of_batch: StepOfBatch,
    *,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    host_reserve: int | str | None = None,
    target: str | Target | None = None,
    batches: Iterable[int] | None = None,
    multiple_of: int = 1,
    pin: Mapping[str, str] | None = None,
    forbid: Collection[str] = (),
    compiles: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: _asked.Progress = None,
) -> Fit:
    """The largest batch that fits, and batch size against memory and step time.

    **Arguments:**

    - `step_of_batch`: a function of the batch size that returns `(step, args)`: the
      training step, and a tuple of its arguments for a batch of that size (arrays or
      `jax.ShapeDtypeStruct`s; shapes are enough).
    - `budget`: device memory per device, in bytes or as text such as `"16GiB"`; by
      default what the target has. `host_budget` likewise, of the host's, less
      `host_reserve`.
    - `target`: the machine, as for `stowax.plan`.
    - `batches`: the sizes to look at; those that are predicted to fit are compiled.
      `None`: the largest as it is written and under a plan are looked for, and a few
      below them are compiled for their step time.
    - `multiple_of`: sizes are multiples of it, such as the number of devices that a
      batch is spread over.
    - `pin`, `forbid`, `compiles`, `cache`, `progress`: as for `stowax.plan`.

    **Returns:** a `Fit`, with `largest_as_written`, `largest`, `trials`, `front` and
    `plans`. What fits is what was compiled.

    **Raises:** `ArgumentError` for what cannot be used, a budget as a share among it;
    what `stowax.plan` raises.

    >>> def step_of_batch(batch):
    ...     def loss(w, x):
    ...         return jnp.mean(jnp.tanh(x @ w) ** 2)
    ...     def step(w, x):
    ...         return w - 0.1 * jax.grad(loss)(w, x)
    ...     w = jax.ShapeDtypeStruct((512, 512), "float32")
    ...     x = jax.ShapeDtypeStruct((batch, 512), "float32")
    ...     return jax.jit(step, donate_argnums=0), (w, x)
    >>> found = stowax.fit(
    ...     step_of_batch, budget="8MiB", target="h200", batches=(256, 4096)
    ... )
    >>> found.largest
    256
    """
    wishes = {
        "host_budget": host_budget,
        "host_reserve": host_reserve,
        "target": target,
        "pin": pin,
        "forbid": forbid,
        "compiles": compiles,
        "cache": cache,
    }
    return Fitting(
        step_of_batch, budget, batches, multiple_of, progress, wishes
    ).finished()


class Fitting:
    """`fit` under way: what is known so far can be asked for at any time.

    Takes the arguments of `fit`, as `wishes` those that are `stowax.plan`'s.
    """

    def __init__(
        self,
        step_of_batch: StepOfBatch,
        budget: int | str | None,
        batches: Iterable[int] | None,
        multiple_of: int,
        progress: _asked.Progress,
        wishes: Mapping[str, Any],
    ):
        self._started = time.perf_counter()
        _check(step_of_batch, budget, multiple_of)
        self._sizes, self._unit = _sizes(batches, multiple_of), multiple_of
        self._study = Study(
            step_of_batch=step_of_batch,
            budget=budget,
            wishes=wishes,
            say=_asked.sayer(progress, self._started),
        )

    def finished(self) -> Fit:
        """What `fit` returns, once all is done."""
        study = self._study
        if self._sizes is None:
            _look_for_largest(study, self._unit)
        for batch in self._sizes or ():
            probe = study.probe(batch)
            if probe.least_bytes <= probe.budget:
                study.planned(batch)
        return _written_down(study, time.perf_counter() - self._started)

    def so_far(self) -> Fit | None:
        """What is known by now, asked for in any thread; `None` before any size is."""
        study = self._study.copied()
        if not study.probes:
            return None
        return _written_down(study, time.perf_counter() - self._started)


def _look_for_largest(study: Study, unit: int) -> None:
    """Brackets both kinds by predictions, and compiles at the ends and below."""
    first = _FIRST * unit
    budget = study.probe(first).budget

    def least(batch: int) -> int:
        return study.probe(batch).least_bytes

    def written(batch: int) -> int:
        return study.probe(batch).written_bytes

    def planned_bytes(batch: int) -> int | None:
        plan = study.planned(batch)
        known = plan.search.smallest_budget_is == "compiled" and not plan.fits
        return plan.smallest_budget if known else plan.device_bytes

    def written_bytes(batch: int) -> int | None:
        study.planned(batch)
        attempt = study.written(batch)
        return attempt.measured.compiled_bytes if attempt else None

    def plan_fits(batch: int) -> bool:
        return study.planned(batch).fits

    def step_fits(batch: int) -> bool:
        study.planned(batch)
        return bool(study.fits_as_written(batch))

    most = _confirmed(least, planned_bytes, plan_fits, budget, first, unit)
    plain = _confirmed(written, written_bytes, step_fits, budget, first, unit)
    for batch in _between(plain, most, unit):
        study.planned(batch)


def _confirmed(
    predicted: Callable[[int], int],
    compiled: Callable[[int], int | None],
    fits: Callable[[int], bool],
    budget: int,
    first: int,
    unit: int,
) -> int:
    """The largest batch whose compiled program fits; 0 where none was found."""
    allowed, best, too_large = budget, 0, 0
    for _ in range(_MOST_COMPILES):
        batch, _ = bracket(predicted, allowed, first=first, unit=unit)
        if too_large and batch >= too_large:  # what fits is no measure of what does not
            batch = (best + too_large) // 2 // unit * unit if best else too_large - unit
        if batch <= best * _LARGER:
            break
        taken, fitting = compiled(batch), fits(batch)
        if fitting:
            best = max(best, batch)
        else:
            too_large = batch
        if taken is None or (fitting and taken >= _FULL * budget):
            break
        # What was predicted for this one, where the compiler took so much.
        allowed = int(budget * predicted(batch) / taken)
    return best


def _between(plain: int, most: int, unit: int) -> Iterable[int]:
    """Sizes beside the largest that say what a larger batch brings."""
    largest = max(plain, most)
    chosen = {(plain or largest) // 2}
    if plain and most > 1.5 * plain:
        chosen.add(int((plain * most) ** 0.5))
    rounded = {batch // unit * unit for batch in chosen}
    return sorted(batch for batch in rounded if 0 < batch < largest)


def _written_down(study: Study, seconds: float) -> Fit:
    trials, plans = study.trials(), study.plans
    one = next(iter(study.probes.values()))
    machine = one.opening.asked.machine
    step = getattr(one.opening.asked.step, "__name__", "step")

    def ends(way_fits: Callable[[int], bool | None], way: str) -> tuple[int, int]:
        fitting = [b for b in plans if way_fits(b)]
        largest = max(fitting, default=0)
        beyond = [t.batch for t in trials if t.way == way and not t.fits]
        return largest, min((b for b in beyond if b > largest), default=0)

    plain, after_plain = ends(study.fits_as_written, "as written")
    largest, after = ends(lambda batch: plans[batch].fits, "plan")
    return Fit(
        step=step,
        target=machine.name,
        compile_only=machine.compile_only,
        budget_bytes=one.budget,
        host_budget_bytes=one.opening.asked.host_budget,
        largest_as_written=plain,
        next_as_written=after_plain,
        largest=max(largest, plain),
        next=after,
        trials=trials,
        seconds=seconds,
        plans=dict(sorted(plans.items())),
    )


def _check(step_of_batch: Any, budget: Any, multiple_of: Any) -> None:
    """**Raises:** `ArgumentError` for an argument of the wrong kind."""
    if not callable(step_of_batch):
        raise ArgumentError(
            "step_of_batch",
            type(step_of_batch).__name__,
            "Give a function of the batch size that returns (step, args).",
        )
    if parse_share(budget, "budget") is not None:
        raise ArgumentError(
            "budget",
            f"{budget!r}, a share of what the step takes, which grows with the batch",
            "Write bytes, or text such as '16GiB'.",
        )
    if budget is not None:
        parse_bytes(budget, "budget")
    if type(multiple_of) is not int or multiple_of < 1:
        raise ArgumentError(
            "multiple_of", f"{multiple_of!r}", "Write a whole number above zero."
        )


def _sizes(batches: Any, multiple_of: int) -> list[int] | None:
    """The sizes that were asked for, in order, each once.

    **Raises:** `ArgumentError` for none at all, and for what is no size.
    """
    if batches is None:
        return None
    given = list(batches) if isinstance(batches, Iterable) else [batches]
    wrong = [b for b in given if type(b) is not int or b < 1 or b % multiple_of]
    if not given or wrong or isinstance(batches, str):
        of = f" that are multiples of {multiple_of}" if multiple_of > 1 else ""
        raise ArgumentError(
            "batches",
            f"{wrong[0]!r}" if wrong else f"{batches!r}",
            f"Write whole numbers above zero{of}, such as "
            f"({8 * multiple_of}, {16 * multiple_of}).",
        )
    return sorted(set(given))
