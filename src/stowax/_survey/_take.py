"""A step on a target, surveyed: all that a plan decides on, with bytes and seconds.

Bytes per device of every candidate come from Shardy's own propagation over the lowered
step (each operation of a body is lowered under a named scope of its own), seconds from
the cost rules. What the step needs besides stored values comes from predicting the
memory of programs that are never compiled: the one that stores everything and, of
straight-line code, the one that stores nothing.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .. import _jax, _mlir
from .._cost._cost import cost_of_jaxpr, operation_seconds, program_seconds
from .._planner import baselines, evaluate, recomputed_values
from .._predict._virtual import virtual_scopes
from .._records._lowered import shards_by_scope
from .._records._stages import GROUPED, OFFLOAD_LEAST_BYTES, Body, Decisions, Options
from .._state._state import find_state, search_state
from .._state._stays import find_staying
from .._step._trace import Step, TracedStack, store_all
from .._target._machine import Target
from ._apply import StackPlan, StepPlan
from ._candidates import (
    BodyCosts,
    Placement,
    finest_shards,
    make_body,
    placed_values,
    virtual_values,
)
from ._held import holding, holding_if_ordered
from ._programs import Programs
from ._storing import with_storing
from ._survey import Survey, predict, read_in_backward, stored_bytes


def take_survey(
    function: Callable[..., Any],
    specs: tuple[Any, ...],
    step: Step,
    target: Target,
    options: Options,
    least_bytes: int = OFFLOAD_LEAST_BYTES,
    *,
    gradients_on_host: bool = False,
    programs: Programs | None = None,
) -> Survey:
    """Finds bytes and seconds of everything that a plan for `step` decides on.

    Arrays under `least_bytes` stay on the device. `gradients_on_host` and `programs`:
    see `Survey`.
    """
    blank = Survey(
        function=function,
        specs=specs,
        step=step,
        target=target,
        options=options,
        least_bytes=least_bytes,
        gradients_on_host=gradients_on_host,
        programs=programs or Programs(),
    )
    placements, virtual = _placements(blank)
    layers = tuple(
        _body(traced, target, placements[name], virtual[name], least_bytes)
        for name, traced in step.stacks.items()
    )
    leaves = jax.tree.leaves(specs)
    returned = gradients_on_host
    searched = search_state(step, leaves, target, least_bytes, returned=returned)
    state = find_state(step, leaves, target, searched, least_bytes, returned=returned)
    bodies, refused = holding_if_ordered(
        (state.body, *layers) if state else layers, step.recording.jaxpr
    )
    grouped = {body.name for body in layers if body.group}
    bodies = holding(
        bodies, lambda _, value: any(p.body in grouped for p in value.passages), GROUPED
    )
    total = program_seconds(step.jaxpr, target.chip, shards=finest_shards(placements))
    inside = 0.0
    for body in layers:  # of which `total` knows nothing that is virtual
        seconds = body.run_seconds
        if virtual[body.name]:
            traced, placed = step.stacks[body.name], placements[body.name]
            seconds = _body(traced, target, placed, frozenset(), 0).run_seconds
        inside += body.count * (seconds + _all_stored(step, body))
    inside += state.body.backward_seconds if state else 0.0
    survey = dataclasses.replace(
        blank,
        bodies=bodies,
        refused=refused,
        state=state,
        staying=find_staying(step, leaves, target, searched, state, least_bytes),
        other_seconds=max(0.0, total - inside),
        unpriced=cost_of_jaxpr(step.jaxpr).unpriced,
    )
    return _with_reserves(survey)


_VALUE = re.compile(r"(stowax\.value\.[^/()]*)")


def _all_stored(step: Step, body: Body) -> float:
    """Seconds of storing in the step as it was traced, which keeps everything."""
    traced = step.stacks[body.name]
    if not body.in_loop:  # operations write what they make, as their prices say
        return 0.0
    return sum(
        body.values[i].keep_seconds for i in store_all(traced.stack, traced.body)
    )


def _with_reserves(survey: Survey) -> Survey:
    """Reserves, from the predicted memory of the program that stores everything."""
    if not survey.bodies:
        plain = predict(survey, None)
        return _reserving(survey, plain.device_total, plain.device_total)
    problem = survey.problem(survey.target.device_bytes, survey.target.host_bytes)
    everything = baselines(problem)["keep all"]
    whole = predict(survey, survey.step_plan(everything))
    outside = whole.device_total - whole.temp
    layers, update = outside + whole.layers_temp, outside + whole.update_temp
    if survey.state is None:
        layers = update = whole.device_total
    stored = stored_bytes(survey.bodies, everything)
    if any(body.group for body in survey.bodies):  # never all of it at once
        stored = evaluate(problem, everything).device_bytes
    survey = _with_straight_reserves(survey, baselines(problem)["recompute all"])
    # Gradients that are the state's are in its bytes, and there at the update.
    state = stored_bytes(survey.bodies[:1], everything[:1]) if survey.state else 0
    return _reserving(survey, layers - stored, update - state)


def _with_straight_reserves(survey: Survey, nothing: Decisions) -> Survey:
    """What backward passes of straight-line code need besides what is stored.

    By the prediction for the program that stores `nothing`. In one that stores all,
    there are no barriers, and a prediction has whole chains of cotangents computed in
    one kernel, their operands alive for as long.
    """
    if not survey.options.segments:
        return survey
    least = predict(survey, survey.step_plan(nothing))
    outside, held, found = least.device_total - least.temp, 0, {}
    for body, chosen in zip(survey.bodies, nothing, strict=True):
        held += stored_bytes([body], (chosen,))
        if body.name in least.temps:
            again, _ = recomputed_values(body, chosen)
            live = sum(body.values[i].bytes for i in again & {*read_in_backward(body)})
            found[body.name] = outside + least.temps[body.name] - held - live
    return dataclasses.replace(survey, straight_reserves=found)


def _reserving(survey: Survey, layers: int, update: int) -> Survey:
    return dataclasses.replace(
        survey, reserved_bytes=layers, update_reserved_bytes=update
    )


def _placements(
    survey: Survey,
) -> tuple[dict[str, dict[int, Placement]], dict[str, frozenset[int]]]:
    """Of every body: bytes per device of its values, and those that are no arrays.

    The first where the step is sharded, the second in straight-line code with segments.
    """
    stacks = survey.step.stacks
    spread = any(_spread(a.spec) for a in survey.step.arguments)
    segments = survey.options.segments
    straight = [n for n, t in stacks.items() if t.stack.as_written and segments]
    if not ((stacks and spread) or straight):
        return {name: {} for name in stacks}, dict.fromkeys(stacks, frozenset())
    plans = {
        name: StackPlan(
            fingerprint=traced.body.forward.fingerprint,
            stored=store_all(traced.stack, traced.body),
        )
        for name, traced in stacks.items()
    }
    # Named operations stand in the forward pass, which keeps all without groups only.
    whole = dataclasses.replace(survey.options, group=0)
    survey = dataclasses.replace(survey, options=whole)
    lowered = survey.lower(StepPlan(stacks=plans), label=True)
    graph = _mlir.read_graph(lowered.compiler_ir())
    scopes = shards_by_scope(graph, "stowax.value.") if spread else {}
    virtual = virtual_scopes(graph, survey.target.platform, _VALUE) if straight else {}
    return (
        {n: placed_values(t, scopes) if spread else {} for n, t in stacks.items()},
        {
            n: virtual_values(t, virtual) if n in straight else frozenset()
            for n, t in stacks.items()
        },
    )


def _spread(spec: Any) -> bool:
    sharding = spec.sharding
    return sharding is not None and len(sharding.device_set) > 1


def _body(
    traced: TracedStack,
    target: Target,
    placements: Mapping[int, Placement],
    virtual: frozenset[int],
    least_bytes: int,
) -> Body:
    program, chip = traced.body.forward, target.chip

    def shards_of(number: int) -> int:
        return placements[number].shards if number in placements else 1

    finest = max((p.shards for p in placements.values()), default=1)
    backward = traced.body.backward
    leaves = zip(
        _jax.open_jaxpr(backward).invars, traced.body.residual_leaves, strict=False
    )
    read = [v for v, leaf in leaves if isinstance(leaf, int) and leaf in virtual]
    costs = BodyCosts(
        operations=tuple(operation_seconds(program, chip, shards_of, virtual)),
        backward_seconds=program_seconds(backward, chip, shards=finest, virtual=read),
        unpriced=cost_of_jaxpr(backward).unpriced,
    )
    body = make_body(
        traced,
        placements,
        costs,
        platform=target.platform,
        points=(),
        least_bytes=least_bytes,
        virtual=virtual,
    )
    stack = traced.stack
    if stack.as_written and stack.among_segments:
        return body  # only what is an array is kept, and that is written anyway
    return with_storing(body, target)
