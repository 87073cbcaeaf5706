"""The closed loop: decide, predict, compile, compare, decide again.

The planner's memory model is linear and knows no schedule; the prediction walks the
lowered program, and costs about a second; the compiler is right, and costs many. So
decisions are first brought into line with the prediction (`settle`), then compiled.
What the compiler says beyond the prediction corrects the next round, and what copies
were waited for is charged to what they move. At most four programs are compiled, and a
plan fits only if its own compiled program does.

A `Search` is for one form of the step; `_forms` says which there are.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from .._planner import evaluate, smallest, solve
from .._records._stages import Decisions, Problem, Solution
from .._survey._options import plan_options
from .._survey._survey import Survey
from .._target._program_cache import ProgramCache
from ._attempt import Attempt
from ._charges import charged, charges_of
from ._forecast import Forecast
from ._lessons import Lessons, learned, taught
from ._trial import compile_and_read, outcome
from ._windows import Windows, windowed, windows_of
from ._worth import WORTH_FILLING, better_known, waits_longer

MOST_COMPILES = 4
_SETTLING_ROUNDS, _MOST_SETTLING_ROUNDS = 3, 8
"""Rounds after which it is enough to fill the budget roughly, and how many at most."""
_SOLVING_SECONDS = 10.0
"""Of a machine that is busy with other things: the solver counts nodes."""
_SETTLED = 0.002
"""Part of the budget within which model and prediction agree."""
_NEARLY = 0.01
"""Part of the budget that a program may lack and yet be worth repeating."""
_WARY = 0.5
"""Part of what a proposal was too big by that the next ones leave free: assumed."""
SLACK = 0.002
"""Part of the budget left free: solvers and allocators round."""

_CAUTION = (0.0, 0.5, 2.0, 4.0)
"""Standard deviations of the forecast added to it: before anything was too big; when a
miss costs a compile and no more; after one; and where this is the last compile, and
nothing fits yet."""
WORTH_ANOTHER_COMPILE = 0.005
"""Part of the step's time below which a gain does not pay for another compile."""

Say = Callable[[str], None]


