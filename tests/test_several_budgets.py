"""Plans for several budgets: none slower than alone, nor than one with less memory."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

import stowax
from benchmarks.models import tutorial_layers
from planned_models import (
    ROWS,
    WIDTH,
    arguments,
    bytes_of,
    compiled_total,
    numbers,
    plan,
    train,
)
from planner_problems import chain, problem
from stowax._errors import ArgumentError
from stowax._planner import evaluate, solve
from stowax._search._attempt import Attempt
from stowax._search._budgets import best_known
from stowax._search._forms import Found

ARGS = arguments()
INPUT = 4 * ROWS * WIDTH
LEAST = bytes_of(ARGS) + 36 * INPUT  # keeping little more than layer inputs
BUDGETS = (LEAST + 40 * INPUT, LEAST, LEAST + 16 * INPUT)


@functools.cache
def several():
    return stowax.plans(train, *ARGS, budgets=BUDGETS, target="h200", progress=False)


@pytest.mark.slow
def test_plans_come_in_the_order_of_their_budgets():
    assert tuple(found.budget_bytes for found in several()) == BUDGETS
    for found in several():
        assert found.fits
        assert compiled_total(found, train, *ARGS) == found.device_bytes
        assert found.device_bytes <= found.budget_bytes
        assert found.planning_seconds > 0


@pytest.mark.slow
def test_more_memory_never_makes_a_plan_slower_nor_does_company():
    by_budget = sorted(several(), key=lambda found: found.budget_bytes)
    seconds = [found.step_seconds for found in by_budget]
    assert seconds == sorted(seconds, reverse=True)
    for found in by_budget:
        alone = plan(train, *ARGS, budget=found.budget_bytes)
        assert found.step_seconds <= alone.step_seconds


def test_the_same_budget_twice_is_planned_once():
    once, again = stowax.plans(
        train, *ARGS, budgets=("1GiB", "1GiB"), target="h200", progress=False
    )
    assert once is again


@pytest.mark.slow
def test_progress_says_which_budget():
    said = []
    budgets = ("1GiB", "1.5GiB")
    options = {"target": "h200", "progress": said.append}
    stowax.plans(train, *ARGS, budgets=budgets, **options)
    assert "a plan for 1.00 GiB" in said
    assert "a plan for 1.50 GiB" in said
    assert said.count("tracing step") == 1
    said.clear()
    stowax.plan(train, *ARGS, budget="1GiB", **options)
    assert not any(line.startswith("a plan for") for line in said)


def refused(budgets):
    with pytest.raises(ArgumentError) as caught:
        stowax.plans(train, *ARGS, budgets=budgets, target="h200", progress=False)
    return str(caught.value)


def test_budgets_that_are_none():
    assert refused(()) == (
        "budgets: got none. Write at least one, such as ('12GiB', '16GiB')."
    )
    for one in ("12GiB", 2**30):
        assert refused(one) == (
            f"budgets: got {one!r}. Write several, such as ('12GiB', '16GiB'), or call "
            "plan for one."
        )
    assert refused(("1GiB", "1TiB")).startswith("budgets: got '1TiB', more than the ")
    assert refused(("1GiB", "much")).startswith("budgets: got 'much'")


# --- a program that was compiled for another budget -----------------------------------

SMALL, LARGE = 6_821_712, 14 * 2**20
"""The least that these ten layers take, in bytes; their first program is a little
larger, faster than what is planned for twice that, and fits there."""


@functools.cache
def ten_layers():
    step, specs = tutorial_layers.whole()
    options = {"target": "h200", "progress": False}
    both = stowax.plans(step, *specs, budgets=(SMALL, LARGE), **options)
    return (*both, stowax.plan(step, *specs, budget=LARGE, **options))


@pytest.mark.slow
def test_a_program_that_was_too_big_for_one_budget_is_the_plan_for_another():
    small, large, alone = ten_layers()
    assert small.fits
    assert large.fits
    assert large.step_seconds < alone.step_seconds
    own, *others = large.trials
    assert own.what == "plan 1 for another budget"
    assert own.seconds_to_compile == 0.0
    assert own.compiled_bytes == large.device_bytes == small.trials[0].compiled_bytes
    assert SMALL < own.compiled_bytes <= LARGE
    assert [trial.what for trial in others] == [trial.what for trial in alone.trials]
    # What was proven for less memory is not claimed for more.
    assert large.bound_seconds <= alone.bound_seconds
    assert large.binding == ()
    assert large.seconds_per_gib == 0.0
    assert "FITS" in str(large)


@pytest.mark.slow
def test_such_a_plan_computes_what_the_step_does():
    _, large, _ = ten_layers()
    step, specs = tutorial_layers.whole()
    here = dataclasses.replace(large, target="cpu", device_kind="cpu")
    values = numbers(specs)
    mine = here.apply(step)(*here.place(*values))
    for got, wanted in zip(
        jax.tree.leaves(mine), jax.tree.leaves(jax.jit(step)(*values)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


# --- with a compiler made up ----------------------------------------------------------


@dataclasses.dataclass
class Search:
    """What `best_known` needs of a search."""

    question: object
    budget: int
    log: list
    attempts: list = dataclasses.field(default_factory=list)
    host_budget: int = 2**60
    solving_seconds: float = 0.0
    charges: dict = dataclasses.field(default_factory=dict)
    proposed: dict = dataclasses.field(default_factory=dict)
    least: set = dataclasses.field(default_factory=set)

    def __post_init__(self):
        self.survey = types.SimpleNamespace(bodies=(), options=())
        self.forecast = types.SimpleNamespace(predictions={}, compiled={})

    def problem(self):
        return self.question

    def fits(self, attempt):
        return attempt.fits(self.budget, self.host_budget)


def attempt(size, seconds, *, planned=True, vanished=()):
    question = problem(chain(3))
    solution = solve(question) if planned else None
    measured = types.SimpleNamespace(
        compiled_bytes=size,
        host_bytes=0,
        step_seconds=seconds,
        inspection=object(),
        vanished=vanished,
        not_on_host=(),
    )
    return Attempt(
        decisions=solution.decisions if solution else None,
        solution=solution,
        evaluation=evaluate(question, solution.decisions) if solution else None,
        options={},
        donated=False,
        measured=measured,
    )


def found_for(budget, *attempts):
    search = Search(problem(chain(3)), budget, list(attempts))
    search.attempts = list(attempts)
    return Found(search=search, best=attempts[0], rolled=search)


@pytest.mark.parametrize(
    ("mine", "theirs", "taken"),
    [
        ((90, 2.0), (80, 1.9), True),
        ((90, 2.0), (80, 2.0), False),
        ((90, 2.0), (101, 1.0), False),
        ((110, 2.0), (80, 3.0), True),  # mine does not fit at all
    ],
)
def test_what_fits_and_is_faster_is_taken(mine, theirs, taken):
    own, other = found_for(100, attempt(*mine)), found_for(120, attempt(*theirs))
    best = best_known(own, [other]).best
    assert best.measured is (other if taken else own).best.measured


def test_a_program_without_its_copies_is_never_taken():
    own = found_for(100, attempt(90, 2.0))
    other = found_for(120, attempt(80, 1.0, vanished=("x",)))
    assert best_known(own, [other]) is own


def test_a_step_that_fits_as_it_is_stays_unless_much_is_to_be_gained():
    own = found_for(100, attempt(90, 2.0, planned=False))
    assert best_known(own, [found_for(80, attempt(70, 1.995))]) is own
    other = found_for(80, attempt(70, 1.98))
    assert best_known(own, [other]).best.measured is other.best.measured


def test_what_was_compiled_for_a_budget_stays_in_its_log():
    own, other = found_for(100, attempt(90, 2.0)), found_for(80, attempt(70, 1.0))
    taken = best_known(own, [other])
    assert taken.search.log is own.search.log
    assert taken.search.budget == 100
    assert own.search in taken.others
    assert other.search.budget == 80


def test_a_search_that_goes_on_knows_what_both_have_compiled_and_keeps_it_to_itself():
    own, other = found_for(100, attempt(90, 2.0)), found_for(80, attempt(70, 1.0))
    other.search.charges["layer", 1] = 0.5
    apart = best_known(own, [other]).search
    assert [a.measured for a in apart.attempts] == [other.best.measured]
    own.search.survey = other.search.survey  # decisions are about the same values
    taken = best_known(own, [other]).search
    assert [a.measured for a in taken.attempts] == [
        other.best.measured,
        own.best.measured,
    ]
    taken.charges.clear()
    taken.proposed[()] = None
    taken.least.add(())
    assert other.search.charges == {("layer", 1): 0.5}
    assert not other.search.proposed
    assert not other.search.least
    assert [a.measured for a in other.search.attempts] == [other.best.measured]
