"""What the search found, written down as a `Plan`."""

import dataclasses
from collections.abc import Callable

from .._explain._certificate import certify
from .._explain._describe import (
    baseline_records,
    decision_records,
    host_notes,
    notes,
    overlap_notes,
    stack_records,
    unplanned_seconds,
)
from .._explain._fast_memory import fast_memory_notes
from .._explain._in_the_way import in_the_way, peak_of_attempt
from .._explain._sensitivity import link_notes
from .._planner import solve
from .._records._plan import (
    Baseline,
    PinPrice,
    ProgramRecord,
    ProofRecord,
    SearchRecord,
    Trial,
)
from .._records._stages import TILE, Decisions
from .._search._loop import Search
from .._search._space import Attempt, Space, foreseen_bytes, narrowed
from .._survey._asked import Asked
from .._survey._survey import Survey
from .._versions import versions
from ._asked import reserve_note
from ._finding import Found
from ._plan import Plan


def written_down(found: Found, *, taken_apart: bool) -> Plan:
    """The plan that was found; `taken_apart` as in `ProgramRecord`."""
    best, survey = found.best, found.best.space.survey
    decisions = ()
    if best.decisions is not None:
        done, wishes = survey.step_plan(best.decisions), best.space.preferences
        decisions = decision_records(survey, best.decisions, done, wishes)
    return Plan(
        program=_program(survey, best, taken_apart),
        decisions=decisions,
        proof=_proof(found.search, best),
        search=_search(found.search, best, found.seconds),
    )


def _program(survey: Survey, best: Attempt, taken_apart: bool) -> ProgramRecord:
    """How the step is read, rewritten and compiled."""
    traced, machine = survey.step, survey.target
    rewritten = best.decisions is not None and bool(traced.stacks)
    said = best.solution and best.solution.evaluation
    return ProgramRecord(
        step=traced.name,
        target=machine.name,
        device_kind=machine.device_kind,
        compile_only=machine.compile_only,
        arguments=survey.arguments(best.decisions),
        taken_apart=taken_apart,
        stacks=stack_records(survey, said, rewritten=rewritten),
        rewritten=rewritten,
        options=survey.options,
        donate_argnums=survey.step.donate if best.donated else (),
        compiler_options=dict(best.options),
        streaming=survey.streaming(best.decisions),
        versions=versions(),
    )


def _proof(search: Search, best: Attempt) -> ProofRecord:
    """What the compiled program shows."""
    survey, measured, fits = best.space.survey, best.measured, search.fits(best)
    timeline = measured.inspection.timeline if measured.inspection else None
    peak = None if fits else peak_of_attempt(best)
    return ProofRecord(
        fits=fits,
        budget_bytes=search.budget,
        host_budget_bytes=search.asked.host_budget,
        host_reserve_bytes=search.asked.host_reserve,
        device_bytes=measured.compiled_bytes,
        host_bytes=measured.host_bytes,
        step_seconds=measured.step_seconds,
        exposed_seconds=timeline.exposed_seconds if timeline else 0.0,
        in_the_way=in_the_way(survey, peak) if peak else (),
        peak=peak,
        notes=(
            *host_notes(survey, best.decisions, measured.inspection),
            *notes(
                survey,
                fits,
                measured.host_bytes,
                best.decisions,
                unrolled=best.space.as_written,
            ),
            *(_reserved(search.asked) if not fits else ()),
            *(fast_memory_notes(search, best) if fits else ()),
            *(link_notes(search.budget, best) if fits else ()),
            *(overlap_notes(survey, measured.inspection) if fits else ()),
        ),
    )


def _reserved(asked: Asked) -> tuple[str, ...]:
    note = reserve_note(asked.host_reserve, asked.host_budget)
    return (note,) if note else ()


