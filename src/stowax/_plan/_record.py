"""What the search found, written down as a `Plan`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .._explain._certificate import certify
from .._explain._describe import (
    baseline_records,
    decision_records,
    host_notes,
    in_the_way,
    notes,
    overlap_notes,
    stack_records,
)
from .._explain._fast_memory import fast_memory_notes
from .._explain._sensitivity import link_notes
from .._planner import solve
from .._records._plan import ArgumentRecord, Baseline, PinPrice, Trial
from .._records._stages import Decisions
from .._search._loop import Search
from .._search._space import Attempt, Space, narrowed
from .._state._shards import partition_of, shard_shape
from .._state._state import NAME as STATE
from .._survey._preferences import Preferences
from .._survey._survey import Survey
from .._versions import versions
from ._finding import Found
from ._plan import Plan


def written_down(found: Found) -> Plan:
    """The plan that was found."""
    search, best, preferences = found.search, found.best, found.best.space.preferences
    return Plan(
        **_identity(best.space.survey, best),
        **_figures(search, best),
        budget_bytes=search.budget,
        host_budget_bytes=search.asked.host_budget,
        pins=_pin_prices(best.space, search.budget),
        forbid=preferences.forbidden(),
        decisions=_decisions(best.space.survey, best, preferences),
        planning_seconds=found.seconds,
    )


def _identity(survey: Survey, best: Attempt) -> dict[str, Any]:
    traced, machine, options = survey.step, survey.target, survey.options
    plan = survey.step_plan(best.decisions) if best.decisions else None
    hosted = plan.hosted.shards if plan and plan.hosted else {}
    orders = plan.hosted.orders if plan and plan.hosted else {}
    on_host = plan.hosted.on_host if plan and plan.hosted else ()
    specs = jax.tree.leaves(survey.specs)
    return {
        "step": traced.name,
        "target": machine.name,
        "device_kind": (machine.compile_devices or machine.devices)[0].device_kind,
        "compile_only": machine.compile_only,
        "keep_checkpoint": options.keep_checkpoint,
        "roll": options.roll,
        "as_written": options.as_written,
        "row_major": options.row_major,
        "late": not survey.tight,
        "gradients_on_host": survey.gradients_on_host,
        "least_bytes": survey.least_bytes,
        "lean": bool(plan and plan.hosted and plan.hosted.lean),
        "arguments": tuple(
            ArgumentRecord(
                path=a.path,
                shape=tuple(a.spec.shape),
                shard=shard_shape(specs[i]),
                partition=partition_of(specs[i]),
                dtype=str(a.spec.dtype),
                role=a.role,
                output=traced.updates.get(i),
                memory_kind="pinned_host" if i in hosted else "device",
                on_host=i in on_host,
                order=orders.get(i),
            )
            for i, a in enumerate(traced.arguments)
        ),
        "versions": versions(),
    }


def _figures(search: Search, best: Attempt) -> dict[str, Any]:
    """The fields that come out of the loop."""
    survey, measured, evaluation = best.space.survey, best.measured, best.evaluation
    fits = search.fits(best)
    timeline = measured.inspection.timeline if measured.inspection else None
    certificate = certify(search, best)
    trials = _trials(search, best)
    smallest, source = search.smallest_budget()
    return {
        "fits": fits,
        "outcome": certificate.outcome,
        "device_bytes": measured.compiled_bytes,
        "host_bytes": measured.host_bytes,
        "predicted_device_bytes": _predicted(best.space, best.decisions)
        if best.decisions
        else measured.predicted_bytes,
        "first_predicted_device_bytes": trials[0].predicted_bytes,
        "step_seconds": measured.step_seconds,
        "exposed_seconds": timeline.exposed_seconds if timeline else 0.0,
        "model_seconds": certificate.model_seconds,
        "bound_seconds": certificate.bound_seconds,
        "gap": certificate.gap,
        "binding": certificate.binding,
        "seconds_per_gib": certificate.seconds_per_byte * 2**30,
        "smallest_budget": smallest,
        "smallest_budget_is": source,
        "stacks": stack_records(survey, best.decisions, evaluation),
        "baselines": _baselines(search, best),
        "trials": trials,
        "donate_argnums": survey.step.donate if best.donated else (),
        "compiler_options": dict(best.options),
        "unpriced": survey.unpriced,
        "notes": (
            *host_notes(survey, best.decisions, measured.inspection),
            *notes(
                survey,
                fits,
                measured.host_bytes,
                best.decisions,
                unrolled=best.space.as_written,
            ),
            *(fast_memory_notes(search, best) if fits else ()),
            *(link_notes(search.budget, best) if fits else ()),
            *(overlap_notes(survey, measured.inspection) if fits else ()),
        ),
        "solving_seconds": search.propose.solving_seconds,
        "in_the_way": () if fits else in_the_way(survey),
    }


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


def _decisions(survey: Survey, best: Attempt, preferences: Preferences) -> Any:
    if best.decisions is None or best.evaluation is None:
        return ()
    values = [(body.name, value) for body in survey.bodies for value in body.values]
    values += [(STATE, staying.value) for staying in survey.staying]
    pinned = {
        (body, value.index): pattern
        for body, value in values
        if (pattern := preferences.matched(value)) is not None
    }
    return decision_records(survey, best.decisions, pinned)


def _pin_prices(space: Space, budget: int) -> tuple[PinPrice, ...]:
    """What each pin costs under the planner's model: with it, less without it."""
    preferences, free = space.preferences, space.free
    if not preferences.patterns() or not free.bodies:
        return ()
    whole = solve(space.problem(budget)).evaluation.seconds
    prices = []
    for pattern, decision in preferences.patterns():
        without = preferences.without(pattern, decision)
        problem = space.problem(budget, survey=narrowed(free, without))
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
