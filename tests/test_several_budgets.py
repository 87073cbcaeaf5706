"""Plans for several budgets: none slower than alone, nor than one with less memory."""

import functools
import types

import jax
import numpy as np
import pytest

import stowax
from benchmarks.models import tutorial_layers
from plan_parts import changed
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
from stowax._errors import ArgumentError
from stowax._plan._record import _trials
from stowax._records._plan import Trial

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
        assert found.search.planning_seconds > 0


@pytest.mark.slow
def test_more_memory_never_makes_a_plan_slower_nor_does_company():
    by_budget = sorted(several(), key=lambda found: found.budget_bytes)
    seconds = [found.step_seconds for found in by_budget]
    assert seconds == sorted(seconds, reverse=True)
    for found in by_budget:
        alone = plan(train, *ARGS, budget=found.budget_bytes)
        assert found.step_seconds <= alone.step_seconds


@pytest.mark.slow
def test_the_same_budget_twice_is_planned_once():
    once, again = stowax.plans(
        train, *ARGS, budgets=("1GiB", "1GiB"), target="h200", progress=False
    )
    assert once is again


@pytest.mark.slow
def test_company_donates_nothing_where_the_step_fits_as_it_is():
    budgets = (LEAST, "100GiB")
    small, big = stowax.plans(
        train, *ARGS, budgets=budgets, target="h200", progress=False
    )
    assert small.program.donate_argnums == (0,)
    assert big.program.donate_argnums == ()


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

SMALL, LARGE = 6_821_968, 14 * 2**20
"""The least that these ten layers take, in bytes, and twice that."""


@functools.cache
def ten_layers():
    step, specs = tutorial_layers.whole()
    options = {"target": "h200", "progress": False}
    both = stowax.plans(step, *specs, budgets=(SMALL, LARGE), **options)
    return (*both, stowax.plan(step, *specs, budget=LARGE, **options))


@pytest.mark.slow
def test_a_plan_in_company_is_no_slower_than_alone():
    small, large, alone = ten_layers()
    assert small.fits
    assert large.fits
    assert large.step_seconds <= alone.step_seconds
    assert large.search.bound_seconds <= alone.search.bound_seconds * 1.001
    assert "FITS" in str(large)


def test_a_program_of_another_budget_says_so_and_costs_nothing():
    def attempt(what):
        trial = Trial(
            what=what,
            predicted_bytes=1,
            compiled_bytes=1,
            host_bytes=0,
            step_seconds=1.0,
            seconds_to_compile=5.0,
        )
        return types.SimpleNamespace(measured=types.SimpleNamespace(trial=trial))

    own, other = attempt("plan 2"), attempt("plan 1")
    search = types.SimpleNamespace(log=[own])
    assert _trials(search, own) == (own.measured.trial,)
    first, second = _trials(search, other)
    assert (first.what, first.seconds_to_compile) == ("plan 1 for another budget", 0.0)
    assert second == own.measured.trial


@pytest.mark.slow
def test_such_a_plan_computes_what_the_step_does():
    _, large, _ = ten_layers()
    step, specs = tutorial_layers.whole()
    here = changed(large, target="cpu", device_kind="cpu")
    values = numbers(specs)
    mine = here.apply(step)(*here.place(*values))
    for got, wanted in zip(
        jax.tree.leaves(mine), jax.tree.leaves(jax.jit(step)(*values)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