@dataclasses.dataclass(slots=True, kw_only=True)
class Search:
    """The state of the loop for one budget; `best` gives the attempt to believe.

    `free` is the survey before what the user wants decided. `as_written` says that
    the step may stay as it is, if it fits; `written` has its programs that were
    compiled for other searches, by whether its state is donated. `cache` has
    programs of other days. `least` has the decisions that were made for want of any
    others that fit. `log` has all that was compiled for the plan, other searches'
    attempts too, `other_bound` the seconds below which none of theirs can be,
    `plain` the predicted bytes of the step as it is, donated or not (see `_plain`).
    `charges` are what offloaded values were waited for, `lessons` what the
    planner's memory model was seen to leave out, `windows` how long the last
    program's loops work, `proposed` every solution that a prediction was made for,
    `nearly` what was too big by little, `untaught` what needs least by the model
    alone, by the budget of the host.
    """

    survey: Survey
    free: Survey
    budget: int
    host_budget: int
    user_options: Mapping[str, str | bool]
    donate: bool | None
    say: Say
    as_written: bool = True
    written: dict[bool, Attempt] = dataclasses.field(default_factory=dict)
    cache: ProgramCache = dataclasses.field(default_factory=ProgramCache)
    log: list[Attempt] = dataclasses.field(default_factory=list)
    other_bound: float = math.inf
    plain: dict[bool, int] = dataclasses.field(default_factory=dict)
    charges: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    attempts: list[Attempt] = dataclasses.field(default_factory=list)
    lessons: Lessons = dataclasses.field(default_factory=Lessons)
    windows: Windows = dataclasses.field(default_factory=dict)
    proposed: dict[Decisions, Solution] = dataclasses.field(default_factory=dict)
    nearly: Attempt | None = None
    solving_seconds: float = 0.0
    least: set[Decisions] = dataclasses.field(default_factory=set)
    untaught: dict[int, Solution] = dataclasses.field(init=False, default_factory=dict)
    forecast: Forecast = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.forecast = Forecast(survey=self.survey, scale=self.budget)

    def plan(self, leave: int = 0, *, spare: int = 0, least_last: bool = True) -> None:
        """Compiles plans, until there is nothing to gain, or `leave` compiles left.

        **Arguments:** `spare` are the compiles left once something fits. With
        `least_last=False` the last compile is left for another form of the step, where
        nothing fits and only what needs the least is worth a try.
        """
        while True:
            fits = any(self.fits(a) for a in self.attempts if a.decisions)
            most = MOST_COMPILES - max(leave, spare if fits else 0)
            if len(self.log) >= most or not self._another_round(fits, least_last):
                return

    def best(self) -> Attempt:
        """The best attempt that fits, else the one that needs the least."""
        fitting = [a for a in self.attempts if self.fits(a)]
        fitting = [a for a in fitting if a.is_sound] or fitting
        if fitting:
            return min(fitting, key=lambda a: a.measured.step_seconds)
        return min(self.attempts, key=lambda a: a.measured.compiled_bytes)

    @property
    def may_donate(self) -> bool:
        """Whether the state's buffers are donated where that is wanted."""
        return self.donate is not False and bool(self.survey.step.donate)

    def add(self, attempt: Attempt) -> None:
        """Takes note of a compiled program."""
        self.attempts.append(attempt)
        self.log.append(attempt)

    def left_to_the_compiler(self, attempt: Attempt) -> bool:
        """Whether it is the step as it is, compiled for a smaller chip."""
        return attempt.decisions is None and attempt.options != self.user_options

    def fits(self, attempt: Attempt) -> bool:
        """Whether the attempt's program stays within the budgets."""
        return attempt.fits(self.budget, self.host_budget)

    def bound_seconds(self, solution: Solution) -> float:
        """The solver's bound for `solution`, with what is known of waiting now."""
        bound = solution.bound_seconds
        if self.charges or self.windows:
            again = self._solve(self.problem())
            bound = again.bound_seconds if again.outcome != "infeasible" else bound
        return min(bound, self.other_bound)

    def problem(
        self, budget: int | None = None, survey: Survey | None = None
    ) -> Problem:
        """The planner's question as it stands after the corrections so far.

        `survey` stands in for the search's own: the same step, other wishes.
        """
        return charged(self.uncharged(budget, survey), self.charges)

    def uncharged(
        self, budget: int | None = None, survey: Survey | None = None
    ) -> Problem:
        """The same without what values are charged with."""
        problem = (survey or self.survey).problem(
            budget or self.budget, self._host_left, self.lessons.everywhere
        )
        return windowed(taught(problem, self.lessons), self.windows)

    def _another_round(self, anything_fits: bool, least_last: bool) -> bool:
        """One more program; false when there is nothing left worth compiling."""
        if anything_fits:
            solution = self._next()
            if solution is None:
                return False
        else:
            ways = (self.settle, self.needing_least)
            found = [s for way in ways if not self._known((s := way()).decisions)]
            if not found:
                return False
            solution = found[0]
            last = len(self.log) == MOST_COMPILES - 1
            if last and solution.decisions in self.least and not least_last:
                return False
        return self._surprised_by(self.compile(solution, MOST_COMPILES))

    def _surprised_by(self, attempt: Attempt) -> bool:
        """Whether a program is reason enough for another one."""
        surprise = waits_longer(attempt) or better_known(attempt, self.budget)
        return surprise or not self.fits(attempt)

    def _next(self) -> Solution | None:
        """What is worth a compile beside a program that fits."""
        solution = self.settle()
        worth = not self._known(solution.decisions) and self._worth_it(solution)
        return solution if worth else None

    def _known(self, decisions: Decisions) -> bool:
        return any(a.decisions == decisions for a in self.attempts)

    def _worth_it(self, solution: Solution) -> bool:
        problem = self.problem()
        best = min(
            evaluate(problem, a.decisions).seconds
            for a in self.attempts
            if a.decisions and self.fits(a)
        )
        return solution.evaluation.seconds < best * (1 - WORTH_ANOTHER_COMPILE)

    def _solve(self, problem: Problem) -> Solution:
        started = time.perf_counter()
        solution = solve(problem, time_limit_seconds=_SOLVING_SECONDS)
        self.solving_seconds += time.perf_counter() - started
        return solution

    def needing_least(self) -> Solution:
        """Decisions that need the least of the device, whatever they cost.

        Of programs near the least, the lessons of larger ones may be wrong.
        """
        started, host = time.perf_counter(), self._host_left
        found = [smallest(self.problem(), time_limit_seconds=_SOLVING_SECONDS)]
        if host not in self.untaught:
            self.untaught[host] = smallest(
                self.survey.problem(self.budget, host),
                time_limit_seconds=_SOLVING_SECONDS,
            )
        found.append(self.untaught[host])
        self.solving_seconds += time.perf_counter() - started
        solution = min(found, key=lambda s: self.forecast.known(s.decisions, 0.0))
        self.least.add(solution.decisions)
        return solution

    def settle(self) -> Solution:
        """Decisions whose predicted program fills the budget and no more.

        Every prediction teaches the planner's linear model what it leaves out, until
        the two agree. Returns the fastest of all decisions that were ever proposed and
        are predicted to fit.
        """
        target = int(self.budget * (1 - SLACK))
        room, margin = 0, 0.0
        tried: list[Decisions] = []
        for number in range(_MOST_SETTLING_ROUNDS):
            solution = self._solve(self.problem(target - room))
            if solution.outcome == "infeasible":
                solution = self.needing_least()
            known = self._propose(solution)
            best, missed = self._fastest(target), known - target
            enough = number >= _SETTLING_ROUNDS
            most_unused = target * (WORTH_FILLING if enough else _SETTLED)
            again = tried.count(solution.decisions)
            if best is not None and (again > 1 or 0 <= -missed <= most_unused):
                return best
            tried.append(solution.decisions)
            # A solver finds the decisions that its model is most wrong about: some of
            # what it missed by is left free. Where it insists on less than there is
            # room for, it is told of more. What caution adds it does not know, either.
            if missed > 0 or again:
                margin += _WARY * missed
            else:
                margin = 0.0
            room = known - self.forecast.expected(solution.decisions) + int(margin)
        return self._fastest(target) or self.needing_least()

    def _propose(self, solution: Solution) -> int:
        """Bytes of the program that a solution makes; what they teach is learned."""
        before = self.proposed.get(solution.decisions)
        if before is None or before.outcome == "infeasible":  # bounds nothing
            self.proposed[solution.decisions] = solution
        known = self.forecast.known(solution.decisions, self._caution)
        plain = self.survey.problem(self.budget, self.host_budget)
        off_by = {
            decisions: self.forecast.expected(decisions)
            - evaluate(plain, decisions).device_bytes
            for decisions in self.proposed
        }
        self.lessons = learned(self.survey.bodies, off_by, self.budget)
        return known

    def _fastest(self, target: int) -> Solution | None:
        """The fastest of what was proposed and is expected to stay within `target`."""
        problem, host = self.problem(), self._host_left
        fitting = [
            solution
            for solution in self.proposed.values()
            if self.forecast.known(solution.decisions, self._caution) <= target
            and solution.evaluation.host_bytes <= host
            and self.forecast.on_host(solution.decisions) <= self.host_budget
        ]
        return min(
            fitting,
            key=lambda s: evaluate(problem, s.decisions).seconds,
            default=None,
        )

    @property
    def _host_left(self) -> int:
        """The host's budget, less what programs need there beyond the model.

        Those that were compiled, and those proposed that are predicted not to fit.
        """
        needed = [(a.measured.host_bytes, a.evaluation) for a in self.attempts]
        needed += [
            (expected, solution.evaluation)
            for decisions, solution in self.proposed.items()
            if (expected := self.forecast.on_host(decisions)) > self.host_budget
        ]
        more = (there - model.host_bytes for there, model in needed if model)
        return self.host_budget - max(0, *more, 0)

    @property
    def _caution(self) -> float:
        fits = [self.fits(a) for a in self.attempts if a.decisions]
        left = MOST_COMPILES - len(self.log)
        if any(fits) or (len(fits) == 1 and left > 2):
            return _CAUTION[1]
        if left == 1:
            return _CAUTION[3]
        return _CAUTION[2] if fits else _CAUTION[0]

    def options_for(self, decisions: Decisions) -> dict[str, str | bool]:
        """The compiler options that decisions are compiled with by default."""
        offloads = any("offload" in chosen for chosen in decisions)
        sparing = self.survey.tight or decisions in self.least
        target = self.survey.target
        return {**plan_options(target, offloads, sparing=sparing), **self.user_options}

    def compile(
        self,
        solution: Solution,
        most: int,
        options: Mapping[str, str | bool] | None = None,
    ) -> Attempt:
        """Compiles decisions and takes note of what comes out.

        **Arguments:** `most` is how many programs may be compiled in all, for the
        line of progress.
        """
        if options is None:
            options = self.options_for(solution.decisions)
        number = len(self.log) + 1
        self.say(f"compiling plan {number} (at most {most})")
        measured = compile_and_read(
            self.survey,
            f"plan {number}",
            self.survey.step_plan(solution.decisions),
            options,
            cache=self.cache,
            correction=self.forecast.excess(solution.decisions),
            donate=self.may_donate,
        )
        self.say(outcome(measured, self.budget, self.host_budget))
        attempt = Attempt(
            decisions=solution.decisions,
            solution=solution,
            evaluation=evaluate(self.problem(), solution.decisions),
            options=options,
            donated=self.may_donate,
            measured=measured,
        )
        self.add(attempt)
        self.forecast.learn(solution.decisions, measured.compiled_bytes)
        bodies = self.survey.bodies
        found = windows_of(bodies, solution.decisions, measured.loops)
        self.windows = {**self.windows, **found}
        self._charge(attempt)
        return attempt

    def _charge(self, attempt: Attempt) -> None:
        """Takes note of what a program waited for; the last word on a value counts.

        Not yet of one that is too big by little: the next one is to be the same, but
        for a few bytes.
        """
        missed = attempt.measured.compiled_bytes - self.budget
        if self.nearly is None and 0 < missed <= _NEARLY * self.budget:
            self.nearly = attempt
            return
        for told in filter(None, (self.nearly, attempt)):
            inspection = told.measured.inspection
            if told.decisions is not None and inspection is not None:
                expected = evaluate(self.uncharged(), told.decisions)
                self.charges.update(
                    charges_of(self.survey, told.decisions, expected, inspection)
                )
        self.nearly = None
