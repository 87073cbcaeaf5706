"""From what was asked to what was found: trace, survey, search, budget after budget.

Trace the step (`_trace`), survey it on the target (`_survey`), search in all its forms
(`_forms`), and change what was found (`_improve`). That for every budget; the fastest
program that fits is the plan, whichever it was made for (`_budgets`). On a TPU that one
is compiled once more (`_finish`).
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._errors import (
    ArgumentError,
    CompileError,
    NothingToPlanError,
    OffloadVanishedError,
    PlanMismatchError,
    StowaxError,
)
from .._layers._rewrite import Options
from .._records._stages import least_bytes
from .._search._as_written import (
    AsWritten,
    Returned,
    asks_for_more,
    narrowed,
    without_donation,
)
from .._search._attempt import Attempt
from .._search._budgets import best_known, unknowing
from .._search._finish import finished
from .._search._forms import Found, find_plan
from .._search._improve import improve
from .._search._loop import MOST_COMPILES, Search
from .._search._plain import bytes_as_written
from .._search._refusals import narrower
from .._search._trial import check_offloads
from .._state._shards import device_bytes
from .._step._recording import Recording
from .._step._trace import reading_less, record_for, trace_step
from .._survey._options import more_fast_memory, wants_row_major
from .._survey._preferences import Preferences
from .._survey._survey import take_survey
from .._target._machine import Target
from .._target._program_cache import ProgramCache
from .._target._specs import put_in_device_memory
from .._units import format_bytes
from .._update._blocks import BlockSize

_FINER = 16
"""Where nothing fits, arrays so many times smaller may be offloaded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `plan` was asked, checked, and the step's one trace; `say` shows progress.

    `budgets` are bytes, or shares of what the step takes as it is written. `specs` are
    the step's arguments on the target, `recording` is made of them. `started` is when
    planning began, by `time.perf_counter`.
    """

    step: Callable[..., Any]
    specs: tuple[Any, ...]
    recording: Recording
    budgets: Sequence[int | float]
    started: float
    machine: Target
    host_budget: int
    pin: Mapping[str, str]
    forbid: Collection[str]
    keep_checkpoint: bool
    roll: bool
    donate: bool | None
    compiler_options: Mapping[str, str | bool]
    compiles: int | None
    cache: ProgramCache
    say: Callable[[str], None]
    written: dict[bool, Attempt] = dataclasses.field(default_factory=dict)
    """The step as it is, compiled for an earlier search (`Search.written`)."""

    @property
    def finishes(self) -> bool:
        """Whether the last program is the best one with other compiler options."""
        change = more_fast_memory(self.machine)
        wanted = self.compiles is None and not change.keys() & self.compiler_options
        return wanted and bool(change)

    def has_one_more(self, found: Found) -> bool:
        """Whether a program that surprised nobody leaves time for another one.

        Where the last one takes twice the usual time, only if it was the first.
        """
        return not self.finishes or len(found.search.log) == 1

    @property
    def most(self) -> int:
        """How many programs may be compiled for the changes that are tried."""
        usual = MOST_COMPILES - 1 if self.finishes else MOST_COMPILES
        return usual if self.compiles is None else self.compiles

    @property
    def wishes(self) -> dict[str, Any]:
        """What other forms of the step are told, too."""
        return {"pin": self.pin, "forbid": self.forbid}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundFor:
    """What was found for one budget, the wishes that it kept, and what it took."""

    found: Found
    preferences: Preferences
    seconds: float


def traced(
    step: Callable[..., Any],
    args: Sequence[Any],
    machine: Target,
    donated: Collection[int] | None,
) -> tuple[tuple[Any, ...], Recording]:
    """`args` on the target, and the step's one trace.

    All of them are on the device there: a plan may be asked for with what another one
    placed. An error names the argument as `plan` knows it.

    **Arguments:** `donated` are the positions that the step's own `jit` donates.
    """
    try:
        _check_nodes(args)
        specs = put_in_device_memory(machine.specs(*args))
    except ArgumentError as error:
        name = error.argument.replace("specs[", "args[", 1)
        raise ArgumentError(name, error.got, error.instead) from None
    return specs, dataclasses.replace(record_for(step, specs), donated=donated)


def _check_nodes(args: Sequence[Any]) -> None:
    """**Raises:** `NothingToPlanError` for pytree nodes that take arrays only."""
    for number, arg in enumerate(args):
        leaves, structure = jax.tree.flatten(arg)
        specs = [
            jax.ShapeDtypeStruct(leaf.shape, _jax.dtype_in_jit(leaf.dtype))
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            else leaf
            for leaf in leaves
        ]
        try:
            jax.tree.unflatten(structure, specs)
        except Exception as error:
            line = (str(error).strip().splitlines() or ["no message"])[0][:200]
            raise NothingToPlanError(
                f"step: args[{number}] has a pytree node that cannot be made of shapes "
                f"({type(error).__name__}: {line}), and a plan is made of them. Let "
                "tree_unflatten take whatever it is given: no conversion, no check "
                "(for a dataclass, none in __post_init__)."
            ) from error


def find(asked: Asked) -> list[FoundFor]:
    """What is best for each budget, in their order.

    What cannot be planned runs as it is written: first without what repeats in marked
    functions, then without anything. The plan's notes say why.
    """
    while True:
        try:
            budgets = _in_bytes(asked)
            found = _find(asked, sorted(set(budgets)))
            by_budget = {one.found.search.budget: one for one in found}
            return [by_budget[budget] for budget in budgets]
        except Exception as error:
            less = (
                None
                if _is_the_users(error)
                else reading_less(asked.step, asked.specs, asked.recording, error)
            )
            if less is None:
                raise
            asked.say(f"planning less: {less.left[-1]}")
            asked = dataclasses.replace(asked, recording=less, written={})


def _in_bytes(asked: Asked) -> list[int]:
    """Each budget in bytes. For shares the step is compiled as it is: what it takes.

    More than the machine has is what it has.
    """
    if not any(isinstance(budget, float) for budget in asked.budgets):
        return [int(budget) for budget in asked.budgets]
    most = asked.machine.device_bytes
    free = dataclasses.replace(asked, pin={}, forbid=())
    search, _ = _surveyed(free, most, least_bytes(most, _state_bytes(asked)))
    taken = bytes_as_written(search)
    return [
        min(most, max(1, int(budget * taken)))
        if isinstance(budget, float)
        else int(budget)
        for budget in asked.budgets
    ]


def _state_bytes(asked: Asked) -> int:
    return sum(device_bytes(spec) for spec in jax.tree.leaves(asked.specs))


def _is_the_users(error: Exception) -> bool:
    """Whether an error is about what the user gave, not about a program of ours."""
    ours = CompileError, OffloadVanishedError, PlanMismatchError
    return isinstance(error, StowaxError) and not isinstance(error, ours)


def _find(asked: Asked, budgets: Sequence[int]) -> list[FoundFor]:
    """What is best for each budget, the smallest first."""
    made: list[FoundFor] = []
    search: Search | None = None
    started = asked.started
    for budget in budgets:
        if len(budgets) > 1:
            asked.say(f"a plan for {format_bytes(budget)}")
        least = least_bytes(budget, _state_bytes(asked))
        if search is None or least != search.survey.least_bytes:
            search, preferences = _surveyed(asked, budget, least)
        else:
            search = unknowing(search, budget)
        found = _searched(asked, search)
        if (finer := _finer(asked, found)) is not None:
            found, preferences = finer
        seconds = time.perf_counter() - started
        started += seconds
        made.append(FoundFor(found=found, preferences=preferences, seconds=seconds))
    for number, one in enumerate(made):
        made[number] = _changed_further(asked, one, made)
    if asked.finishes:
        made = _finished([_with_the_best(one, made) for one in made])
    return [_with_the_best(one, made) for one in made]


def _finer(asked: Asked, found: Found) -> tuple[Found, Preferences] | None:
    """What is found where nothing fits, and small arrays may be offloaded, too.

    Their copies take longer than their bytes say; but where it is that or nothing, the
    budget comes first. `None` where something fits, or they could not make it fit.
    """
    search = found.search
    if search.fits(found.best) or asked.donate is False:
        return None
    small = BlockSize.least(search.survey.least_bytes).leaf_bytes
    sizes = [device_bytes(spec) for spec in jax.tree.leaves(asked.specs)]
    # One of them may have a gradient that waits for it, of its size.
    freed = 2 * sum(size for size in sizes if size < small)
    needed, _ = found.smallest_budget()
    least = search.survey.least_bytes // _FINER
    if not least or needed - freed > search.budget:
        return None
    asked.say("nothing fits: smaller arrays may be offloaded, too")
    try:
        again, preferences = _surveyed(asked, search.budget, least)
        finer = _searched(asked, again)
    except (CompileError, OffloadVanishedError) as error:
        asked.say(f"smaller arrays stay: {str(error).splitlines()[0]}")
        return None
    better = finer.smallest_budget() < found.smallest_budget()
    return (finer, preferences) if better else None


def _finished(made: Sequence[FoundFor]) -> list[FoundFor]:
    """Each plan finished; a program that several budgets have in common only once."""
    done, seen = list(made), set[int]()
    for number, one in enumerate(made):
        program = id(one.found.best.measured)
        if program in seen:
            continue
        seen.add(program)
        started = time.perf_counter()
        found = finished(one.found)
        seconds = one.seconds + time.perf_counter() - started
        done[number] = dataclasses.replace(one, found=found, seconds=seconds)
    return done


def _with_the_best(one: FoundFor, made: Sequence[FoundFor]) -> FoundFor:
    """The same, unless a program for another budget serves this one better."""
    others = [other.found for other in made if other is not one]
    return dataclasses.replace(one, found=best_known(one.found, others))


def _changed_further(asked: Asked, one: FoundFor, made: Sequence[FoundFor]) -> FoundFor:
    """What another budget's program serves better, changed by the compiles left.

    Made for less memory, it leaves room: what it moves may stay.
    """
    taken = _with_the_best(one, made)
    if taken.found is one.found:
        return one
    started = time.perf_counter()
    one_more = asked.has_one_more(taken.found)
    found = improve(taken.found, asked.most, taken=True, one_more=one_more)
    seconds = one.seconds + time.perf_counter() - started
    return dataclasses.replace(one, found=found, seconds=seconds)


def _surveyed(asked: Asked, budget: int, least: int) -> tuple[Search, Preferences]:
    """A search that knows nothing yet, and what the user wants."""
    machine, specs, recording = asked.machine, asked.specs, asked.recording
    preferences = Preferences(**asked.wishes, least_bytes=least)
    options = Options(
        keep_checkpoint=asked.keep_checkpoint,
        roll=asked.roll,
        row_major=wants_row_major(machine, specs),
    )
    step = trace_step(recording, specs, options)
    count = len(step.stacks)
    bodies = "1 repeated body" if count == 1 else f"{count} repeated bodies"
    asked.say(f"surveying {bodies} on {machine.name}")
    free = take_survey(asked.step, specs, step, machine, options, least)
    if asked.donate is False:
        free = without_donation(free)
    survey = narrowed(free, preferences)
    for staying in free.staying:
        preferences.allow(staying.value)
    _check_matched(preferences, recording.left)
    search = Search(
        survey=survey,
        free=free,
        budget=budget,
        host_budget=asked.host_budget,
        user_options=asked.compiler_options,
        # What the step's own `jit` donates is donated where it stays as it is, too.
        donate=True if asked.donate is None and recording.donated else asked.donate,
        as_written=not asks_for_more(free, survey, lambda value: True),
        written=asked.written,
        cache=asked.cache,
        say=asked.say,
    )
    return search, preferences


def _check_matched(preferences: Preferences, left: Collection[str]) -> None:
    """**Raises:** `ArgumentError` for a pattern that met nothing; says what is left."""
    try:
        preferences.check_matched()
    except ArgumentError as error:
        if not left:
            raise
        why = f"{error.got} (what is marked runs as it is written: {'; '.join(left)})"
        raise ArgumentError(error.argument, why, error.instead) from None


def _searched(asked: Asked, search: Search) -> Found:
    """The best that was found in any form.

    **Raises:** `CompileError`, `OffloadVanishedError` where nothing compiles.
    """
    most, wishes = asked.most, asked.wishes
    forms = AsWritten(rolled=search, **wishes), Returned(rolled=search, **wishes)
    try:
        found = find_plan(search, *forms)
        check_offloads(found.best.measured)
    except (CompileError, OffloadVanishedError) as error:
        return _narrower(search, error)
    try:
        better = improve(found, most, one_more=asked.has_one_more(found))
        check_offloads(better.best.measured)
        return better
    except (CompileError, OffloadVanishedError) as error:
        search.say(f"a change of the plan is left out: {str(error).splitlines()[0]}")
        return found


def _narrower(search: Search, error: StowaxError) -> Found:
    """What is found where less may be offloaded, after the compiler refused."""
    for other in narrower(search, error):
        search.say(f"planning anew: {other.survey.refused[-1]}")
        try:
            found = find_plan(other, lambda: None, lambda: None)
            check_offloads(found.best.measured)
            return found
        except (CompileError, OffloadVanishedError):
            continue
    raise error