def _search(search: Search, best: Attempt, seconds: float) -> SearchRecord:
    """What was predicted, tried and compared in `seconds`."""
    certificate = certify(search, best)
    smallest, source = search.smallest_budget()
    baselines = _baselines(search, best)
    if search.fits(best):  # what the table says of a policy counts, too
        by_hand = min((b.device_bytes for b in baselines if b.fits), default=smallest)
        if by_hand < smallest:
            smallest, source = by_hand, "predicted"
    written = _written(search, best)
    foreseen = (0, 0.0) if written else _foreseen(search, best)
    return SearchRecord(
        outcome=certificate.outcome,
        predicted_device_bytes=_predicted(best.space, best.decisions)
        if best.decisions
        else best.measured.predicted_bytes,
        model_seconds=certificate.model_seconds,
        bound_seconds=certificate.bound_seconds,
        gap=certificate.gap,
        binding=certificate.binding,
        seconds_per_gib=certificate.seconds_per_byte * 2**30,
        smallest_budget=smallest,
        smallest_budget_is=source,
        baselines=baselines,
        trials=_trials(search, best),
        written=written,
        written_predicted_bytes=foreseen[0],
        written_model_seconds=foreseen[1],
        pins=_pin_prices(best.space, search),
        forbid=best.space.preferences.forbidden(),
        unpriced=best.space.survey.unpriced,
        planning_seconds=seconds,
        solving_seconds=search.propose.solving_seconds,
    )


def _predicted(space: Space, decisions: Decisions) -> int:
    """What the prediction says at the end, whatever this very program took."""
    return space.memory.predicted(decisions) + space.memory.excess(decisions)


def _trials(search: Search, best: Attempt) -> tuple[Trial, ...]:
    """What was compiled; first the plan's own program, if another budget's search did.

    That cost this plan nothing.
    """
    own = tuple(attempt.measured.trial for attempt in search.log)
    if any(attempt.measured is best.measured for attempt in search.log):
        return own
    trial = best.measured.trial
    what = f"{trial.what} for another budget"
    return dataclasses.replace(trial, what=what, seconds_to_compile=0.0), *own


def _written(search: Search, best: Attempt) -> Trial | None:
    """The step as it is, donated as the plan is where both were compiled."""
    known = search.asked.written
    found = known.get(best.donated) or next(iter(known.values()), None)
    return found.measured.trial if found else None


def _foreseen(search: Search, best: Attempt) -> tuple[int, float]:
    """Bytes and seconds of the step as it is, where it was not compiled.

    The model knows no seconds of layers that the user has computed again.
    """
    space = search.rolled
    needed = foreseen_bytes(space, donate=best.donated)
    known = space.survey.bodies and not space.remat
    problem = space.problem(search.budget)
    return needed, unplanned_seconds(space.survey, problem) if known else 0.0


def _baselines(search: Search, best: Attempt) -> tuple[Baseline, ...]:
    """The policies under the model; what offloads layers' values has them in a loop."""

    def records(space: Space, counts: Callable[[str], bool]) -> tuple[Baseline, ...]:
        problem = space.problem(search.budget)
        return baseline_records(space, problem, search.budget, counts)

    space = best.space
    if not space.as_written:
        return records(space, lambda name: True)
    moves = "offload layer inputs"
    own = records(space, lambda name: name != moves)
    return *own, *records(search.rolled, lambda name: name == moves)


def _pin_prices(space: Space, search: Search) -> tuple[PinPrice, ...]:
    """What each pin costs under the planner's model: with it, less without it."""
    preferences, free, budget = space.preferences, space.free, search.budget
    if not preferences.patterns() or not free.bodies:
        return ()
    whole = solve(space.problem(budget)).evaluation.seconds
    prices = []
    for pattern, decision in preferences.patterns():
        without = preferences.without(pattern, decision)
        problem = (
            search.rolled.problem(budget)
            if decision == TILE
            else space.problem(budget, survey=narrowed(free, without))
        )
        matched = preferences.count(pattern, decision)
        prices.append(
            PinPrice(
                pattern=pattern,
                decision=decision,
                matched=matched,
                seconds=max(0.0, whole - solve(problem).evaluation.seconds),
            )
        )
    return tuple(prices)
