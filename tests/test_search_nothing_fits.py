"""The closed loop where nothing fits: what it tries, and what it answers with."""

import dataclasses

import pytest

from planner_problems import chain
from stand_in_search import Predicted, searching, space, surveyed
from stowax._errors import CompileError
from stowax._planner import policies
from stowax._search._space import plain
from stowax._survey._asked import MOST_MISSES

BODY = chain(count=10, bytes=8, needed=(1, 2, 3), forward_seconds=3.0)
BUDGET = 250


def test_what_never_fits_is_not_compiled_for_ever(monkeypatch):
    search, _ = searching(monkeypatch, BODY, BUDGET, size=20.0)
    best = search.run()
    assert not search.fits(best)
    assert 1 <= len(search.log) <= MOST_MISSES
    smallest = min(a.measured.compiled_bytes for a in search.log)
    assert best.measured.compiled_bytes == smallest
    assert search.smallest_budget()[0] > BUDGET


def test_where_nothing_can_fit_one_program_says_what_it_takes(monkeypatch):
    search, _ = searching(monkeypatch, BODY, 30)
    best = search.run()
    assert [a.measured.compiled_bytes for a in search.log] == [
        best.measured.compiled_bytes
    ]
    assert search.smallest_budget()[0] > 30


def with_variants(monkeypatch, budget, **made_up):
    """A search where nothing fits, and two more ways to write the step."""
    search, _ = searching(monkeypatch, BODY, budget, **made_up)
    for name in ("groups", "blocks"):
        other = dataclasses.replace(
            space(surveyed(BODY), budget, search.asked), name=name
        )
        search.unopened.append(lambda rolled, budget, other=other: other)
    return search


@pytest.mark.slow
def test_a_budget_far_below_the_least_costs_one_program(monkeypatch):
    free, _ = searching(monkeypatch, BODY, 10**6)
    least = free.propose.least(free.rolled).bytes
    far = with_variants(monkeypatch, int(least / 1.4))
    assert not far.fits(far.run())
    assert len(far.log) == 1
    assert far.smallest_budget() == (far.log[0].measured.compiled_bytes, "compiled")
    near = with_variants(monkeypatch, int(least / 1.3))
    assert not near.fits(near.run())
    assert len(near.log) == 3  # predictions may err by as much


class Large(Predicted):
    """Predictions of a variant that needs twice what the others do."""

    def predicted(self, decisions):
        return 2 * super().predicted(decisions)


@pytest.mark.parametrize(("size", "is_open"), [(1.0, False), (3.0, True)])
def test_a_variant_that_is_hopeless_costs_no_program(monkeypatch, size, is_open):
    """Unless it is predicted to need less than what is known."""
    free, _ = searching(monkeypatch, BODY, 10**6)
    budget = int(free.propose.least(free.rolled).bytes / 1.3)
    search = with_variants(monkeypatch, budget, size=size)
    large = space(surveyed(BODY), budget, search.asked, memory=Large)
    large = dataclasses.replace(large, name="large")
    search.unopened.append(lambda rolled, budget: large)
    assert not search.fits(search.run())
    assert {a.space.name for a in search.log} == {"rolled", "groups", "blocks"}
    assert search._is_open(search.propose.least(large)) == is_open


@pytest.mark.slow
def test_the_first_of_two_questions_compiles_one_program_for_its_size(monkeypatch):
    free, _ = searching(monkeypatch, BODY, 10**6)
    least = free.propose.least(free.rolled).bytes
    near = with_variants(monkeypatch, int(least / 1.3), first=True)
    assert not near.fits(near.run())
    assert len(near.log) == 1
    fitting, _ = searching(monkeypatch, BODY, BUDGET, size=1.2, first=True)
    assert fitting.fits(fitting.run())


@pytest.mark.parametrize(("size", "is_least"), [(300, True), (30_000, False)])
def test_the_step_as_it_is_counts_where_nothing_fits(monkeypatch, size, is_least):
    """What is known of it already: a program that saves nothing is no plan."""
    search, _ = searching(
        monkeypatch, BODY, BUDGET, size=20.0, may_stay=True, plain=(size, 1.0)
    )
    search.asked.written[False] = plain(search.rolled, BUDGET, donate=False)
    best = search.run()
    assert (best.decisions is None) == is_least
    assert best.measured.compiled_bytes == min(
        a.measured.compiled_bytes for a in search.log
    )


def test_recomputing_all_is_tried_where_the_model_errs_about_it(monkeypatch):
    """A policy of the plan's table that fits by its prediction is not left out."""
    search, _ = searching(monkeypatch, BODY, BUDGET)
    rolled = search.rolled
    policy = policies(rolled.problem(BUDGET))["recompute all"]
    solved = search.propose.least(rolled).decisions
    assert solved != policy
    predicted = rolled.memory.predicted
    monkeypatch.setattr(
        type(rolled.memory),
        "predicted",
        lambda self, d: 1 if d == policy else predicted(d),
    )
    assert search.propose.least(rolled).decisions == policy


@pytest.mark.parametrize("most", [None, 4])
def test_the_step_as_it_is_is_compiled_before_nothing_is_said_to_fit(monkeypatch, most):
    """Whatever was predicted of it, but within the compiles that were allowed."""
    wishes = {"may_stay": True, "plain": (BUDGET // 2, 1.0), "compiles": most}
    monkeypatch.setattr("stowax._search._loop.plain_bytes", lambda *_, **__: 10**9)
    search, compiler = searching(monkeypatch, BODY, BUDGET, size=20.0, **wishes)
    best = search.run()
    assert search.fits(best) == (best.decisions is None)
    assert most is None or len(compiler.compiled) <= most
    assert most is not None or search.fits(best)


def test_a_step_that_does_not_compile_as_it_is_costs_no_plan(monkeypatch):
    def refuses(decisions, options):
        if decisions is None:
            raise CompileError("no")

    monkeypatch.setattr("stowax._search._loop.plain_bytes", lambda *_, **__: 10**9)
    wishes = {"may_stay": True, "refuses": refuses}
    search, _ = searching(monkeypatch, BODY, BUDGET, size=20.0, **wishes)
    assert search.run().decisions is not None
