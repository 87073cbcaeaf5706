"""The closed loop, with a compiler made up: what is compiled next, and when it ends."""

import dataclasses

import pytest

import stand_in_search
from planner_problems import chain
from stand_in_search import TPU, Predicted, offloaded, searching, space, surveyed
from stowax._errors import CompileError, OffloadVanishedError
from stowax._planner import evaluate, policies
from stowax._search import _propose
from stowax._survey._held import holding as held_bodies

# Three values of 8 bytes of which one can be kept; the link carries one for nothing.
BODY = chain(count=10, bytes=8, needed=(1, 2, 3), forward_seconds=3.0)
BUDGET = 250


def planned(search):
    return [a for a in search.log if a.decisions is not None]


def test_the_first_that_fits_is_the_plan_where_nothing_promises_more(monkeypatch):
    monkeypatch.setattr(_propose.Proposer, "beside", lambda *_, **__: iter(()))
    search, _ = searching(monkeypatch, BODY, BUDGET)
    best = search.run()
    assert search.fits(best)
    assert planned(search) == [best]


def test_after_a_program_that_was_too_big_less_is_asked_for(monkeypatch):
    search, _ = searching(monkeypatch, BODY, BUDGET, size=1.4)
    best = search.run()
    first = planned(search)[0]
    assert not search.fits(first)
    assert search.fits(best)
    assert best.measured.compiled_bytes < first.measured.compiled_bytes


def test_no_smallest_budget_is_above_what_a_program_took(monkeypatch):
    """Whichever way it is written: the compiler may need less than was predicted."""
    search, _ = searching(monkeypatch, BODY, BUDGET, may_stay=True, plain=(39, 1e6))
    best = search.run()
    assert best.measured.compiled_bytes == 39
    other = dataclasses.replace(space(surveyed(BODY), BUDGET, search.asked), name="b")
    search.log[0] = dataclasses.replace(best, space=other)
    assert search.propose.least_bytes(search.rolled) > 39
    assert search.smallest_budget() == (39, "compiled")


def test_a_step_that_fits_as_it_is_stays(monkeypatch):
    search, _ = searching(monkeypatch, BODY, BUDGET, may_stay=True, plain=(200, 1e6))
    best = search.run()
    assert best.decisions is None
    assert search.log == [best]


@pytest.mark.parametrize(("seconds", "stays"), [(1.0, True), (1e3, False)])
def test_with_more_compiles_it_stays_if_no_plan_is_faster(monkeypatch, seconds, stays):
    search, _ = searching(
        monkeypatch, BODY, BUDGET, may_stay=True, plain=(200, seconds), compiles=8
    )
    best = search.run()
    assert (best.decisions is None) == stays
    assert planned(search)


def test_what_was_compiled_for_a_share_is_not_compiled_again(monkeypatch):
    search, compiler = searching(
        monkeypatch, BODY, BUDGET, may_stay=True, plain=(200, 1.0)
    )
    search.compile_plain(donate=False)
    again, _ = searching(
        monkeypatch, BODY, BUDGET, may_stay=True, written=search.asked.written
    )
    best = again.run()
    assert best.measured is search.log[0].measured
    assert best.space is again.rolled
    assert [decisions for decisions, _ in compiler.compiled] == [None]
    again.rolled.survey.bodies = ()  # there is no other way
    assert again.smallest_budget() == (200, "compiled")


def test_one_more_program_is_compiled_and_no_third(monkeypatch):
    search, _ = searching(monkeypatch, BODY, BUDGET, waits=dict.fromkeys(range(4), 5.0))
    best = search.run()
    first, *others = planned(search)
    assert len(others) == 1
    assert offloaded(others[0]) != offloaded(first)
    assert best.measured.step_seconds == min(
        a.measured.step_seconds for a in planned(search)
    )


@pytest.mark.slow
def test_a_value_that_is_waited_for_is_not_moved_again(monkeypatch):
    search, _ = searching(monkeypatch, BODY, BUDGET, compiles=10)
    search.run()
    (moved, *_) = offloaded(search.best())
    again, _ = searching(monkeypatch, BODY, BUDGET, compiles=10, waits={moved: 5.0})
    best = again.run()
    assert moved not in offloaded(best)
    assert best.measured.step_seconds < planned(again)[0].measured.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("most", [5, 7])
def test_no_more_is_compiled_than_was_allowed_and_nothing_twice(monkeypatch, most):
    waits = {0: 1.0, 1: 2.0, 2: 3.0}
    search, compiler = searching(monkeypatch, BODY, BUDGET, compiles=most, waits=waits)
    search.run()
    assert len(search.log) == len(compiler.compiled) <= most
    tried = [(d, sorted(o.items())) for d, o in compiler.compiled]
    assert all(tried.count(one) == 1 for one in tried)


