"""Programs beyond the fourth: what compiled schedules say goes back into the plan.

The compiler is a stand-in (`stand_in_search`), so that what is true can be chosen.
"""

import dataclasses
import types

import pytest

from stand_in_search import QUESTION, SET, TPU, Search, improved, offloaded
from stowax._planner import evaluate, solve
from stowax._search._attempt import Attempt
from stowax._search._forms import Found
from stowax._search._improve import improve
from stowax._search._worth import better_known, waits_longer
from stowax._survey._options import FAST_MEMORY, alternatives, more_fast_memory


def test_a_value_that_is_waited_for_is_not_moved_again():
    first = solve(QUESTION).decisions[0]
    moved = [i for i, d in enumerate(first) if d == "offload"]
    assert moved  # by the model it is free
    search = Search(QUESTION, waits=dict.fromkeys(moved, 2.0))
    before = 10 * 2.0 * len(moved) + solve(QUESTION).evaluation.seconds
    found = improved(search, 12)
    assert search.attempts[0].measured.step_seconds == before
    assert found.best.measured.step_seconds < before
    assert set(offloaded(found.best)).isdisjoint(moved)
    assert search.fits(found.best)
    # What it was charged with: what was waited for, per run.
    assert all(search.charges["layer", i] == pytest.approx(2.0) for i in moved)


def test_what_the_model_finds_too_big_is_not_predicted(monkeypatch):
    """Predictions cost seconds, and hundreds of changes would be faster by keeping."""
    monkeypatch.setattr("stowax._search._improve._by_hand", lambda search, best: [])
    first = (("keep", "offload", "recompute", "recompute"),)
    full = evaluate(QUESTION, first).device_bytes  # no room for anything more
    question = dataclasses.replace(QUESTION, device_bytes=full)
    search = Search(question, waits={1: 5.0})
    solution = dataclasses.replace(
        solve(question), decisions=first, evaluation=evaluate(question, first)
    )
    search.settle = lambda: solution
    known, asked = search.forecast.known, []
    search.forecast.known = lambda d, caution: asked.append(d) or known(d, caution)
    improved(search, 12)
    tried = {a.decisions for a in search.attempts}
    assert len(tried) > 1  # what is waited for is made again
    assert all(evaluate(question, d).device_bytes <= full for d in asked)


def test_a_faster_program_that_was_too_big_is_made_smaller(monkeypatch):
    monkeypatch.setattr("stowax._search._improve._by_hand", lambda search, best: [])
    question = dataclasses.replace(QUESTION, device_bytes=240)
    search = Search(question)
    search.settle = lambda: search.attempts[-1].solution  # a solver with no idea
    for decisions in (
        (("keep", "keep", "keep", "recompute"),),  # too big by one value
        (("keep", "recompute", "recompute", "recompute"),),
    ):
        solution = dataclasses.replace(
            solve(question),
            decisions=decisions,
            evaluation=evaluate(question, decisions),
        )
        search.compile(solution, 4)
    big, small = search.attempts
    assert search.best() is small
    assert big.measured.step_seconds < small.measured.step_seconds
    assert not search.fits(big)
    found = improve(Found(search=search, best=small, rolled=search), 5)
    assert found.best.measured.step_seconds < small.measured.step_seconds

    def differ(one, other):
        pairs = zip(one.decisions[0], other.decisions[0], strict=True)
        return sum(a != b for a, b in pairs)

    tried = search.attempts[2:]
    assert any(differ(a, big) == 1 and differ(a, small) > 1 for a in tried)


def test_it_ends_where_nothing_promises_more_and_compiles_nothing_twice():
    search = Search(QUESTION)
    found = improved(search, 50)
    tried = [(a.decisions, tuple(a.options.items())) for a in search.attempts]
    assert len(set(tried)) == len(tried) < 50
    assert search.said[-1] == "no single change is expected to be faster"
    seconds = [a.measured.step_seconds for a in search.attempts if search.fits(a)]
    assert found.best.measured.step_seconds == min(seconds)


def test_a_change_whose_copies_vanish_does_not_cost_the_plan():
    """It would be an error of the whole plan, where one that holds is at hand."""
    moved = solve(QUESTION).decisions
    search = Search(QUESTION, waits=dict.fromkeys(range(4), 2.0))
    search.vanished = lambda d: () if d == moved else ("v1 (model.py:2)",)
    found = improved(search, 12)
    assert len(search.attempts) > 1
    assert found.best.decisions == moved
    faster = [a.measured.step_seconds for a in search.attempts if search.fits(a)]
    assert min(faster) < found.best.measured.step_seconds


def test_no_more_is_compiled_than_was_allowed(monkeypatch):
    monkeypatch.setattr(
        "stowax._search._improve._MISTAKEN", 4.0
    )  # everything is worth a try
    search = Search(QUESTION, waits=dict.fromkeys(range(4), 3.0))
    improved(search, 5)
    assert len(search.attempts) == 5
    as_expected = Search(QUESTION)
    improved(as_expected, 4)  # what the search itself may compile
    assert len(as_expected.attempts) == 2  # with one way of writing it by hand
    left = Search(QUESTION)
    left.compile(left.settle(), 4)
    found = Found(search=left, best=left.best(), rolled=left)
    assert improve(found, 3, one_more=False).best is left.attempts[0]
    assert len(left.attempts) == 1


def _settled(search, attempt):
    return not (waits_longer(attempt) or better_known(attempt, search.budget))


