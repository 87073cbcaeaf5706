"""Copies hide in what the compiled loops work, not in what that was priced at."""

import pytest

from planned_models import LAYERS, arguments, plan, train
from planner_problems import chain, problem
from stowax._planner import evaluate, solve
from stowax._search import _loop
from stowax._search._windows import windowed, windows_of

BODY = chain(count=10, bytes=24)  # 3 s forward; a copy takes 3 s
ASKED = problem(BODY)
CHOSEN = (("offload", "keep", "keep", "keep"),)


def test_what_hides_by_the_price_is_waited_for_in_a_shorter_window():
    before = evaluate(ASKED, CHOSEN)
    after = evaluate(windowed(ASKED, {"layer": (2.5, None)}), CHOSEN)
    waited = BODY.count * (3.0 - 2.5)
    assert after.exposed_seconds == pytest.approx(before.exposed_seconds + waited)
    # The arithmetic has its price all the same.
    assert after.seconds == pytest.approx(before.seconds + waited)


def test_windows_are_those_of_their_own_body():
    assert windowed(ASKED, {"another": (0.1, 0.1)}) == ASKED


def test_what_was_computed_again_is_no_window_of_the_next():
    """v2 and v3 were made again, a second each, in the 9 s that the loop worked."""
    chosen = (("keep", "offload", "recompute", "recompute"),)
    assert windows_of((BODY,), chosen, {"layer": (2.0, 9.0)}) == {"layer": (2.0, 7.0)}
    assert windows_of((BODY,), chosen, {"layer": (2.0, 1.0)}) == {"layer": (2.0, 0.0)}
    assert windows_of((BODY,), chosen, {"layer": (2.0, None)}) == {"layer": (2.0, None)}
    assert windows_of((BODY,), chosen, {}) == {}


def test_the_solver_moves_less_where_less_hides():
    asked = problem(chain(bytes=8), device_bytes=250)
    (before,) = solve(asked, time_limit_seconds=60.0).decisions
    assert "offload" in before
    asked = windowed(asked, {"layer": (0.0, 0.0)})
    after = solve(asked, time_limit_seconds=60.0)
    assert after.decisions[0].count("offload") < before.count("offload")
    assert after.evaluation.seconds < evaluate(asked, (before,)).seconds


@pytest.mark.slow
def test_a_compiled_program_says_how_long_its_loops_work(monkeypatch):
    tried = []

    def compile_and_read(*args, **options):
        tried.append(compile_before(*args, **options))
        return tried[-1]

    compile_before = _loop.compile_and_read
    monkeypatch.setattr(_loop, "compile_and_read", compile_and_read)
    found = plan(train, *arguments(), pin={"layer input 0": "offload"})
    measured = tried[-1]
    ((forward, backward),) = measured.loops.values()
    timeline = measured.inspection.timeline
    busy = timeline.step_seconds - timeline.exposed_seconds
    # The rest is the update. A copy in flight or two are not counted as work.
    assert 0 < forward < backward
    assert 0.5 * busy < LAYERS * (forward + backward) < busy * 1.001
    # A step that moves nothing has nothing that hides.
    tried.clear()
    plan(train, *arguments(), pin={"*": "keep"})
    assert not any(measured.loops for measured in tried)
    assert found.fits


@pytest.mark.slow
def test_the_next_question_has_the_windows_of_the_last_program(monkeypatch):
    searches = {}
    compile_before = _loop.Search.compile

    def compile(search, *args, **options):
        searches[id(search)] = search
        return compile_before(search, *args, **options)

    monkeypatch.setattr(_loop.Search, "compile", compile)
    plan(train, *arguments(), pin={"layer input 0": "offload"})
    (search,) = searches.values()
    attempt = [a for a in search.attempts if a.decisions][-1]
    ((name, (forward, _)),) = attempt.measured.loops.items()
    bodies = {body.name: body for body in search.problem().bodies}
    priced = {body.name: body for body in search.survey.bodies}
    assert bodies[name].windows[0] == forward
    assert bodies[name].windows[0] != priced[name].windows[0]
    assert bodies[name].forward_seconds == priced[name].forward_seconds
    # A bound that was proven for longer windows is none for these.
    assert attempt.solution is not None
    search.charges = {}
    bound = search.bound_seconds(attempt.solution)
    search.windows = {name: (0.0, 0.0)}
    assert search.bound_seconds(attempt.solution) > bound
