"""Every planned copy is in the compiled program, and goes where the plan says.

The compiler may join copies, rename them, or leave them out; then the plan saves
nothing, or computes with what nobody wrote. So each one is looked for, on every plan.
"""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._errors import CompileError, OffloadVanishedError
from .._hlo._host_calls import updated_leaves
from .._hlo._program import transfers_named
from .._layers._host_feed import GRADIENTS, WEIGHTS
from .._layers._stack import Stack
from .._mlir import read_graph
from .._predict._fusion import PLACEMENT, short_name
from .._records._lowered import Region
from .._records._program import Program
from .._state._shards import device_bytes
from .._survey._apply import StepPlan
from .._survey._survey import Survey

_ENOUGH = 0.9
"""Part of the planned bytes that has to move where a scope is not to be found."""

_OWN = "stowax."
_STREAM = re.compile(r"stowax\.(?:weights|gradients)\.([^/()]+)\.(\d+)")
_STREAMS = {WEIGHTS: "host-to-device", GRADIENTS: "device-to-host"}


def check_copies(
    survey: Survey, plan: StepPlan, lowered: Any, program: Program, inspection: Any
) -> None:
    """Looks for all that `plan` moves in the program that was compiled for it.

    **Raises:** `CompileError` where results go over arguments in another memory;
    `OffloadVanishedError` where what was planned is not there: a copy, or an update on
    the host's processor.
    """
    if program.crossing:
        raise CompileError(
            f"The compiler for {survey.target.name} was told to write results on the "
            "device over arguments in host memory, or the other way round: "
            f"{len(program.crossing)}"
        )
    lost = _vanished(survey, inspection, plan)
    away: list[str] = []
    if plan.hosted:
        lost |= _not_streamed(survey, inspection, lowered)
        absent = {*plan.hosted.on_host} - updated_leaves(program)
        away = [survey.step.arguments[i].path for i in sorted(absent)]
    if lost:
        raise OffloadVanishedError(
            "The compiled program does not copy these values to the host, or not back "
            "to where they are read, although the plan offloads them: "
            f"{', '.join(lost.values())}. Pin them to 'keep' or "
            "'recompute', and please report it with the step: it is stowax's fault.",
            tuple(lost),
        )
    if away:
        raise OffloadVanishedError(
            "The compiled program does not update these arrays on the host's "
            f"processor, although the plan says so: {', '.join(away)}. "
            "Give forbid=['host update'], and please report it with the step: it is "
            "stowax's fault."
        )


def check_no_worse(planned: Sequence[str], written: Sequence[str]) -> None:
    """Compares the slices that come to other places in two programs of a step.

    **Arguments:** the scopes of those of a plan's program, and of the step's as it is.
    What a compiler's passes make has none, and may be of the plan's loops. What has a
    scope of the plan's own is not in the step as it is.

    **Raises:** `CompileError` where the plan's program has more.
    """
    more = collections.Counter(planned) - collections.Counter(written)
    if more:
        named = [name or "some without a name" for name in more]
        raise CompileError(
            "The compiler copies slices from or to other places than the program says, "
            f"and does not where the step is as it is: {', '.join(named[:3])}"
        )


def _vanished(survey: Survey, inspection: Any, plan: StepPlan) -> dict[str, str]:
    """Planned copies that the compiled program does not hold: scope, value name.

    XLA may join copies or rename them, so a value counts as lost only if its own scope
    is nowhere and the bytes that do move fall short as well.
    """
    bodies = {body.name: body for body in survey.bodies}
    specs = jax.tree.leaves(survey.specs)
    planned, lost = 0, {}
    for name, stack in plan.stacks.items():
        body = bodies[name]
        for number, how in stack.stored.items():
            if not how.startswith("offload"):
                continue
            value = body.values[number]
            planned += body.count * value.bytes
            scope = f"stowax.offload.{name}.{number}"
            if not transfers_named(inspection, scope):
                lost[scope] = f"{value.name} ({value.source})"
    hosted = plan.hosted.shards if plan.hosted else {}
    # What the host updates does not cross the link at the update: see `check_copies`.
    on_host = plan.hosted.on_host if plan.hosted else ()
    written = _written(survey).difference(on_host)
    for i in hosted:
        planned += device_bytes(specs[i]) if i in written else 0
        scope = f"stowax.state.{i}"
        if i in written and not transfers_named(inspection, scope):
            lost[scope] = survey.step.arguments[i].path
    moved = sum(
        t.bytes * t.trips
        for t in inspection.transfers
        if t.direction == "device-to-host" and GRADIENTS not in t.op_name
    )
    return lost if moved < _ENOUGH * planned else {}


def _written(survey: Survey) -> set[int]:
    """Flat positions of state that the update brings back to the host."""
    if survey.state is None:
        return set()
    values = zip(survey.state.body.values, survey.state.leaves, strict=True)
    return {i for value, own in values if value.update_out for i in own}


def _not_streamed(survey: Survey, inspection: Any, lowered: Any) -> dict[str, str]:
    """Weights that loops were to fetch, gradients that they were to write, and do not.

    By scope, as `_vanished` has them.

    What was planned is read off the lowered program. The compiler drops the names of
    copies in branches, so there may be copies without one in the place of a missing
    scope; others stand for their own scope, up to the bytes that it moves.
    """
    graph = read_graph(lowered.compiler_ir())
    planned: dict[str, float] = {}
    for function in graph.functions.values():
        for scope, moved in _streams(function, survey):
            planned[scope] = planned.get(scope, 0.0) + moved
    lost = {}
    for prefix, direction in _STREAMS.items():
        mine = {s: n for s, n in planned.items() if s.startswith(prefix)}
        copies = [t for t in inspection.transfers if t.direction == direction]
        spare = sum(t.bytes * t.trips for t in copies if _OWN not in t.op_name)
        gone = []
        for scope, expected in mine.items():
            found = [t for t in transfers_named(inspection, scope) if t in copies]
            spare += max(0.0, sum(t.bytes * t.trips for t in found) - expected)
            gone += [] if found else [scope]
        if spare < _ENOUGH * sum(mine[scope] for scope in gone):
            lost.update((scope, _stream_name(survey, scope)) for scope in gone)
    return lost


def _streams(
    region: Region, survey: Survey, share: float = 1.0, looped: bool = False
) -> Iterator[tuple[str, float]]:
    """Scopes of what loops fetch and write, with the bytes that pass in one step."""
    for operation in region.operations:
        branches = len(operation.regions) if short_name(operation.name) == "case" else 1
        inside = looped or short_name(operation.name) == "while"
        for inner in operation.regions:
            yield from _streams(inner, survey, share / branches, inside)
        found = _STREAM.search(operation.scope)
        if found and operation.target == PLACEMENT:
            times = _stack_named(survey, found[1]).count if looped else 1
            yield found[0], share * times * operation.results[0].device_bytes


def _stack_named(survey: Survey, name: str) -> Stack:
    """A stack whose loops are in the step, be they differentiated or not."""
    emissions = survey.step.boundary.values()
    return next(e.stack for e in emissions if e.stack.name == name)


def _stream_name(survey: Survey, scope: str) -> str:
    found = _STREAM.fullmatch(scope)
    assert found is not None
    stack, number = _stack_named(survey, found[1]), int(found[2])
    body = next((body for body in survey.bodies if body.name == found[1]), None)
    values = body.values if body else ()
    at = stack.first_layer_input + number
    name = values[at].name if values else f"weight {at}"
    name = f"{name} of the layers at {stack.source}"
    return f"gradients of {name}" if scope.startswith(GRADIENTS) else name
