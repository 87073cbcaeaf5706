"""Beyond the first good plan: change after change, each judged on its compiled program.

`plan` compiles at most four programs, and believes the planner's model in what it has
not compiled. Where the best of them waits for its copies much longer than the model
says, that belief is worth little, and the compiles that are left go to changes of it.
Where it does not, one goes to the solver's next decisions, or to what people write by
hand, if that may be faster: a plan is not to be slower than what anybody would have
tried. Whoever trains for weeks may want more certainty still (`compiles=`): from the
best plan so far, the model proposes what to change, the compiled schedule says whether
that is faster, and what it says goes back into the model. It ends where no proposal is
left, or no compile.

Proposals, in this order, those first that promise most:

- on a TPU, the best plan with more of the chip's fast memory for each kernel: that is
  worth more than any change of decisions, and stays for those that come after;
- what people write by hand, where it is expected to be faster than what there is, and
  promises more than the next;
- the solver's decisions, when offloaded values are charged with what their copies were
  waited for (`_charges`);
- the decisions of the best plan, or of a faster one that was too big, with one changed,
  and what people write by hand, if that may be faster even though the model does not
  say so, those first that may win most;
- the best plan with one compiler option changed, of a short list (`_options`).

A plan that was made for another budget is changed by one decision first, those first
that the model expects to be faster with no mistake: what it moves for want of memory
may stay here, and what a compiled program waited for is known, not reckoned.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from .._planner import evaluate, policies, recomputed_values
from .._records._stages import Body, Decision, Decisions, Evaluation, Solution
from .._survey._options import alternatives, more_fast_memory
from ._attempt import Attempt
from ._forms import Found
from ._loop import MOST_COMPILES, Search
from ._worth import better_known, waits_longer

_MISTAKEN = 0.25
"""Part of what a change moves (seconds of recomputation, of copies, of storing) by
which the model may be mistaken about it: assumed."""

_WORTH = 0.002
"""Part of the step that a change has to promise to be compiled."""

_CAUTION = 1.0
"""Standard deviations of the forecast that a change has to stay within the budget."""

_FAR = 1.2
"""How far predictions of policies by hand, which are like nothing that was compiled,
may be above the truth: 17 % for layer inputs offloaded (PaliGemma2-28B on a v5p)."""

_Options = Mapping[str, str | bool]
Proposal = tuple[Solution, _Options]
_Promises = list[tuple[float, Decisions]]


def improve(
    found: Found, most: int, *, taken: bool = False, one_more: bool = True
) -> Found:
    """`found`, its best attempt replaced by the best of up to `most` programs in all.

    **Arguments:** `taken` says that its best was made for another budget. With
    `one_more=False` a plan that surprised nobody is left to what comes after.

    What does not fit is returned as it is. If `most` allows no program more than the
    search itself, only what waits longer than the model says, or is new and leaves
    room, is changed; else one program more is tried, of the solver or written by hand.
    With more a step that fits as it is gets a plan all the same, and stays as it is if
    that is not faster: what a scan keeps it writes and reads, and some of it is
    computed sooner.
    """
    search = found.search
    all_of_them = most > MOST_COMPILES
    if not search.fits(found.best):
        return found
    if found.best.decisions is None and search.survey.bodies and all_of_them:
        search.plan()
    compiled_before = len(search.log)
    while len(search.log) < most:
        best = best_sound(search)
        if best.decisions is None:
            break
        ways = [with_fast_memory(search, best)] if all_of_them else []
        if taken:
            ways.append(_surest(search, best))
        any_change = all_of_them or _worth_changing(search, best, found.best)
        if any_change:
            ways.append(_proposals(search, best))
        elif one_more and len(search.log) == compiled_before:
            ways.append(_one_more(search, best))
        proposal = next(itertools.chain(*ways), None)
        if proposal is None:
            if any_change:
                search.say("no single change is expected to be faster")
            break
        solution, options = proposal
        search.compile(solution, most, options)
    return dataclasses.replace(found, best=best_sound(search))


def _worth_changing(search: Search, best: Attempt, first: Attempt) -> bool:
    """Whether it waits longer than the model says, or is new and leaves room."""
    is_new = best is not first
    return waits_longer(best) or (is_new and better_known(best, search.budget))


def best_sound(search: Search) -> Attempt:
    """The best program that does what was planned: a change that does not is no error.

    What fits already is not lost to a change whose copies the compiler drops.
    """
    sound = [a for a in search.attempts if search.fits(a) and a.is_sound]
    if not sound:
        return search.best()
    return min(sound, key=lambda attempt: attempt.measured.step_seconds)


def with_fast_memory(search: Search, best: Attempt) -> Iterator[Proposal]:
    """The best plan with more of a TPU's fast memory, unless it or a user has it."""
    assert best.decisions is not None
    change = more_fast_memory(search.survey.target)
    options = {**best.options, **change, **search.user_options}
    if not _tried(search, best.decisions, options):
        yield _as_solution(search, best, best.decisions), options


