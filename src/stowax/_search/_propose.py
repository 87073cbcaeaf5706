"""What to compile next: the solver's decisions, policies by hand, single changes.

Bytes of a proposal are those predicted for its lowered program, corrected by what
compilers said; seconds are the model's or, once a program of the variant is compiled,
that one's and the model's difference. The solver finds what its model is most wrong
about: what is compiled beside a program that fits may be faster if the model errs.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from .._planner import (
    MISTAKEN,
    allowed,
    evaluate,
    policies,
    single_changes,
    smallest,
    solve,
    turnover,
)
from .._records._stages import Decisions, Evaluation, Problem, Solution
from .._survey._options import alternatives, more_fast_memory
from ._space import Attempt, Space

_ROUNDS = 8
"""How often model and prediction are brought into line for one proposal (half as often
where layers are as they are written: that prediction walks each of them)."""

SOLVING_SECONDS = 10.0
"""Of a machine that is busy with other things: the solver counts nodes."""

SLACK = 0.002
"""Part of the budget left free: solvers and allocators round."""

WORTH = 0.005
"""Part of the step's time below which a gain does not pay for another compile."""

CLEARLY = 0.05
"""Part of the step's time that is worth a compile that may be for nothing."""

NEARLY = 1.05
"""What is expected to need so much more than the budget may fit it."""

_FAR = 1.2
"""How far predictions of policies by hand, which are like nothing that was compiled,
may be above the truth: 17 % for layer inputs offloaded (PaliGemma2-28B on a v5p)."""

Options = Mapping[str, str | bool | float]

_Candidate = tuple[Space, Decisions, float]
"""Decisions for a variant, and how far predictions for them may be above the truth."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Decisions for one variant, with what they are expected to come to.

    `what` is said of one that is unusual; `left_alone` are layers that keep all, as
    they are written.
    """

    space: Space
    solution: Solution
    options: Options
    bytes: int
    seconds: float
    what: str = ""
    left_alone: bool = False

    @property
    def decisions(self) -> Decisions:
        """What is decided for every value of every body."""
        return self.solution.decisions

    def is_same(self, other: "Attempt | Proposal") -> bool:
        """Whether another one is of the same decisions, under just these options."""
        mine, others = (
            sorted((name, str(value)) for name, value in one.options.items())
            for one in (self, other)
        )
        same = self.decisions == other.decisions and mine == others
        return same and self.space.name == other.space.name


