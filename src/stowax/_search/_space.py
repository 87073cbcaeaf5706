"""One way to write the planned step, with what is known of it, and its programs."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._errors import ArgumentError, OffloadVanishedError, StowaxError
from .._jax import open_jaxpr
from .._jaxprs._jaxpr import is_checkpoint
from .._records._stages import (
    Body,
    Decisions,
    Problem,
    Solution,
    Value,
)
from .._state._shards import device_bytes
from .._survey._asked import Asked
from .._survey._held import holding
from .._survey._options import plan_options
from .._survey._preferences import Preferences
from .._survey._survey import Survey, predict
from .._survey._take import take_survey
from .._trial._compiled import Measured, compile_and_read, outcome
from .._trial._copies import check_no_worse
from ._correction import Memory, Stalls, stalled

_DOUBT, _DOUBT_UNROLLED = 1.08, 1.35
"""How far predictions of layers as they are written may be above the truth.

Measured on the models of the benchmarks and of the tutorial: scans by 8 %, unrolled
loops by up to 31 %. A compile that is not needed costs less than a plan that is not.
"""

_NOT_DONATED = "it is updated in its place in host memory, which donate=False forbids"

# Named scopes of copies: of state and gradients by argument, of layers' values.
_STATE = re.compile(r"stowax\.(?:state|gradient)\.(\d+)")
_LAYER = re.compile(r"stowax\.(?:offload|fetch)\.([^/()\"\s]+)\.(\d+)")


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Space:
    """One variant of the step: its survey, and what programs have taught of it.

    `name` tells programs of one variant from those of another. `free` is the survey
    before what the user wants decided (`preferences`). `stalls`
    are what offloaded values were waited for, `proposed` every solution that a
    prediction was made for, `least` the decisions made for want of any that fit,
    `refusals` how often the compiler refused.
    """

    name: str
    asked: Asked
    survey: Survey
    free: Survey
    preferences: Preferences
    memory: Memory
    stalls: Stalls = dataclasses.field(default_factory=dict)
    proposed: dict[Decisions, Solution] = dataclasses.field(default_factory=dict)
    least: set[Decisions] = dataclasses.field(default_factory=set)
    refusals: int = 0

    @property
    def may_donate(self) -> bool:
        """Whether the state's buffers are donated where that is wanted."""
        return self.survey.donates and bool(self.survey.step.donate)

    def check_places(self, measured: Measured, budget: int) -> None:
        """**Raises:** `CompileError` where a plan's copies go wrong, the step's not."""
        if measured.misplaced:
            written = plain(self, budget, donate=self.may_donate).measured
            check_no_worse(measured.misplaced, written.misplaced)

    @property
    def as_written(self) -> bool:
        """Whether the layers of a Python loop run as they are written."""
        options = self.survey.options
        return options.as_written or (self.asked.roll and not options.roll)

    @property
    def is_straight(self) -> bool:
        """Whether layers are a Python loop's: XLA orders what is in one as it likes.

        It updates a parameter as soon as its gradient is there, where the step as it is
        traced has all gradients first. A prediction knows nothing of that.
        """
        return any(t.stack.separate for t in self.survey.step.stacks.values())

    @property
    def layers(self) -> list[Body]:
        """The bodies that are no state."""
        return [body for body in self.survey.bodies if body.phase == "layers"]

    @property
    def remat(self) -> bool:
        """Whether the user has layers computed again by `jax.checkpoint`."""
        bodies = (traced.stack.body for traced in self.survey.step.stacks.values())
        equations = (e for body in bodies for e in open_jaxpr(body).eqns)
        return not self.survey.options.keep_checkpoint and any(
            map(is_checkpoint, equations)
        )

    @property
    def host_left(self) -> int:
        """The host's budget, less what programs need there beyond the model."""
        return self.asked.host_budget - self.memory.host_beyond()

    def problem(self, budget: int, survey: Survey | None = None) -> Problem:
        """The planner's question as it stands after all corrections.

        `survey` stands in for the variant's own: the same step, other wishes.
        """
        return stalled(self.without_stalls(budget, survey), self.stalls)

    def without_stalls(self, budget: int, survey: Survey | None = None) -> Problem:
        """The same without what was waited for."""
        memory = self.memory
        if survey is not None:
            memory = dataclasses.replace(memory, survey=survey)
        return memory.problem(budget, self.host_left)

    def options_for(self, decisions: Decisions) -> dict[str, str | bool | float]:
        """The compiler options that decisions are compiled with by default."""
        offloads = any("offload" in chosen for chosen in decisions)
        sparing = self.survey.tight or decisions in self.least
        options = plan_options(self.survey.target, offloads, sparing=sparing)
        return {**options, **self.asked.compiler_options}

    def intact(self, budget: int) -> "Space":
        """The same variant for a user who goes on using the arguments."""
        asked = dataclasses.replace(self.asked, donate=False)
        return new_space(self.name, asked, budget, self.free)

    def for_budget(self, budget: int) -> "Space":
        """The same variant for another budget: what was waited for may not be there."""
        return self.afresh(memory=dataclasses.replace(self.memory, scale=budget))

    def afresh(self, **changes: Any) -> "Space":
        """The variant with some fields changed, and without what was proposed for it.

        A copy made otherwise shares what is learned of either.
        """
        return dataclasses.replace(self, **changes, stalls={}, proposed={}, least=set())

    def holding(self, held: Callable[[Body, Value], bool], note: str) -> "Space":
        """The variant with some values on the device, which the compiler refused."""
        why = "the compiler refused"
        surveys = [
            dataclasses.replace(survey, bodies=holding(survey.bodies, held, why))
            for survey in (self.survey, self.free)
        ]
        survey = dataclasses.replace(surveys[0], refused=(*self.survey.refused, note))
        memory = dataclasses.replace(self.memory, survey=survey)
        return self.afresh(survey=survey, free=surveys[1], memory=memory)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attempt:
    """A program that was compiled for a plan, and what is known of it.

    `decisions` is `None` for the step as the user wrote it; `solution` has what the
    planner said of them.
    """

    space: "Space"
    decisions: Decisions | None
    solution: Solution | None
    options: Mapping[str, str | bool | float]
    donated: bool
    measured: Measured

    def fits(self, budget: int, host_budget: int) -> bool:
        """Whether the compiled program is one, and stays within both budgets."""
        return (
            self.measured.inspection is not None
            and self.measured.compiled_bytes <= budget
            and self.measured.host_bytes <= host_budget
        )


