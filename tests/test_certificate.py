"""What a plan may claim of itself."""

import types

import pytest

from planner_problems import chain
from stand_in_search import asked_for, space, surveyed
from stowax._explain._certificate import certify
from stowax._planner import base_seconds, evaluate, solve
from stowax._search._loop import Search
from stowax._search._space import Attempt

BODY = chain(count=10, bytes=8, needed=(1, 2, 3), forward_seconds=3.0)
ENOUGH, LITTLE = 10**4, 250


def searching(budget):
    asked = asked_for()
    rolled = space(surveyed(BODY), budget, asked)
    return Search(asked=asked, budget=budget, rolled=rolled, spaces=[rolled])


def attempt(search, decisions, compiled=0):
    question = search.rolled.problem(search.budget)
    solution = types.SimpleNamespace(
        decisions=decisions,
        evaluation=evaluate(question, decisions),
        binding=("what stopped it",),
        seconds_per_byte=1.0,
    )
    measured = types.SimpleNamespace(
        compiled_bytes=compiled, host_bytes=0, inspection=object(), step_seconds=1.0
    )
    found = Attempt(
        space=search.rolled,
        decisions=decisions,
        solution=solution,
        options={},
        donated=False,
        measured=measured,
    )
    search.log.append(found)
    return found


def fastest(search):
    return solve(search.rolled.problem(search.budget))


def test_what_the_solver_finds_is_optimal():
    search = searching(LITTLE)
    found = certify(search, attempt(search, fastest(search).decisions))
    assert found.outcome == "optimal"
    assert found.gap <= 1e-4
    assert found.model_seconds == fastest(search).evaluation.seconds
    assert found.binding == fastest(search).binding != ()


def test_what_is_slower_is_feasible_and_says_by_how_much():
    search = searching(LITTLE)
    least = (("keep", "recompute", "recompute", "recompute"),)
    found = certify(search, attempt(search, least))
    assert found.outcome == "feasible"
    assert found.bound_seconds == pytest.approx(fastest(search).bound_seconds)
    slower = found.model_seconds / found.bound_seconds - 1
    assert found.gap == pytest.approx(slower)
    assert found.gap > 0.01
    assert found.binding == ("what stopped it",)


def test_a_rival_that_fits_and_is_faster_refutes_the_proof():
    """Though the model takes it for too big."""
    search = searching(LITTLE)
    keep = (("keep", "keep", "keep", "keep"),)
    best = attempt(search, fastest(search).decisions)
    attempt(search, keep, compiled=LITTLE + 1)
    assert certify(search, best).outcome == "optimal"
    attempt(search, keep, compiled=LITTLE)
    found = certify(search, best)
    assert found.outcome == "feasible"
    seconds = evaluate(search.rolled.problem(LITTLE), keep).seconds
    assert found.bound_seconds == seconds


def test_a_faster_variant_refutes_it_too():
    search = searching(LITTLE)
    best = attempt(search, fastest(search).decisions)
    faster = chain(count=10, bytes=8, needed=(1, 2, 3), forward_seconds=1.0)
    search.spaces.append(space(surveyed(faster), LITTLE, search.asked))
    assert certify(search, best).outcome == "feasible"


def test_a_smallest_plan_that_leaves_room_is_not_called_optimal():
    search = searching(ENOUGH)
    search.budget = 10  # nothing is known to fit
    least = (("keep", "recompute", "recompute", "recompute"),)
    for compiled, outcome in ((5, "feasible"), (10, "optimal")):
        search.log = []
        best = attempt(search, least, compiled)
        search.rolled.least.add(least)
        found = certify(search, best)
        assert found.outcome == outcome
        bound = base_seconds(search.rolled.problem(10))
        assert (found.bound_seconds == bound) == (outcome == "feasible")


def test_no_window_for_copies_limits_a_plan_that_copies_nothing():
    """The relaxation moves a part of a value, the plan none."""
    search = searching(LITTLE)
    stays = (("keep", "keep", "recompute", "recompute"),)
    moves = (("offload", "keep", "recompute", "recompute"),)
    names = ("forward window of layer", "update's window for copies in", "memory")
    for decisions, binding in ((stays, ("memory",)), (moves, names)):
        best = attempt(search, decisions)
        best.solution.binding = names
        assert certify(search, best).binding == binding


def test_what_does_not_fit_is_infeasible():
    search = searching(LITTLE)
    best = attempt(search, fastest(search).decisions, compiled=LITTLE + 1)
    assert certify(search, best).outcome == "infeasible"


def test_what_stopped_a_program_of_another_budget_is_not_said_of_this_one():
    search = searching(ENOUGH)
    least = (("keep", "recompute", "recompute", "recompute"),)
    best = attempt(search, least)
    assert certify(search, best).binding == ("what stopped it",)
    search.log, search.known = [], search.log
    found = certify(search, best)
    assert (found.binding, found.seconds_per_byte) == ((), 0.0)
