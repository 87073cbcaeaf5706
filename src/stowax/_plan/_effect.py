"""A plan in effect: the record as what a step does."""

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
    hosted = hosted_of(program.arguments, program.streaming, platform)
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
    """What the program needs, which budget works, and what is in the way."""
    proof = plan.proof
    needed, limit = format_bytes(proof.device_bytes), format_bytes(proof.budget_bytes)
    if needed == limit:  # to the three digits that are written
        needed, limit = f"{proof.device_bytes} B", f"{proof.budget_bytes} B"
    needs = (
        f"plan: it does not fit: its program needs {needed} of the device and "
        f"{format_bytes(proof.host_bytes)} of the host"
    )
    kept = proof.host_reserve_bytes
    beside = f" beside the {format_bytes(kept)} of host_reserve" if kept else ""
    if proof.host_bytes > proof.host_budget_bytes:
        smaller = " or a smaller host_reserve" if kept else ""
        return (
            f"{needs}, and may take {format_bytes(proof.host_budget_bytes)} of the "
            f"host{beside}. Give a larger host_budget{smaller}, or pin less to "
            "'offload'."
        )
    host = ""
    if kept:
        host = f" and {format_bytes(proof.host_budget_bytes)} of the host{beside}"
    smallest = format_room(plan.smallest_budget)
    if plan.search.smallest_budget_is == "predicted":
        smallest = f"about {smallest}, as predicted"
    left = [note for note in proof.notes if note.startswith("what is marked runs")]
    way = [*left, *proof.in_the_way]
    why = f" In the way: {'; '.join(way[:3])}." if way else ""
    return (
        f"{needs}, and may take {limit} of the device{host}. The "
        f"smallest budget that works is {smallest}.{why}"
    )