def test_what_people_write_by_hand_is_compiled_where_it_may_be_faster(monkeypatch):
    """The model believes in something else, and its first program is waited for."""
    search, _ = searching(monkeypatch, BODY, 10**4, waits=dict.fromkeys(range(4), 9.0))
    by_hand = policies(search.rolled.problem(search.budget))
    mistaken = evaluate
    only = by_hand["recompute all"]

    def wrong(problem, decisions):
        found = mistaken(problem, decisions)
        if decisions != only:
            return found
        return dataclasses.replace(found, recompute_seconds=10 * found.seconds)

    first = search.propose.settled(search.rolled, 0.0)
    search._compile(first)
    monkeypatch.setattr(_propose, "evaluate", wrong)
    monkeypatch.setattr(_propose.Proposer, "settled", lambda *_, **__: first)
    proposed = search.propose.beside(search.best(), search.log, (), changes=False)
    assert only in [p.decisions for p in proposed]


@pytest.mark.parametrize("just_fits", [False, True])
def test_a_plan_that_people_beat_by_hand_is_not_the_last(monkeypatch, just_fits):
    """The program that fits waits for its copies, and nothing else is proposed."""
    waits = dict.fromkeys(range(4), 9.0)
    search, _ = searching(monkeypatch, BODY, 10**4, waits=waits)
    by_hand = policies(search.rolled.problem(search.budget))
    moved, kept = by_hand["offload layer inputs"], by_hand["keep all"]
    if just_fits:
        enough = search.rolled.memory.expected(kept)
        search, _ = searching(monkeypatch, BODY, enough, waits=waits)
    monkeypatch.setattr(_propose.Proposer, "beside", lambda *_, **__: iter(()))
    found = search.propose.settled(search.rolled, 0.0)
    slow = dataclasses.replace(
        found, solution=dataclasses.replace(found.solution, decisions=moved)
    )
    monkeypatch.setattr(_propose.Proposer, "settled", lambda *_, **__: slow)
    best = search.run()
    assert [a.decisions for a in planned(search)] == [moved, kept]
    assert best.decisions == kept


def test_what_should_fit_is_not_left_out_where_the_model_errs(monkeypatch):
    """A prediction says more of a program than the difference that the model sees."""
    search, _ = searching(monkeypatch, BODY, BUDGET)
    best = search.run()
    memory = search.rolled.memory
    kept = policies(search.rolled.problem(BUDGET))["keep all"]
    other = [(search.rolled, kept, 1.0)]
    memory.predictions[kept] = 10, 0  # bytes of the device, of the host
    monkeypatch.setattr(Predicted, "predicted", lambda self, d: self.predictions[d][0])
    assert not [*search.propose._hopeful(best, other)]
    memory.proposed.add(kept)
    assert [p.decisions for p in search.propose._hopeful(best, other)] == [kept]


@pytest.mark.slow
def test_a_faster_program_that_was_too_big_is_made_smaller(monkeypatch):
    search, _ = searching(monkeypatch, BODY, BUDGET, compiles=12, size=1.4)
    best = search.run()
    assert search.fits(best)
    big = [a for a in planned(search) if not search.fits(a)]
    assert big
    assert all(a.measured.step_seconds <= best.measured.step_seconds for a in big[:1])


@pytest.mark.slow
def test_options_are_changed_only_where_more_compiles_are_allowed(monkeypatch):
    def factor(options):
        return 0.5 if options.get("xla_tpu_host_transfer_overlap_limit") == "2" else 1.0

    for compiles, found in ((None, False), (12, True)):
        search, compiler = searching(
            monkeypatch, BODY, BUDGET, target=TPU, compiles=compiles, factor=factor
        )
        best = search.run()
        changed = best.options.get("xla_tpu_host_transfer_overlap_limit") == "2"
        assert changed == found
        assert all(options["mine"] == "yes" for _, options in compiler.compiled)


def test_what_programs_take_of_the_host_beyond_the_model_is_left_free(monkeypatch):
    """Each takes twice what the model says; half of it would be too much."""
    free, _ = searching(monkeypatch, BODY, BUDGET)
    room = int(1.5 * free.run().solution.evaluation.host_bytes)
    search, _ = searching(monkeypatch, BODY, BUDGET, host=2.0, host_budget=room)
    best = search.run()
    assert search.fits(best)
    assert best.measured.host_bytes <= room
    assert any(a.measured.host_bytes > room for a in search.log)


@pytest.mark.parametrize("budget", [60, 100, 150, 200, 250, 400])
@pytest.mark.parametrize("size", [0.8, 1.0, 1.3])
def test_where_a_program_fits_the_smallest_budget_is_no_larger(
    monkeypatch, budget, size
):
    search, _ = searching(monkeypatch, BODY, budget, size=size)
    best = search.run()
    smallest, _ = search.smallest_budget()
    if search.fits(best):
        assert smallest <= budget
    else:
        assert smallest > budget


