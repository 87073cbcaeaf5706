"""From what was asked to what was found: trace, survey, search, budget after budget.

Every program is a fact, whichever budget it was compiled for: it may fit another, and
be faster there. So each budget is searched with the programs of all smaller ones known,
and then takes the fastest of all that fit it: more memory never makes a plan slower.
What copies were waited for under one budget is not believed under another.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
from .._records._stages import least_bytes
from .._search._loop import Search
from .._search._space import Attempt, plain, rolled_space, unsurveyed_space
from .._state._shards import device_bytes
from .._step._recording import Recording
from .._step._trace import reading_less, record_for
from .._survey._asked import Asked
from .._survey._programs import Programs
from .._target._foreign import stood_in
from .._target._machine import Target
from .._target._specs import put_in_device_memory, spread_specs
from .._units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found for one budget, and the seconds that it took."""

    search: Search
    best: Attempt
    seconds: float


def traced(
    step: Callable[..., Any],
    args: Sequence[Any],
    machine: Target,
    donated: Collection[int] | None,
) -> tuple[Target, tuple[Any, ...], Recording]:
    """The target, `args` on it, and the step's one trace.

    Meshes that the step itself names decide where what is put nowhere lies, and stand
    in for the target's where they are this machine's. All of `args` is on the device
    there: a plan may be asked for with what another one placed. An error names the
    argument as `plan` knows it.

    **Arguments:** `donated` are the positions that the step's own `jit` donates.
    """
    try:
        _check_nodes(args)
        specs = put_in_device_memory(machine.specs(*args))
    except ArgumentError as error:
        name = error.argument.replace("specs[", "args[", 1)
        raise ArgumentError(name, error.got, error.instead) from None
    recording = record_for(step, specs)
    if meshes := _meshes(recording):
        machine = stood_in(machine, args, meshes)
        specs = put_in_device_memory(
            spread_specs(machine.devices, tuple(args), machine.name)
        )
    return machine, specs, dataclasses.replace(recording, donated=donated)


def _meshes(recording: Recording) -> list[jax.sharding.Mesh]:
    """Those of several devices that the step itself names, in a constraint, say."""
    parts = [recording.jaxpr, *(call.jaxpr for call in recording.calls)]
    named = [mesh for part in parts for mesh in _meshes_in(_jax.open_jaxpr(part))]
    return [*dict.fromkeys(mesh for mesh in named if mesh.size > 1)]


def _meshes_in(jaxpr: Any) -> Iterator[jax.sharding.Mesh]:
    for equation in jaxpr.eqns:
        for thing in jax.tree.leaves([*equation.params.values()]):
            mesh = getattr(thing, "mesh", thing)
            if isinstance(mesh, jax.sharding.Mesh):
                yield mesh
        for inner in _jax.jaxprs_in(equation.params):
            yield from _meshes_in(inner)


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


def find(asked: Asked) -> list[Found]:
    """What is best for each budget, in their order.

    What cannot be planned runs as it is written: first without what repeats in marked
    functions, then without anything. The plan's notes say why.
    """
    while True:
        try:
            budgets = _in_bytes(asked)
            found = _find(asked, sorted(set(budgets)))
            by_budget = {one.search.budget: one for one in found}
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
            asked = dataclasses.replace(
                asked, recording=less, written={}, programs=Programs()
            )


def _in_bytes(asked: Asked) -> list[int]:
    """Each budget in bytes. For shares the step is compiled as it is: what it takes.

    More than the machine has is what it has.
    """
    if not any(isinstance(budget, float) for budget in asked.budgets):
        return [int(budget) for budget in asked.budgets]
    most = asked.machine.device_bytes
    space = unsurveyed_space(asked, most)
    written = plain(space, None, donate=space.may_donate)
    taken = written.measured.compiled_bytes

    def in_bytes(budget: int | float) -> int:
        if not isinstance(budget, float):
            return budget
        share = min(most, max(1, int(budget * taken)))
        what = f"{100 * budget:.4g}% of {format_bytes(taken)}"
        capped = ", all that a device has" if share == most else ""
        asked.say(f"a budget of {what} is {format_bytes(share)}{capped}")
        return share

    return [in_bytes(budget) for budget in asked.budgets]


def _is_the_users(error: Exception) -> bool:
    """Whether an error is about what the user gave, not about a program of ours."""
    ours = CompileError, OffloadVanishedError, PlanMismatchError
    return isinstance(error, StowaxError) and not isinstance(error, ours)


def _find(asked: Asked, budgets: Sequence[int]) -> list[Found]:
    """What is best for each budget, the smallest first."""
    made: list[Found] = []
    started = asked.started
    for budget in budgets:
        if len(budgets) > 1:
            asked.say(f"a plan for {format_bytes(budget)}")
        search = search_for(asked, budget, made[-1].search if made else None)
        best = search.run()
        seconds = time.perf_counter() - started
        started += seconds
        made.append(Found(search=search, best=best, seconds=seconds))
    programs = [a for one in made for a in one.search.log]
    for number, one in enumerate(made):
        one.search.known = [a for a in programs if a not in one.search.log]
        best = one.search.best()
        if best not in one.search.log:
            space = best.space.for_budget(one.search.budget)
            best = dataclasses.replace(best, space=space)
        made[number] = dataclasses.replace(one, best=best)
    return made


def search_for(asked: Asked, budget: int, before: Search | None = None) -> Search:
    """A search for a budget; of what another one knows it has the programs."""
    state = sum(device_bytes(spec) for spec in jax.tree.leaves(asked.specs))
    least = least_bytes(budget, state)
    known = [] if before is None else before.attempts
    if before is None or before.rolled.survey.least_bytes != least:
        rolled = rolled_space(asked, budget, least)
    else:
        rolled = before.rolled.for_budget(budget)
    return Search(asked=asked, budget=budget, rolled=rolled, known=known)
