"""A plan in effect: the record as what a step does."""

import textwrap
from collections.abc import Callable
from typing import Any

import jax

from .._errors import PlanMismatchError
from .._records._plan import PlanRecord, stored_by
from .._state._stream import hosted_of
from .._step._recording import Recording
from .._survey._apply import StackPlan, StepPlan, apply_decisions, attach_options
from .._target._target import is_here, platform_of
from .._units import format_bytes, format_room

_MOST_IN_THE_WAY = 3
_FOR_A_CPU = (
    " This is for the CPU that is here, which has no other memory. Another machine, "
    "such as target='h200', may have a plan that this one has not."
)
_WHY = (
    "what is differentiated runs",
    "the loop at ",
    "a gradient is taken inside",
    "layers inside of jax.shard_map",
    "no layers repeat",
)
"""Notes that begin so say why little of a step can be planned."""


def put_into_effect(
    plan: PlanRecord,
    step: Callable[..., Any] | Recording,
    within: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    *,
    there: bool = False,
) -> Any:
    """`jax.jit(step)` under the plan, for a step that takes and returns arrays.

    A plan that was made for a machine that was not there is in full effect on that
    machine, and where it is lowered `there`; it may be called on another one to check
    its numbers. What `jax.jit` traces is `within` of what would be.

    **Raises:** `PlanMismatchError` for a plan made on another kind of attached device.
    """
    program = plan.program
    attached = jax.devices()[0].device_kind
    elsewhere = program.compile_only and not there and not is_here(program.target)
    if not program.compile_only and attached != program.device_kind:
        raise PlanMismatchError(
            f"plan: made for {program.target} ({program.device_kind}), and JAX runs on "
            f"{attached} here. Make a plan on this machine."
        )
    stacks = {
        stack.name: StackPlan(
            fingerprint=stack.fingerprint,
            stored=stored_by(plan.decisions, stack.name),
            outline=stack.outline,
        )
        for stack in program.stacks
        if program.rewritten
    }
    platform = platform_of(program.target)
    hosted = hosted_of(
        program.arguments, program.streaming, platform, program.device_kind
    )
    jitted = apply_decisions(
        step,
        StepPlan(stacks=stacks, hosted=hosted) if stacks or hosted else None,
        program.options,
        donate=program.donate_argnums,
        compiler_options=None if elsewhere else program.compiler_options,
        arguments=program.arguments,
        within=within,
    )
    # For `stowax.inspect`, which tells what of this is in the compiled program.
    jitted.stowax_plan = plan
    return attach_options(jitted, program.compiler_options) if elsewhere else jitted


def why_it_does_not_fit(plan: PlanRecord) -> str:
    """In short lines: what it takes, which budget works, what is in the way."""
    proof = plan.proof
    device, host = format_bytes(proof.device_bytes), format_bytes(proof.host_bytes)
    limit = format_bytes(proof.budget_bytes)
    host_limit = format_bytes(proof.host_budget_bytes)
    if device == limit:  # to the three digits that are written
        device, limit = f"{proof.device_bytes} B", f"{proof.budget_bytes} B"
    takes = f"Its program takes {device} of the device and {host} of the host."
    kept = proof.host_reserve_bytes
    if kept:
        host_limit += f" of the host beside the {format_bytes(kept)} of host_reserve"
    else:
        host_limit += " of the host"
    if proof.host_bytes > proof.host_budget_bytes:
        smaller = " or a smaller host_reserve" if kept else ""
        return (
            f"plan: it does not fit {host_limit}.\n{takes}\n"
            f"Give a larger host_budget{smaller}, or pin less to 'offload'."
        )
    beside = f" and {host_limit}" if kept else ""
    lines = [f"plan: it does not fit {limit} of the device{beside}.", takes]
    size = format_room(plan.smallest_budget)
    if plan.search.smallest_budget_is == "predicted":
        lines.append(f"The smallest budget is about {size}, as predicted.")
    else:
        lines.append(f"The smallest budget known to work is {size}.")
    left = [note for note in proof.notes if note.startswith(_WHY)]
    if way := [*left, *proof.in_the_way][:_MOST_IN_THE_WAY]:
        lines += ["In the way:", *map(_indented, way)]
    wishes = "fewer pins and forbids, " if plan.pins or plan.search.forbid else ""
    instead = (
        f"Give a larger budget, {wishes}a smaller batch (stowax.fit finds the "
        "largest), or more devices."
    )
    if plan.program.target == "cpu":
        instead += _FOR_A_CPU
    return "\n".join([*lines, *textwrap.wrap(instead, 88)])


def _indented(text: str) -> str:
    return textwrap.fill(text, 88, initial_indent="  ", subsequent_indent="    ")