def rolled_space(asked: Asked, budget: int, least: int) -> Space:
    """The step with its layers as loops, surveyed.

    **Arguments:** arrays under `least` bytes stay on the device.
    """
    machine, options = asked.machine, asked.options
    step = asked.programs.step(asked.recording, asked.specs, options)
    count = len(step.stacks)
    bodies = "1 repeated body" if count == 1 else f"{count} repeated bodies"
    asked.say(f"surveying {bodies if count else 'the step'} on {machine.name}")
    free = take_survey(
        asked.step,
        asked.specs,
        step,
        machine,
        options,
        least,
        programs=asked.programs,
    )
    return new_space("rolled", asked, budget, free)


def unsurveyed_space(asked: Asked, budget: int) -> Space:
    """The step as it is written; nothing is known of what could be decided."""
    survey = Survey(
        function=asked.step,
        specs=asked.specs,
        step=asked.programs.step(asked.recording, asked.specs, asked.options),
        target=asked.machine,
        options=asked.options,
        programs=asked.programs,
    )
    return new_space("unsurveyed", asked, budget, survey)


def new_space(name: str, asked: Asked, budget: int, free: Survey) -> Space:
    """A variant of which nothing is known yet."""
    if asked.donate is False:
        # State in host memory is updated where it lies; what is only read is not.
        read_only = free.state.read_only if free.state else ()

        def updated(body: Body, value: Value) -> bool:
            return body.phase == "update" and value.index not in read_only

        bodies = holding(free.bodies, updated, _NOT_DONATED)
        free = dataclasses.replace(free, donates=False, bodies=bodies)
    preferences = Preferences(
        pin=asked.pin, forbid=asked.forbid, least_bytes=free.least_bytes
    )
    survey = narrowed(free, preferences)
    for staying in free.staying:
        preferences.allow(staying.value)
    return Space(
        name=name,
        asked=asked,
        survey=survey,
        free=free,
        preferences=preferences,
        memory=Memory(survey=survey, scale=budget),
    )


def unmet(space: Space) -> ArgumentError | None:
    """What is wrong with a pattern that meets nothing of a variant, if one does."""
    try:
        space.preferences.check_matched()
    except ArgumentError as error:
        left = space.asked.recording.left
        if not left and not space.survey.step.stacks:
            left = ("no layers repeat in it",)
        if not left:
            return error
        why = f"{error.got} (what is differentiated runs as written: {'; '.join(left)})"
        return ArgumentError(error.argument, why, error.instead)
    return None


