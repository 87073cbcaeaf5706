"""What people write by hand, compiled beside a plan: when, and before what.

The compiler is a stand-in (`stand_in_search`), so that what is true can be chosen.
"""

import dataclasses

import pytest

from stand_in_search import QUESTION, Search, improved
from stowax._planner import baselines, evaluate, solve
from stowax._search._forms import Found
from stowax._search._improve import improve


def test_what_people_write_by_hand_is_tried_where_it_may_be_faster(monkeypatch):
    monkeypatch.setattr(
        "stowax._search._improve._neighbours", lambda search, decisions: ()
    )
    # Enough room to keep the inputs only; whatever is moved is waited for.
    question = dataclasses.replace(QUESTION, device_bytes=130)
    search = Search(question, waits=dict.fromkeys(range(4), 5.0))
    search.settle = lambda: solve(question)  # a solver that learns nothing
    found = improved(search, 50)
    tried = [a.decisions for a in search.attempts]
    assert baselines(question)["recompute all"] in tried
    seconds = [a.measured.step_seconds for a in search.attempts if search.fits(a)]
    assert found.best.measured.step_seconds == min(seconds) < seconds[0]


def test_of_two_policies_by_hand_the_one_that_is_likelier_to_fit_comes_first(
    monkeypatch,
):
    """The one that seems a tenth too big has to promise a tenth more."""
    monkeypatch.setattr(
        "stowax._search._improve._neighbours", lambda search, decisions: ()
    )
    faster, smaller = (baselines(QUESTION)[k] for k in ("keep all", "recompute all"))
    policies = {"faster": faster, "smaller": smaller}
    monkeypatch.setattr("stowax._search._improve.policies", lambda problem: policies)
    hopes = {faster: 1.0, smaller: 1.1}
    monkeypatch.setattr(
        "stowax._search._improve._hoped", lambda search, base, d: hopes.get(d, 9e9)
    )
    least = evaluate(QUESTION, smaller).device_bytes
    question = dataclasses.replace(QUESTION, device_bytes=int(least * 1.01))
    for factor, first in ((1.0, faster), (1.19, smaller)):
        search = Search(question, waits=dict.fromkeys(range(4), 9.0))
        search.settle = lambda search=search: solve(search.question)
        search.forecast.known = lambda d, caution, factor=factor: int(
            least * (factor if d == faster else 1)
        )
        improved(search, 4)
        assert search.attempts[1].decisions == first


@pytest.mark.parametrize(
    ("promises", "tried"),
    [
        ({"keep all": 0.5, "offload layer inputs": 0.7}, ["keep all"]),
        ({"keep all": 0.7, "offload layer inputs": 0.5}, ["keep all"]),
        ({"offload layer inputs": 0.5}, ["offload layer inputs"]),
        ({"keep all": 0.999}, []),
        ({}, []),
    ],
)
def test_a_plan_is_compared_with_one_way_of_writing_it_by_hand(
    promises, tried, monkeypatch
):
    """No more, for nothing was a surprise; what is expected before what is hoped."""
    question = dataclasses.replace(QUESTION, device_bytes=10**6)
    by_hand = baselines(question)
    poor = by_hand["recompute all"]
    search = Search(question)
    search.settle = lambda: solution
    solution = dataclasses.replace(
        solve(question), decisions=poor, evaluation=evaluate(question, poor)
    )
    now = solution.evaluation.seconds
    hopes = {by_hand[name]: part * now for name, part in promises.items()}
    monkeypatch.setattr(
        "stowax._search._improve._hoped", lambda search, base, d: hopes.get(d, 9e9)
    )
    monkeypatch.setattr("stowax._search._worth.WORTH_FILLING", 1.0)
    found = improved(search, 4)
    assert [a.decisions for a in search.attempts] == [
        poor,
        *(by_hand[name] for name in tried),
    ]
    assert found.best.measured.step_seconds == min(
        a.measured.step_seconds for a in search.attempts
    )
    # What waits in host memory is no faster than what is made again.
    assert (found.best.decisions == poor) == (tried != ["keep all"])


@pytest.mark.parametrize(("part", "compiled"), [(0.99, 2), (0.999, 1)])
def test_where_policies_promise_no_more_one_program_is_the_solvers(
    part, compiled, monkeypatch
):
    """Nothing was a surprise; what the solver has learned since may be faster."""
    question = dataclasses.replace(QUESTION, device_bytes=10**6)
    monkeypatch.setattr("stowax._search._improve._by_hand", lambda search, best: [])
    search = Search(question)
    poor = baselines(question)["recompute all"]
    solution = dataclasses.replace(
        solve(question), decisions=poor, evaluation=evaluate(question, poor)
    )
    search.compile(solution, 4)
    found = Found(search=search, best=search.best(), rolled=search)
    monkeypatch.setattr(
        "stowax._search._improve._hoped",
        lambda search, base, d: part * base.measured.step_seconds,
    )
    monkeypatch.setattr("stowax._search._worth.WORTH_FILLING", 1.0)
    improve(found, 4)
    tried = [a.decisions for a in search.attempts]
    assert tried == [poor, solve(question).decisions][:compiled]


def test_what_people_write_by_hand_is_tried_even_if_it_seems_too_big():
    """It is far from what was compiled, and predictions for it were 17 % too large."""
    by_hand = baselines(QUESTION)["recompute all"]
    least = evaluate(QUESTION, by_hand).device_bytes
    for factor, tried in ((1.15, True), (1.25, False)):
        search = Search(
            dataclasses.replace(QUESTION, device_bytes=int(least * 1.01)),
            waits=dict.fromkeys(range(4), 9.0),
        )
        known = search.forecast.known
        search.forecast.known = lambda d, caution, known=known, factor=factor: int(
            known(d, caution) * (factor if d == by_hand else 1)
        )
        search.settle = lambda search=search: solve(search.question)
        improved(search, 4)
        assert (by_hand in [a.decisions for a in search.attempts]) == tried


@pytest.mark.parametrize(("expected", "first"), [(0.9, "by hand"), (1.1, "solver")])
def test_what_is_only_hoped_of_a_policy_does_not_put_it_before_the_solvers_next(
    expected, first, monkeypatch
):
    """It is far from what was compiled, and so has always much to hope for."""
    solved, poor = solve(QUESTION), baselines(QUESTION)["recompute all"]
    by_hand = baselines(QUESTION)["offload layer inputs"]
    search = Search(QUESTION, waits=dict.fromkeys(range(4), 3.0))
    search.settle = lambda: solution
    solution = dataclasses.replace(
        solved, decisions=poor, evaluation=evaluate(QUESTION, poor)
    )
    search.compile(solved, 4)
    now = search.best().measured.step_seconds

    def seconds(search, base, decisions, mistaken=0.0):
        promises = {by_hand: 0.5 if mistaken else expected, poor: 0.8}
        return promises.get(decisions, 9.0) * now

    monkeypatch.setattr("stowax._search._improve._expected", seconds)
    improve(Found(search=search, best=search.best(), rolled=search), 4)
    tried = {"by hand": by_hand, "solver": poor}
    assert search.attempts[1].decisions == tried[first]
