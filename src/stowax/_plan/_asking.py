"""What a plan is asked for: arguments checked, the step traced, nothing decided yet.

No search is loaded for it: a step whose plan is kept goes on from here.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax

from .. import _jax
from .._calling._known import function_of
from .._errors import ArgumentError, NothingToPlanError
from .._step._recording import Recording
from .._step._trace import record_for
from .._survey._asked import Asked
from .._survey._preferences import Preferences
from .._target._foreign import stood_in, target_for
from .._target._machine import Target
from .._target._program_cache import cache_in
from .._target._specs import put_in_device_memory, spread_specs
from . import _asked


def asked_for(
    step: Callable[..., Any],
    args: Sequence[Any],
    donated: Collection[int] | None,
    *,
    budgets: Any,
    target: str | Target | None,
    host_budget: Any,
    host_reserve: Any,
    pin: Any,
    forbid: Any,
    keep_checkpoint: bool,
    roll: bool,
    donate: Any,
    compiler_options: Any,
    compiles: Any,
    cache: Any,
    progress: _asked.Progress,
) -> Asked:
    """What `plans` is asked for a step of arrays: checked, and the step traced.

    **Arguments:** `donated` are the positions that the step's own `jit` donates.
    """
    started = time.perf_counter()
    _asked.check_kinds(pin, forbid, donate, compiler_options, progress)
    Preferences(pin=pin or {}, forbid=forbid)  # raises before any work is done
    _asked.check_compiles(compiles)
    machine = target_for(target, args)
    limits = _asked.device_budgets(budgets, machine)
    memory, reserve = _asked.host_budget(host_budget, host_reserve, machine)
    programs = cache_in(cache)
    say = _asked.sayer(progress, started)
    say(f"tracing {getattr(function_of(step), '__name__', 'the step')}")
    machine, specs, recording = traced(step, args, machine, donated)
    return Asked(
        step=step,
        specs=specs,
        recording=recording,
        budgets=limits,
        started=started,
        machine=machine,
        host_budget=memory,
        host_reserve=reserve,
        pin=pin or {},
        forbid=forbid,
        keep_checkpoint=keep_checkpoint,
        roll=roll,
        donate=donate,
        compiler_options=dict(compiler_options or {}),
        compiles=compiles,
        cache=programs,
        say=say,
    )


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