def narrowed(survey: Survey, preferences: Preferences) -> Survey:
    """The survey with what the user wants decided."""
    return dataclasses.replace(survey, bodies=preferences.narrow(survey.bodies))


def asks_for_more(space: Space) -> bool:
    """Whether the user wants something moved that could stay as it is.

    The step as it is written does not do that, even where it fits.
    """
    return any(
        value.needed and "keep" in value.allowed and "keep" not in narrowed.allowed
        for body, wanted in zip(space.free.bodies, space.survey.bodies, strict=True)
        for value, narrowed in zip(body.values, wanted.values, strict=True)
        if not value.available
    )


# --- what the compiler refuses --------------------------------------------------------


def narrower(space: Space, error: StowaxError) -> Space | None:
    """A variant that offloads less, after the compiler refused; `None`: nothing left.

    A compiler may refuse a program for other reasons than memory: a layout that it has
    no copy for, a slice of a kind that it does not know. The value that its words name
    stays on the device; if they name none, or that does not help, more stays, and at
    last everything. So it goes where the compiler leaves copies out (two like passes
    that it makes one of, say). That holds for what was pinned to host memory, too.
    """
    vanished = isinstance(error, OffloadVanishedError)
    words = " ".join((str(error), *(error.scopes if vanished else ())))
    named = _named(space, words)
    ways: tuple[tuple[str, Callable[[Body, Value], bool]], ...] = (
        ("what it names", lambda body, value: (body.name, value.index) in named),
        ("parameters", lambda body, value: value.role == "parameter"),
        ("state", lambda body, value: body.phase == "update"),
        ("everything", lambda body, value: True),
    )
    why = "left copies out of" if vanished else "refused"
    line = str(error).splitlines()[0][:300]
    for level in range(space.refusals, len(ways)):
        what, held = ways[level]
        note = f"{what} may not be offloaded: the compiler {why} the program ({line})"
        other = space.holding(held, note)
        other.refusals = level + 1
        if other.survey.bodies != space.survey.bodies:
            return other
    return None


def _named(space: Space, message: str) -> set[tuple[str, int]]:
    """The values whose copies the compiler's words name."""
    found = {(m[1], int(m[2])) for m in _LAYER.finditer(message)}
    leaves = {int(m[1]) for m in _STATE.finditer(message)}
    state = space.survey.state
    if state is not None:
        found |= {
            (state.body.name, index)
            for index, own in enumerate(state.leaves)
            if not leaves.isdisjoint(own)
        }
    return found


# --- the step as it is ----------------------------------------------------------------


def plain_bytes(space: Space, *, donate: bool) -> int:
    """Device bytes that the step as it is may need at least.

    By what its other program needed, or by how far a prediction may be off.
    """
    if known := space.asked.written:
        excess = sum(a.measured.excess for a in known.values())
        return _foreseen(space, donate=donate) + excess
    needed = foreseen_bytes(space, donate=donate)
    return int(needed / (_DOUBT_UNROLLED if space.is_straight else _DOUBT))


def foreseen_bytes(space: Space, *, donate: bool) -> int:
    """Device bytes that are predicted for the step as it is; nothing is compiled."""
    needed = _foreseen(space, donate=donate)
    if donate and space.is_straight:
        return min(needed, _foreseen(space, donate=False) - _returned(space))
    return needed


def _foreseen(space: Space, *, donate: bool) -> int:
    return predict(space.survey, None, donate=donate).device_total


def plain(space: Space, budget: int | None, *, donate: bool) -> Attempt:
    """The step as it is, compiled, or as it was for another search.

    Where it is to say what a share of it is, there is no `budget` yet.
    """
    asked = space.asked
    if donate in asked.written:
        return dataclasses.replace(asked.written[donate], space=space)
    asked.say(f"compiling the step as it is{', its state donated' * donate}")
    measured = compile_and_read(
        space.survey,
        "as written",
        None,
        asked.compiler_options,
        cache=asked.cache,
        correction=sum(a.measured.excess for a in asked.written.values()),
        donate=donate,
    )
    asked.say(outcome(measured, budget, asked.host_budget))
    attempt = Attempt(
        space=space,
        decisions=None,
        solution=None,
        options=asked.compiler_options,
        donated=donate,
        measured=measured,
    )
    asked.written[donate] = attempt
    return attempt


def _returned(space: Space) -> int:
    """Bytes of the arguments that results may overwrite."""
    leaves, step = jax.tree.leaves(space.survey.specs), space.survey.step
    return sum(
        device_bytes(leaves[i])
        for i in step.updates
        if step.arguments[i].position in step.donate
    )