def test_what_the_compiler_names_stays_on_the_device(monkeypatch):
    def refuses(decisions, options):
        if decisions is not None and decisions[0][0] == "offload":
            raise CompileError("no such copy: stowax.offload.layer.0/copy")

    search, _ = searching(monkeypatch, BODY, BUDGET, refuses=refuses)
    monkeypatch.setattr(type(search.rolled), "holding", holding)
    best = search.run()
    assert search.fits(best)
    assert 0 not in offloaded(best)
    (note,) = best.space.survey.refused
    assert "what it names may not be offloaded: the compiler refused" in note


def holding(space, held, note):
    """As `Space.holding`, for surveys that are made up."""
    bodies = held_bodies(space.survey.bodies, held, "refused")
    survey = stand_in_search.surveyed(*bodies, target=space.survey.target)
    survey.refused = (*space.survey.refused, note)
    return stand_in_search.space(survey, space.memory.scale, space.asked)


def test_where_nothing_compiles_its_words_come_out(monkeypatch):
    def refuses(decisions, options):
        raise CompileError("never")

    search, _ = searching(monkeypatch, BODY, BUDGET, refuses=refuses)
    monkeypatch.setattr(type(search.rolled), "holding", holding)
    with pytest.raises(CompileError, match="never"):
        search.run()
    *_, anew, deciding, compiling = search.asked.said
    assert anew.startswith("planning anew: everything may not be")
    assert (deciding, compiling) == ("deciding on plan 1", "compiling plan 1")


def test_a_step_that_fits_ends_where_every_plan_of_it_is_refused(monkeypatch):
    def refuses(decisions, options):
        if decisions is not None:
            raise CompileError("never")

    search, compiler = searching(
        monkeypatch,
        BODY,
        BUDGET,
        may_stay=True,
        plain=(200, 1.0),
        compiles=8,
        refuses=refuses,
    )
    assert search.run().decisions is None
    assert len(compiler.compiled) <= 8


def test_refusals_count_among_the_compiles(monkeypatch):
    seen = []

    def refuses(decisions, options):
        seen.append(decisions)
        if len(seen) > 1:
            raise CompileError("never")

    search, _ = searching(monkeypatch, BODY, BUDGET, compiles=6, refuses=refuses)
    assert search.fits(search.run())
    assert 1 < len(seen) <= 6


@pytest.mark.slow
def test_a_change_that_is_refused_does_not_cost_the_plan(monkeypatch):
    """Nor one whose copies the compiler leaves out."""
    seen = []

    def refuses(decisions, options):
        seen.append(decisions)
        if len(seen) > 1:
            raise OffloadVanishedError("gone", ("stowax.offload.layer.1",))

    search, _ = searching(
        monkeypatch, BODY, BUDGET, refuses=refuses, waits=dict.fromkeys(range(4), 5.0)
    )
    best = search.run()
    assert len(seen) > 1
    assert best.decisions == seen[0]
    assert any("a change of the plan is left out: gone" in s for s in search.asked.said)


def test_the_fastest_known_program_that_fits_is_the_plan(monkeypatch):
    small, _ = searching(monkeypatch, BODY, BUDGET)
    small.run()
    search, compiler = searching(monkeypatch, BODY, 2 * BUDGET, factor=lambda _: 9.0)
    search.known = small.attempts
    assert search.run() in small.attempts
    assert len(compiler.compiled) <= 2


def test_a_budget_searches_for_itself_whatever_else_fits_it(monkeypatch):
    """What was made for less memory moves what could stay."""
    small, _ = searching(monkeypatch, BODY, 150)
    small.run()
    search, compiler = searching(monkeypatch, BODY, 400)
    search.known = small.attempts
    best = search.run()
    alone, _ = searching(monkeypatch, BODY, 400)
    assert best.measured.step_seconds <= alone.run().measured.step_seconds
    assert all(a.space is search.rolled for a in search.log)
    assert compiler.compiled


def test_what_another_budget_compiled_is_not_compiled_again(monkeypatch):
    small, _ = searching(monkeypatch, BODY, BUDGET)
    small.run()
    search, compiler = searching(monkeypatch, BODY, BUDGET)
    search.rolled = small.rolled.for_budget(BUDGET)
    search.known = small.attempts
    assert search.run() in small.attempts
    assert len(compiler.compiled) < len(small.log) + 1
    assert search.taken


def test_a_step_that_fits_stays_unless_much_is_to_be_gained(monkeypatch):
    def plain(seconds):
        search, _ = searching(
            monkeypatch, BODY, BUDGET, may_stay=True, plain=(200, seconds)
        )
        search.known = small.attempts
        return search.run()

    small, _ = searching(monkeypatch, BODY, BUDGET)
    seconds = small.run().measured.step_seconds
    assert plain(1.004 * seconds).decisions is None
    assert plain(1.02 * seconds).decisions is not None