def _proposals(search: Search, best: Attempt) -> Iterator[Proposal]:
    """What to compile next, the most promising first; nothing twice."""
    assert best.decisions is not None
    settled, by_hand = search.settle(), _by_hand(search, best)
    yield from _likeliest(search, best, settled, by_hand)
    for decisions in _changes(search, best, by_hand):
        yield from _unless_tried(search, best, decisions)
    solution = _as_solution(search, best, best.decisions)
    for changed in alternatives(search.survey.target, best.options):
        options = {**changed, **search.user_options}
        if not _tried(search, best.decisions, options):
            yield solution, options


def _surest(search: Search, best: Attempt) -> Iterator[Proposal]:
    """The best plan with one decision changed, the fastest by the model first."""
    assert best.decisions is not None
    most = best.measured.step_seconds * (1 - _WORTH)
    changed = (
        (_expected(search, best, decisions), decisions)
        for decisions in _neighbours(search, best.decisions)
        if _seems_to_fit(search, best, decisions)
    )
    promising = sorted((p for p in changed if p[0] < most), key=lambda pair: pair[0])
    for _, decisions in promising:
        if _may_fit(search, decisions, caution=_CAUTION):
            yield from _unless_tried(search, best, decisions)


def _one_more(search: Search, best: Attempt) -> Iterator[Proposal]:
    """What to compile beside a program that surprised nobody."""
    settled, by_hand = search.settle(), _by_hand(search, best)
    yield from _likeliest(search, best, settled, by_hand)
    yield from _written_by_hand(search, best, by_hand)


def _likeliest(
    search: Search, best: Attempt, settled: Solution, by_hand: _Promises
) -> Iterator[Proposal]:
    """What people write by hand, if it is expected to be faster; the solver's next.

    The solver finds what its model is most wrong about. But what is far from all that
    was compiled has always much to hope for.
    """
    hope = _hoped(search, best, settled.decisions)
    now = best.measured.step_seconds
    likely = [pair for pair in by_hand if _expected(search, best, pair[1]) < now]
    yield from _written_by_hand(search, best, likely, below=hope)
    options = _like(search, best, settled.decisions)
    worth = hope < now * (1 - _WORTH)
    if worth and not _tried(search, settled.decisions, options):
        yield settled, options


def _written_by_hand(
    search: Search, best: Attempt, by_hand: _Promises, below: float = math.inf
) -> Iterator[Proposal]:
    """What people write by hand and promises to be faster, the most first.

    **Arguments:** `below` are the seconds that it has to promise besides.
    """
    most = min(below, best.measured.step_seconds * (1 - _WORTH))
    for promised, decisions in by_hand:
        if promised < most:
            yield from _unless_tried(search, best, decisions)


def _unless_tried(
    search: Search, best: Attempt, decisions: Decisions
) -> Iterator[Proposal]:
    """Decisions to be compiled as the best plan was, unless they have been."""
    options = _like(search, best, decisions)
    if not _tried(search, decisions, options):
        yield _as_solution(search, best, decisions), options


def _like(search: Search, best: Attempt, decisions: Decisions) -> _Options:
    """The options of decisions, with what was changed in those of the best plan."""
    assert best.decisions is not None
    usual = search.options_for(best.decisions)
    changed = {n: v for n, v in best.options.items() if usual.get(n) != v}
    return {**search.options_for(decisions), **changed}


def _tried(search: Search, decisions: Decisions, options: _Options) -> bool:
    """Whether decisions were compiled with just these options."""
    mine = _key(options)
    return any(
        a.decisions == decisions and _key(a.options) == mine for a in search.attempts
    )


def _key(options: _Options) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in options.items()))


def _expected(
    search: Search, base: Attempt, decisions: Decisions, mistaken: float = 0.0
) -> float:
    """Seconds of the compiled step: those of `base`, and the model's difference.

    **Arguments:** `mistaken` is the part of what a change moves by which the model errs
    in its favour.
    """
    assert base.decisions is not None
    problem = search.problem()
    mine, theirs = (evaluate(problem, d) for d in (decisions, base.decisions))
    turnover = sum(
        abs(here - there)
        for here, there in zip(_parts(mine), _parts(theirs), strict=True)
    )
    expected = base.measured.step_seconds + mine.seconds - theirs.seconds
    return expected - mistaken * turnover


def _hoped(search: Search, base: Attempt, decisions: Decisions) -> float:
    """Seconds of the compiled step, if the model is mistaken in favour of a change."""
    return _expected(search, base, decisions, mistaken=_MISTAKEN)


def _parts(evaluation: Evaluation) -> tuple[float, float, float]:
    """Seconds of recomputation, of copies, and of everything that is no waiting."""
    again, moving = evaluation.recompute_seconds, evaluation.transfer_seconds
    return again, moving, evaluation.seconds - again - evaluation.exposed_seconds


