"""What a plan may claim of itself."""

import types

import pytest

from planner_problems import chain, problem
from stowax._explain._certificate import certify
from stowax._planner import evaluate

KEEP = (("keep", "keep", "keep", "keep"),)
ONE = (("keep", "keep", "recompute", "recompute"),)
LEAST = (("keep", "recompute", "recompute", "recompute"),)
QUESTION = problem(chain(count=10, bytes=8), device_bytes=1000)


def attempt(decisions, compiled, bound=None):
    seconds = evaluate(QUESTION, decisions).seconds
    return types.SimpleNamespace(
        decisions=decisions,
        measured=types.SimpleNamespace(compiled_bytes=compiled),
        solution=types.SimpleNamespace(
            bound_seconds=seconds if bound is None else bound,
            binding=("device memory",),
            seconds_per_byte=1.0,
        ),
        fits=lambda budget, host_budget: compiled <= budget,
    )


def search(*attempts, least=()):
    return types.SimpleNamespace(
        attempts=attempts,
        budget=1000,
        host_budget=1000,
        least=set(least),
        survey=types.SimpleNamespace(bodies=QUESTION.bodies, other_seconds=0.0),
        problem=lambda: QUESTION,
        bound_seconds=lambda solution: solution.bound_seconds,
    )


def test_a_proven_plan_is_optimal():
    best = attempt(ONE, 900)
    found = certify(search(best), best)
    assert (found.outcome, found.gap) == ("optimal", 0.0)
    assert found.model_seconds == found.bound_seconds == evaluate(QUESTION, ONE).seconds


def test_a_rival_that_fits_and_is_faster_refutes_the_proof():
    best, rival = attempt(LEAST, 500), attempt(ONE, 990)
    found = certify(search(best, rival), best)
    assert found.outcome == "feasible"
    assert found.bound_seconds == evaluate(QUESTION, ONE).seconds
    slower = evaluate(QUESTION, LEAST).seconds / found.bound_seconds - 1
    assert found.gap == pytest.approx(slower)


def test_a_rival_that_does_not_fit_refutes_nothing():
    best, rival = attempt(ONE, 900), attempt(KEEP, 1001)
    assert certify(search(best, rival), best).outcome == "optimal"


def test_a_smallest_plan_that_leaves_room_is_not_called_optimal():
    best = attempt(LEAST, 500)
    found = certify(search(best, least=[LEAST]), best)
    assert found.outcome == "feasible"
    assert found.bound_seconds == evaluate(QUESTION, KEEP).seconds
    tight = attempt(LEAST, 995)
    assert certify(search(tight, least=[LEAST]), tight).outcome == "optimal"


def test_what_does_not_fit_is_infeasible():
    best = attempt(ONE, 1001)
    assert certify(search(best), best).outcome == "infeasible"