def test_what_waits_longer_than_the_model_says_is_changed_with_the_compiles_left():
    surprised = Search(QUESTION, waits=dict.fromkeys(range(4), 3.0))
    found = improved(surprised, 4)
    first = surprised.attempts[0].measured.step_seconds
    assert 1 < len(surprised.attempts) <= 4
    assert found.best.measured.step_seconds < first
    # As soon as one takes what the model says, and the budget, the rest is not needed.
    *before, _ = surprised.attempts
    assert not any(_settled(surprised, attempt) for attempt in before)


@pytest.mark.parametrize("taken", [True, False])
def test_a_plan_made_for_less_memory_is_changed_by_one_decision_first(
    taken, monkeypatch
):
    """What it waits for may stay where it is; what a solver finds is far from it."""
    monkeypatch.setattr("stowax._search._improve._by_hand", lambda search, best: [])
    first = (("keep", "offload", "recompute", "recompute"),)
    search = Search(QUESTION, waits={1: 0.5})
    solution = dataclasses.replace(
        solve(QUESTION), decisions=first, evaluation=evaluate(QUESTION, first)
    )
    search.compile(solution, 4)
    search.question = dataclasses.replace(QUESTION, device_bytes=400)
    search.budget = 400
    found = Found(search=search, best=search.best(), rolled=search)
    best = improve(found, 2, taken=taken).best
    (tried,) = search.attempts[1:]
    pairs = zip(tried.decisions[0], first[0], strict=True)
    changed = sum(mine != theirs for mine, theirs in pairs)
    assert changed == 1 if taken else changed > 1
    assert best is tried


def test_an_option_stays_only_where_the_compiled_step_is_faster():
    name = "xla_tpu_enable_all_experimental_scheduler_features"
    worse = improved(Search(QUESTION, factor=lambda o: 1 if o[name] else 1.1), 50)
    assert worse.best.options == SET
    better = improved(Search(QUESTION, factor=lambda o: 1 if o[name] else 0.9), 50)
    assert better.best.options == SET | {name: False}


def test_options_are_tried_for_plans_that_move_something():
    assert alternatives(TPU, {"mine": "yes"}) == ()
    changed = alternatives(TPU, SET)
    assert len(changed) > 1
    for options in changed:
        assert options != SET
        assert SET.keys() <= options.keys()
        again = alternatives(TPU, options)
        assert options not in again  # what is set already is no change


def test_more_fast_memory_comes_first_and_stays_for_what_comes_after():
    waits = dict.fromkeys(range(4), 0.5)  # so that decisions are changed, too
    faster = {"factor": lambda o: 0.8 if FAST_MEMORY in o else 1}
    search = Search(QUESTION, waits=waits, **faster)
    found = improved(search, 12)
    first, second, *others = search.attempts
    assert second.decisions == first.decisions
    assert second.options == {**first.options, FAST_MEMORY: "32768"}
    assert others
    assert all(a.options[FAST_MEMORY] == "32768" for a in others)
    assert found.best.options[FAST_MEMORY] == "32768"


def test_more_fast_memory_goes_again_where_it_is_slower():
    slower = Search(QUESTION, factor=lambda o: 1.2 if FAST_MEMORY in o else 1)
    found = improved(slower, 12)
    assert sum(FAST_MEMORY in a.options for a in slower.attempts) == 1
    assert FAST_MEMORY not in found.best.options


def test_four_programs_have_no_more_fast_memory_and_what_a_user_set_stays():
    waits = dict.fromkeys(range(4), 3.0)
    usual = Search(QUESTION, waits=waits)
    improved(usual, 4)
    assert len(usual.attempts) > 1
    assert not any(FAST_MEMORY in a.options for a in usual.attempts)
    theirs = Search(QUESTION, user_options={FAST_MEMORY: "8192"})
    theirs.options_for = lambda decisions: SET | {FAST_MEMORY: "8192"}
    first = theirs.settle()
    theirs.compile(first, 4, theirs.options_for(first.decisions))
    improve(Found(search=theirs, best=theirs.best(), rolled=theirs), 12)
    assert {a.options[FAST_MEMORY] for a in theirs.attempts} == {"8192"}
    gpu = types.SimpleNamespace(platform="gpu")
    assert more_fast_memory(gpu) == {}


def test_what_the_user_set_is_never_changed():
    name = "xla_tpu_enable_all_experimental_scheduler_features"
    search = Search(QUESTION, user_options={name: True, "mine": "yes"})
    improved(search, 50)
    assert {a.options[name] for a in search.attempts} == {True}


@pytest.mark.parametrize(("seconds", "stays"), [(1.0, True), (1e3, False)])
def test_a_step_that_fits_as_it_is_stays_if_no_plan_is_faster(seconds, stays):
    search = Search(QUESTION)
    written = Attempt(
        decisions=None,
        solution=None,
        evaluation=None,
        options=SET,
        donated=False,
        measured=types.SimpleNamespace(
            compiled_bytes=1,
            step_seconds=seconds,
            inspection=None,
            vanished=(),
            not_on_host=(),
        ),
    )
    search.attempts.append(written)
    found = Found(search=search, best=written, rolled=search)
    assert improve(found, 4).best is written
    assert len(search.attempts) == 1
    best = improve(found, 5).best
    assert (best is written) == stays
    assert best.measured.step_seconds <= seconds
