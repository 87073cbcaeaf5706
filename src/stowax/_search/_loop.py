"""The closed loop: propose, predict, compile, correct; stop at one more than enough.

The planner's memory model knows no schedule; the prediction walks the lowered program,
and costs about a second; the compiler is right, and costs many. So decisions are first
brought into line with the prediction (`_propose`), then compiled, which corrects both
(`_correction`). A plan fits only if its own compiled program does.

The step as it is comes first, where it may fit. Then the fastest proposal of any
variant (`_variants`) that is expected to fit, until one does, `MOST_MISSES` times at
most. Where none is expected to, or two did not, more variants are opened; at last comes
what fits by its prediction alone, and what needs the least. Beside the first that fits
one more is compiled: of 136 plans those after it bought half a percent. Policies by
hand that should beat it clearly are, too, and on a TPU the best with more fast memory.
`compiles` goes on. What the compiler refuses stays, and the rest is proposed anew.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable

from .._errors import CompileError, OffloadVanishedError, StowaxError
from .._planner import evaluate
from .._records._plan import Source
from .._survey._asked import MOST_MISSES, Asked
from .._trial._compiled import compile_and_read, outcome
from ._correction import stalls_of
from ._propose import CLEARLY, NEARLY, WORTH, Proposal, Proposer, with_fast_memory
from ._space import Attempt, Space, asks_for_more, narrower, plain, plain_bytes, unmet
from ._variants import BESIDE, WHERE_NOTHING_FITS, finer, matching, returned

_CAUTION = (0.0, 0.5, 2.0, 4.0)
"""Standard deviations added to what a program should need, by how many were too big."""

_HOPELESS = 1.35
"""How many times the budget the smallest plan may be predicted to need for a second
program to be tried: predictions were up to 31 % above the truth (`_variants`)."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Search:
    """The state of the loop for one budget.

    `spaces` are the variants that are open, the rolled one among them. `known` are
    programs of other budgets, `log` those that were compiled for this one, `taken`
    those of `known` that it would have compiled as well, `calls` what the compiler was
    asked for, refusals too.
    """

    asked: Asked
    budget: int
    rolled: Space
    known: list[Attempt] = dataclasses.field(default_factory=list)
    log: list[Attempt] = dataclasses.field(default_factory=list)
    taken: list[Attempt] = dataclasses.field(default_factory=list)
    calls: int = 0
    spaces: list[Space] = dataclasses.field(default_factory=list)
    left_out: list[Proposal] = dataclasses.field(default_factory=list)
    unopened: list[Callable[[Space, int], Space | None]] = dataclasses.field(
        default_factory=lambda: list(WHERE_NOTHING_FITS)
    )
    propose: Proposer = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.propose = Proposer(budget=self.budget)

    # --- what was found ---------------------------------------------------------------

    @property
    def attempts(self) -> list[Attempt]:
        """All programs that may be the plan, its own ones first."""
        return [*self.log, *self.known]

    def fits(self, attempt: Attempt) -> bool:
        """Whether the attempt's program stays within the budgets."""
        return attempt.fits(self.budget, self.asked.host_budget)

    def best(self) -> Attempt:
        """The fastest attempt that fits, else the one that needs the least.

        A step that fits as it is stays so, unless another is faster by `WORTH`.
        """

        def seconds(attempt: Attempt) -> float:
            stays = attempt.decisions is None and attempt in self.log
            return attempt.measured.step_seconds * (1 - WORTH * stays)

        fitting = list(filter(self.fits, self.attempts))
        if self._stays_intact:  # another budget's program may take arguments
            fitting = [attempt for attempt in fitting if not attempt.donated]
        if not fitting:
            return min(self.attempts, key=lambda a: a.measured.compiled_bytes)
        return min(fitting, key=seconds)

    def smallest_budget(self) -> tuple[int, Source]:
        """Device bytes below which no plan is known to fit, and who says so.

        What was compiled counts, and plans that are predicted to need less; where
        nothing fits, only those that were not to be found and need clearly less.
        """
        written = self.asked.written.values() if self._may_stay else ()
        compiled = min(
            (
                a.measured.compiled_bytes
                for a in (*self.attempts, *written)
                if a.measured.host_bytes <= self.asked.host_budget
            ),
            default=None,
        )
        predicted = [
            self.propose.least_bytes(space)
            for space in self._ways()
            if space.survey.bodies or compiled is None
        ]
        if compiled is None:
            return min(predicted), "predicted"
        if not any(map(self.fits, self.attempts)):
            predicted = [p for p in predicted if self.budget < p < compiled / NEARLY]
        least = min(predicted, default=compiled)
        return (least, "predicted") if least < compiled else (compiled, "compiled")

    def _ways(self) -> list[Space]:
        """The variants that may need the least: loops, where there are any."""
        spaces = self.spaces or [self.rolled]
        if returned in self.unopened:  # what a user has of it is another step
            space = returned(self.rolled, self.budget)
            spaces = spaces if space is None else [*spaces, space]
        mine = [s for s in spaces if s.asked.donate == self.asked.donate]
        return [space for space in mine if not space.as_written] or [self.rolled]

    # --- the loop ---------------------------------------------------------------------

    def run(self) -> Attempt:
        """Compiles until there is nothing to gain, or no compile is left.

        **Raises:** `CompileError`, `OffloadVanishedError` where nothing compiles;
        `ArgumentError` for a pattern of `pin` or `forbid` that meets nothing.
        """
        if (error := unmet(self.rolled)) is None:
            self._open()
        else:
            self.spaces = matching(self.rolled, self.budget, error)
            self.unopened = []
        while (proposal := self._next()) is not None:
            self._compile(proposal)
        if self._may_stay and not any(map(self.fits, self.attempts)):
            self._count_written()
        return self.best()

    def _open(self) -> None:
        """The variants to search, after the step as it is where that may fit."""
        if self._may_stay:
            self._try_plain()
        donate = self.rolled.may_donate
        fits = any(map(self.fits, self.log))
        tried = any(a.donated == donate for a in self.log)
        if not self.rolled.survey.bodies and not fits and not tried:
            self.compile_plain(donate=donate)
        rolled = self.rolled
        if donate and self._stays_intact:
            rolled = rolled.intact(self.budget)
        beside = BESIDE if rolled.remat or not fits else ()
        found = [variant(rolled, self.budget) for variant in beside]
        self.spaces = [*filter(None, found), rolled]

    @property
    def _stays_intact(self) -> bool:
        """Whether the step fits as it is, and nobody has to give its arguments up."""
        written = (a for a in self.log if a.decisions is None)
        return any(not a.donated and self.fits(a) for a in written)

    @property
    def _may_stay(self) -> bool:
        """Whether the user wants nothing that the step as it is does not do."""
        return not asks_for_more(self.rolled)

    def _next(self) -> Proposal | None:
        """What to compile next; `None` when there is nothing left worth it."""
        compiles = self.asked.compiles
        goes_on = (compiles or 0) > MOST_MISSES
        if self.calls >= (compiles or self.calls + 1):
            return None
        if not goes_on and any(a.decisions is None and self.fits(a) for a in self.log):
            return self._faster_than_written()
        planned = self._planned
        fitting = list(filter(self.fits, planned))
        if not fitting:
            left = MOST_MISSES + len(self.spaces) - 1 - len(planned)
            return self._first(last=left == 1) if left > 0 else None
        best = min(fitting, key=lambda a: a.measured.step_seconds)
        ways = [with_fast_memory(best)] if goes_on else []
        if goes_on or (len(fitting) == 1 and len(planned) <= MOST_MISSES):
            known = [a.space for a in planned]
            others = [s for s in self.spaces if s.survey.bodies and s not in known]
            ways.append(self.propose.beside(best, planned, others, changes=goes_on))
        if compiles is None:
            ways += [self.propose.by_hand(best), with_fast_memory(best)]
        proposals = (p for way in ways for p in way if not self._tried(p))
        return next(proposals, None)

    def _faster_than_written(self) -> Proposal | None:
        """One plan for a step that fits as it is, of the program most like its own."""
        space = self.spaces[0]
        alike = space.as_written or not self.rolled.is_straight
        # Of a CPU's seconds the model knows too little to change a step for them.
        alike = alike and self.asked.machine.platform != "cpu"
        open_ = alike and space.survey.bodies and not self._planned
        return next(self.propose.faster(space), None) if open_ else None

    @property
    def _planned(self) -> list[Attempt]:
        """Planned programs of its own, compiled now or for another budget."""
        return [a for a in (*self.log, *self.taken) if a.decisions is not None]

    def _first(self, *, last: bool) -> Proposal | None:
        """The fastest that should fit, or what else may; at `last` what needs least."""
        self.asked.say(f"deciding on plan {len(self.log) + 1}")  # may take a minute
        caution = _CAUTION[min(len(self._planned), len(_CAUTION) - 1)]
        if len(self._planned) > 1:
            self._opened()
        spaces = [] if last else self.spaces
        while spaces:
            spaces = [space for space in spaces if space.survey.bodies]
            if (best := self._fastest(spaces, caution)) is not None:
                return best
            spaces = self._opened()
        if self.asked.first and self.attempts:
            return None
        least = [self.propose.least(s) for s in self.spaces if s.survey.bodies]
        if self._planned and all(self._may_need(p) > _HOPELESS for p in least):
            return None
        known = [p for s in self.spaces for p in self.propose.may_fit(s)]
        left = [p for p in least + known if not self._tried(p) and self._is_open(p)]
        may_fit = [p for p in left if self._may_need(p) <= 1]
        return min(may_fit or left, key=lambda p: p.bytes, default=None)

    def _fastest(self, spaces: Iterable[Space], caution: float) -> Proposal | None:
        """The fastest proposal of some variants that is expected to fit.

        Or one that should need a little more, where it is clearly faster: predictions
        err by as much.
        """
        near: list[Proposal] = []
        fitting: list[Proposal] = []
        for space in spaces:
            beaten = min(map(_seconds, fitting), default=math.inf)
            proposal = self.propose.settled(space, caution, beaten=beaten)
            if not self._tried(proposal) and proposal.bytes <= self.budget * NEARLY:
                near.append(proposal)
                fitting += [proposal] * (proposal.bytes <= self.budget)
        if not fitting:
            return None
        best = min(fitting, key=_seconds)
        faster = [p for p in near if p.seconds < best.seconds * (1 - CLEARLY)]
        return min(faster, key=_seconds, default=best)

    def _is_open(self, proposal: Proposal) -> bool:
        """Whether what needs least of a variant may fit, or says what its least is."""
        needed, known = self._may_need(proposal), self._planned
        if any(attempt.space == proposal.space for attempt in known):
            return needed <= 1
        best = min((a.measured.compiled_bytes for a in known), default=math.inf)
        # What is hopeless, and needs more than a known program, teaches nothing.
        return needed <= max(_HOPELESS, best / self.budget)

    def _may_need(self, proposal: Proposal) -> float:
        """Bytes over the budget, corrected or not: what was learned may be wrong."""
        predicted = proposal.space.memory.predicted(proposal.decisions)
        return min(predicted, proposal.bytes) / self.budget

    def _opened(self) -> list[Space]:
        """The next variant that there is, opened; one name is one program."""
        while self.unopened and not self._stays_intact:
            variant = self.unopened.pop(0)
            space = variant(self.rolled, self.budget)
            if space is None and variant is finer:  # of what needs the least, then
                needed = lambda space: self.propose.least(space).bytes
                spaces = [s for s in self.spaces if s.survey.bodies]
                space = finer(min(spaces, key=needed), self.budget) if spaces else None
            if space is not None and all(s.name != space.name for s in self.spaces):
                self.spaces.append(space)
                return [space]
        return []

    def _tried(self, proposal: Proposal) -> bool:
        """Whether decisions were compiled with just these options."""
        return any(proposal.is_same(a) for a in (*self._planned, *self.left_out))

    # --- compiling --------------------------------------------------------------------

    def _compile(self, proposal: Proposal) -> None:
        """Compiles a proposal and learns from it; what is refused stays, from then on.

        **Raises:** the compiler's refusal if there is nothing that could stay.
        """
        space, decisions = proposal.space, proposal.decisions
        for known in self.known:
            if proposal.is_same(known) and known.space.survey is space.survey:
                self.taken.append(dataclasses.replace(known, space=space))
                self._learn(self.taken[-1])
                return
        number = len(self.log) + 1
        most = f" (at most {self.asked.compiles})" if self.asked.compiles else ""
        if proposal.what:
            self.asked.say(proposal.what)
        self.asked.say(f"compiling plan {number}{most}")
        self.calls += 1
        try:
            measured = compile_and_read(
                space.survey,
                f"plan {number}",
                space.survey.step_plan(decisions),
                proposal.options,
                cache=self.asked.cache,
                correction=space.memory.excess(decisions),
                donate=space.may_donate,
            )
            space.check_places(measured, self.budget)
        except (CompileError, OffloadVanishedError) as error:
            self._refused(proposal, error)
            return
        self.asked.say(outcome(measured, self.budget, self.asked.host_budget))
        attempt = Attempt(
            space=space,
            decisions=decisions,
            solution=proposal.solution,
            options=proposal.options,
            donated=space.may_donate,
            measured=measured,
        )
        self.log.append(attempt)
        self._learn(attempt)

    def _learn(self, attempt: Attempt) -> None:
        """Takes note of what a program needs and waits for."""
        space, decisions, measured = attempt.space, attempt.decisions, attempt.measured
        assert decisions is not None
        space.memory.learn(decisions, measured.compiled_bytes, measured.host_bytes)
        if measured.inspection is not None:
            expected = evaluate(space.without_stalls(self.budget), decisions)
            found = stalls_of(space.survey, decisions, expected, measured.inspection)
            space.stalls.update(found)

    def _refused(self, proposal: Proposal, error: StowaxError) -> None:
        """Leaves a proposal out; where nothing fits yet, what it names stays.

        **Raises:** `error` where there is nothing more that could stay, nor any
        program.
        """
        line = str(error).splitlines()[0][:300]
        if any(map(self.fits, self.log)):
            self.asked.say(f"a change of the plan is left out: {line}")
            self.left_out.append(proposal)
            return
        space = narrower(proposal.space, error)
        if space is None:
            self.spaces = [s for s in self.spaces if s is not proposal.space]
            if not self.spaces and not self.log:
                raise error
            self.asked.say(f"a way to plan is left out: {line}")
            return
        self.asked.say(f"planning anew: {space.survey.refused[-1]}")
        self.spaces = [space if s is proposal.space else s for s in self.spaces]
        self.rolled = space if proposal.space is self.rolled else self.rolled

    def _try_plain(self) -> None:
        """Compiles the step where it may fit: as it is, then with its state donated."""
        donates, written = self.asked.donates, self.asked.written
        for donate in (True,) if donates else (False, True):
            if donate and not donates and not self.rolled.may_donate:
                continue
            may_fit = donate in written and self.fits(written[donate])
            if donate not in written:
                may_fit = plain_bytes(self.rolled, donate=donate) <= self.budget
            if may_fit and self.fits(self.compile_plain(donate=donate)):
                return

    def _count_written(self) -> None:
        """Counts the step as it is: it may need the least, whatever was predicted."""
        known = [a.donated for a in self.log if a.decisions is None]
        for donate in self.asked.written.keys() - known:
            if self.rolled.may_donate or not donate:
                self.compile_plain(donate=donate)
        allowed = self.calls < (self.asked.compiles or math.inf)
        may_fit = self.asked.given_bytes <= self.budget and not self.asked.first
        if allowed and may_fit and not known and not self.asked.written:
            with contextlib.suppress(CompileError):
                self.compile_plain(donate=self.rolled.may_donate)

    def compile_plain(self, *, donate: bool) -> Attempt:
        """The step as it is, compiled, or as it was for another search."""
        self.calls += donate not in self.asked.written
        attempt = plain(self.rolled, self.budget, donate=donate)
        self.log.append(attempt)
        return attempt


def _seconds(proposal: Proposal) -> float:
    """What to compare proposals by: layers that are left alone are to be beaten."""
    return proposal.seconds * (1 - CLEARLY * proposal.left_alone)