def with_fast_memory(best: Attempt) -> Iterator[Proposal]:
    """The best plan with more of a TPU's fast memory, unless a user decided that.

    Products read their operands less often then, which is worth more than most
    decisions, and compile for longer: this is for the best only.
    """
    asked = best.space.asked
    change = more_fast_memory(asked.machine)
    told = change.keys() & {*asked.compiler_options, *best.options}
    if change and not told and best.solution is not None:
        yield Proposal(
            space=best.space,
            solution=best.solution,
            options={**best.options, **change},
            bytes=best.measured.compiled_bytes,
            seconds=best.measured.step_seconds,
            what="its kernels get more of the fast memory, once",
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class Proposer:
    """Makes proposals for one budget; `solving_seconds` is what the solver took."""

    budget: int
    solving_seconds: float = 0.0
    _least: dict[tuple[object, ...], Proposal] = dataclasses.field(default_factory=dict)

    def settled(
        self,
        space: Space,
        caution: float,
        *,
        beaten: float = math.inf,
        hopeless: Callable[[Evaluation], bool] = lambda _: False,
    ) -> Proposal:
        """The fastest decisions of a variant whose program should fill the budget.

        Each prediction teaches the planner's model what it leaves out, until what is
        left is worth little at the solver's price of a byte, or it would take longer
        than another variant's `beaten` seconds, or is `hopeless`. What needs the least
        if nothing fits.
        """
        target = int(self.budget * (1 - SLACK))
        straight = all(not body.in_loop for body in space.layers)
        tried, room, margin = list[Decisions](), 0, 0
        for _ in range(_ROUNDS // 2 if straight and space.layers else _ROUNDS):
            solution = self._timed(solve, space.problem(target - room))
            known = self._learned(space, solution, caution)
            missed, again = known - target, tried.count(solution.decisions)
            best = self._fastest(space, target, caution)
            gain = max(0, -missed) * solution.seconds_per_byte
            hoped = solution.evaluation.seconds - gain
            if solution.outcome == "infeasible":  # by a model that may be wrong
                space.least.add(solution.decisions)
                hoped = 0.0
                if again and missed > 0:  # less room is all that would be asked for
                    break
            if best and (best.seconds * (1 - WORTH) <= hoped or again > 1):
                break
            slower = hoped * (1 - CLEARLY * straight) >= beaten
            hopes = dataclasses.replace(solution.evaluation, seconds=hoped)
            if slower or hopeless(hopes):
                return best or self._proposal(space, solution, caution)
            tried.append(solution.decisions)
            # A solver finds the decisions that its model is most wrong about: some of
            # what it missed by is left free. Where it insists on less than there is
            # room for, it is told of more. What caution adds it does not know, either.
            short = missed if straight else missed // 2  # it has fewer rounds
            margin = margin + short if missed > 0 or again else 0
            room = known - space.memory.expected(solution.decisions) + margin
        found = self._fastest(space, target, caution) or self.least(space)
        return self._left_alone(found, target, caution) if straight else found

    def _left_alone(self, found: Proposal, target: int, caution: float) -> Proposal:
        """The same state, and layers as they are, where that fits and isn't beaten.

        XLA decides best what of them to compute again: it has no barriers in its way.
        """
        space = found.space
        problem = space.problem(self.budget)
        decisions = tuple(
            mine if body.phase == "update" else kept
            for body, mine, kept in zip(
                problem.bodies,
                found.decisions,
                policies(problem)["keep all"],
                strict=True,
            )
        )
        seconds = evaluate(problem, decisions).seconds
        may_be = allowed(space.survey.bodies, decisions)
        if not may_be or seconds * (1 - CLEARLY) > found.seconds:
            return found
        solution = dataclasses.replace(found.solution, decisions=decisions)
        fits = self._learned(space, solution, caution) <= target
        alone = dataclasses.replace(
            self._proposal(space, solution, caution), left_alone=True
        )
        return alone if fits else found

    def least(self, space: Space) -> Proposal:
        """What needs the least of the device, whatever it costs.

        What larger programs taught may be wrong there, and the model: recomputing all,
        as people do, counts beside what is solved.
        """
        host, memory = space.host_left, space.memory
        known = space, host, len(memory.proposed), len(memory.compiled)
        if known in self._least:
            return self._least[known]
        plain = space.survey.problem(self.budget, host)
        problems = space.problem(self.budget), plain
        found = [self._timed(smallest, problem) for problem in problems]
        hand = policies(plain).get("recompute all")
        if hand and allowed(space.survey.bodies, hand):
            found.append(dataclasses.replace(found[0], decisions=hand))
        solution = min(found, key=lambda s: memory.expected(s.decisions))
        space.least.add(solution.decisions)
        self._learned(space, solution, 0.0)
        return self._least.setdefault(known, self._proposal(space, solution, 0.0))

    def may_fit(self, space: Space) -> list[Proposal]:
        """All that was proposed and fits by its prediction, whatever others needed."""
        needed = space.memory.predicted
        return self._proposed(space, 0.0, lambda d: needed(d) <= self.budget)

    def least_bytes(self, space: Space) -> int:
        """Bytes that are predicted for the smallest plan, after all corrections."""
        if not space.survey.bodies:
            return space.survey.reserved_bytes
        least = self.least(space).decisions
        return int(space.memory.credible(least) * (1 + SLACK))

    def faster(self, space: Space) -> Iterator[Proposal]:
        """What should be clearly faster than the step as it is, by the model of both.

        As it is it keeps everything, or nothing where the user has `jax.checkpoint`.
        """
        problem = space.problem(self.budget)
        written = policies(problem)["recompute all" if space.remat else "keep all"]
        enough = evaluate(problem, written).seconds * (1 - CLEARLY)
        if self._timed(solve, problem).evaluation.seconds > enough:
            return
        proposal = self.settled(space, 0.0)
        if proposal.seconds <= enough and proposal.bytes <= self.budget:
            yield proposal

    def _timed(self, solver: Callable[..., Solution], problem: Problem) -> Solution:
        started = time.perf_counter()
        solution = solver(problem, time_limit_seconds=SOLVING_SECONDS)
        self.solving_seconds += time.perf_counter() - started
        return solution

    def _learned(self, space: Space, solution: Solution, caution: float) -> int:
        """Bytes of the program that a solution makes; the model learns of them."""
        space.proposed[solution.decisions] = solution
        known = space.memory.cautious(solution.decisions, caution)
        space.memory.proposed.add(solution.decisions)
        return known

    def _fastest(self, space: Space, target: int, caution: float) -> Proposal | None:
        """The fastest of all that was proposed and should stay within the budgets."""
        needed = space.memory.cautious
        fitting = self._proposed(space, caution, lambda d: needed(d, caution) <= target)
        return min(fitting, key=lambda p: p.seconds, default=None)

    def _proposed(
        self, space: Space, caution: float, fits: Callable[[Decisions], bool]
    ) -> list[Proposal]:
        """Those of a variant's proposals that fit the device, and the host's budget."""
        on_host, host = space.memory.on_host, space.asked.host_budget
        return [
            self._proposal(space, solution, caution)
            for decisions, solution in space.proposed.items()
            if fits(decisions) and on_host(decisions) <= host
        ]

    def _proposal(self, space: Space, solution: Solution, caution: float) -> Proposal:
        evaluation = evaluate(space.problem(self.budget), solution.decisions)
        return Proposal(
            space=space,
            solution=dataclasses.replace(solution, evaluation=evaluation),
            options=space.options_for(solution.decisions),
            bytes=space.memory.cautious(solution.decisions, caution),
            seconds=evaluation.seconds,
        )

    def beside(
        self,
        best: Attempt,
        attempts: Iterable[Attempt],
        others: Iterable[Space],
        *,
        changes: bool,
    ) -> Iterator[Proposal]:
        """What may be faster than the best program and may fit, likeliest first.

        **Arguments:** `others` are variants of which nothing is compiled. With
        `changes`, also its decisions, or those of a faster program that was too big,
        with one changed, and its compiler options with one changed.
        """
        space, base = best.space, self._evaluated(best)
        known = [(space, decisions, _FAR) for decisions in self._by_people(space)]
        for way in (space, *others):
            slower = functools.partial(_is_slower, best, base, way)
            settled = self.settled(way, caution=1.0, hopeless=slower)
            known.append((way, settled.decisions, 1.0))
        yield from self._hopeful(best, known)
        if not changes:
            return
        bases = [best] + [
            a
            for a in attempts
            if a.space is space
            and a.decisions is not None
            and a.measured.compiled_bytes > self.budget
            and 0 < a.measured.step_seconds < best.measured.step_seconds
        ]
        changed = (
            (space, decisions, 1.0)
            for base in bases
            for decisions in single_changes(space.survey.bodies, base.decisions or ())
        )
        yield from self._hopeful(best, changed)
        assert best.solution is not None
        for options in alternatives(space.survey.target, best.options):
            yield dataclasses.replace(
                self._like(best, best.solution.decisions),
                options={**options, **space.asked.compiler_options},
            )

    def _by_people(self, space: Space) -> list[Decisions]:
        """The policies that people write and the user's wishes allow."""
        found = policies(space.problem(self.budget)).values()
        return [d for d in found if allowed(space.survey.bodies, d)]

    def by_hand(self, best: Attempt) -> Iterator[Proposal]:
        """People's policies that should fit and be clearly faster than the best plan.

        What a person would have written is not left out for want of a compile.
        """
        space, problem = best.space, best.space.problem(self.budget)
        model, worth = self._evaluated(best), CLEARLY * best.measured.step_seconds
        found = [(evaluate(problem, d), d) for d in self._by_people(space)]
        for mine, decisions in sorted(found, key=lambda one: one[0].seconds):
            if mine.seconds > model.seconds - worth:
                return
            on_host = mine.host_bytes <= space.asked.host_budget
            # As the plan's table says it, which knows better than the solver's model.
            if on_host and space.memory.expected(decisions) <= self.budget:
                yield self._like(best, decisions)

    def _hopeful(
        self, best: Attempt, others: Iterable[_Candidate]
    ) -> Iterator[Proposal]:
        """Those that may be faster, and should fit: what is expected first, first."""
        own, base = best.space, self._evaluated(best)
        found: list[tuple[float, _Candidate]] = []
        for space, decisions, far in others:
            try:
                mine = evaluate(space.problem(self.budget), decisions)
            except ValueError:  # something cannot be computed again
                continue
            room = self.budget * far - best.measured.compiled_bytes
            # Of another variant's programs not even the model's reserves are alike.
            predicted = space is not own or decisions in space.memory.proposed
            fits = predicted or mine.device_bytes - base.device_bytes <= room
            fits = fits and mine.host_bytes <= space.asked.host_budget
            if fits and not _is_slower(best, base, space, mine):
                expected = _expected(best, base, space, mine)
                found.append((expected, (space, decisions, far)))
        for _, (space, decisions, far) in sorted(found, key=lambda one: one[0]):
            if space.memory.cautious(decisions, 1.0) / far > self.budget:
                continue
            if space is own:
                yield self._like(best, decisions)
            else:
                yield self._proposal(space, space.proposed[decisions], 1.0)

    def _evaluated(self, best: Attempt) -> Evaluation:
        """What the model says of a program that was compiled."""
        assert best.decisions is not None
        return evaluate(best.space.problem(self.budget), best.decisions)

    def _like(self, best: Attempt, decisions: Decisions) -> Proposal:
        """Decisions to be compiled as the best program was."""
        space = best.space
        assert best.decisions is not None
        assert best.solution is not None
        usual = space.options_for(best.decisions)
        changed = {n: v for n, v in best.options.items() if usual.get(n) != v}
        solution = space.proposed.get(decisions) or dataclasses.replace(
            best.solution, outcome="feasible", decisions=decisions
        )
        proposal = self._proposal(space, solution, 0.0)
        return dataclasses.replace(proposal, options={**proposal.options, **changed})


def _is_slower(best: Attempt, base: Evaluation, space: Space, mine: Evaluation) -> bool:
    """Whether a variant's plan is slower than the best, however the model errs."""
    hope = _expected(best, base, space, mine) - MISTAKEN * turnover(mine, base)
    return hope >= best.measured.step_seconds * (1 - WORTH)


def _expected(best: Attempt, base: Evaluation, space: Space, mine: Evaluation) -> float:
    """Seconds of a plan: the best's compiled ones and the model's difference.

    Of another variant the model may be right where it is wrong of the best's.
    """
    seconds = best.measured.step_seconds + mine.seconds - base.seconds
    return seconds if space is best.space else min(seconds, mine.seconds)