def _changes(search: Search, best: Attempt, by_hand: _Promises) -> Iterator[Decisions]:
    """Other decisions, if they may be faster and may fit.

    The best plan's with one changed, those of a faster program that was too big, and
    what people write by hand.
    """
    most = best.measured.step_seconds * (1 - _WORTH)
    changed = (
        (_hoped(search, base, decisions), decisions)
        for base in (best, *_too_big(search, best))
        for decisions in _neighbours(search, base.decisions or ())
        if _seems_to_fit(search, base, decisions)
    )
    possible = {decisions for _, decisions in by_hand}
    pairs = itertools.chain(changed, by_hand)
    promising = sorted((p for p in pairs if p[0] < most), key=lambda pair: pair[0])
    for _, decisions in promising:
        known = decisions in possible
        if known or _may_fit(search, decisions, caution=_CAUTION):
            yield decisions


def _seems_to_fit(search: Search, base: Attempt, decisions: Decisions) -> bool:
    """Whether a change of `base` is worth a prediction, by the planner's own model.

    Of hundreds of changes most may be faster because they keep more. A prediction takes
    a second or more.
    """
    assert base.decisions is not None
    problem = search.problem()
    mine, theirs = (evaluate(problem, d) for d in (decisions, base.decisions))
    more = mine.device_bytes - theirs.device_bytes
    return base.measured.compiled_bytes + more <= search.budget


def _may_fit(
    search: Search, decisions: Decisions, *, caution: float, doubt: float = 1.0
) -> bool:
    evaluation = evaluate(search.problem(), decisions)
    if evaluation.host_bytes > search.host_budget:
        return False
    return search.forecast.known(decisions, caution) / doubt <= search.budget


def _too_big(search: Search, best: Attempt) -> list[Attempt]:
    """Programs that would be faster than the best, and miss the budget."""
    return [
        attempt
        for attempt in search.attempts
        if attempt.decisions is not None
        and attempt.measured.inspection is not None
        and not search.fits(attempt)
        and attempt.measured.step_seconds < best.measured.step_seconds
    ]


def _by_hand(search: Search, best: Attempt) -> _Promises:
    """What people write by hand and may fit, with what it promises, the most first.

    It may fit even if it seems too big: it is far from what was compiled, and so are
    predictions for it from the truth. But then it has to promise more.
    """

    def promised(decisions: Decisions) -> float:
        size = search.forecast.known(decisions, 0.0) / search.budget
        return _hoped(search, best, decisions) * max(1.0, size)

    most = best.measured.step_seconds * (1 - _WORTH)
    found = (
        (promised(decisions), decisions)
        for decisions in _possible_by_hand(search)
        if _hoped(search, best, decisions) < most
        and _may_fit(search, decisions, caution=0.0, doubt=_FAR)
    )
    return sorted(found, key=lambda pair: pair[0])


def _possible_by_hand(search: Search) -> Iterator[Decisions]:
    """What people write by hand, where it can be carried out and the pins allow it."""
    problem = search.problem()
    for decisions in policies(problem).values():
        if not _allowed(search, decisions):
            continue
        try:
            evaluate(problem, decisions)
        except ValueError:  # something cannot be computed again
            continue
        yield decisions


def _allowed(search: Search, decisions: Decisions) -> bool:
    pairs = zip(search.survey.bodies, decisions, strict=True)
    return all(
        decision is None or decision in value.allowed
        for body, chosen in pairs
        for value, decision in zip(body.values, chosen, strict=True)
        if not value.available
    )


def _neighbours(search: Search, decisions: Decisions) -> Iterator[Decisions]:
    """All decisions that differ in one value: one that is stored, or could be."""
    for b, (body, chosen) in enumerate(
        zip(search.survey.bodies, decisions, strict=True)
    ):
        for value in body.values:
            for decision in sorted(value.allowed):
                if value.available or decision == (chosen[value.index] or "recompute"):
                    continue
                mine = _with(chosen, value.index, decision)
                if _makes_sense(body, mine, value.index):
                    yield (*decisions[:b], mine, *decisions[b + 1 :])


def _makes_sense(body: Body, chosen: tuple[Decision | None, ...], index: int) -> bool:
    """Whether decisions can be carried out, and what is stored is read."""
    if chosen[index] == "offload" and not body.in_loop:
        return False
    try:
        _, read = recomputed_values(body, chosen)
    except ValueError:  # something cannot be computed again
        return False
    return chosen[index] == "recompute" or index in read


def _with(
    chosen: tuple[Decision | None, ...], index: int, decision: Decision
) -> tuple[Decision | None, ...]:
    return (*chosen[:index], decision, *chosen[index + 1 :])


def _as_solution(search: Search, best: Attempt, decisions: Decisions) -> Solution:
    """Decisions that no solver made, with the certificate of those that one did."""
    assert best.solution is not None
    return dataclasses.replace(
        best.solution,
        outcome="feasible",
        decisions=decisions,
        evaluation=evaluate(search.problem(), decisions),
    )
