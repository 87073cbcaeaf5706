"""From the closed loop's result to the plan's records, with reasons and baselines.

Pure bookkeeping on records; nothing here decides anything.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from .._hardware._pinned import beyond_the_pool
from .._jaxprs._canonical import outline
from .._layers._rewrite import loops_with_effects
from .._planner import baselines, evaluate, policies
from .._records._plan import Baseline, DecisionRecord, StackRecord
from .._records._stages import (
    STATE,
    Body,
    Decisions,
    Evaluation,
    Problem,
    Value,
    updated_on_host,
)
from .._search._space import Space
from .._step._trace import TracedStack
from .._survey._apply import StepPlan
from .._survey._preferences import Preferences
from .._survey._survey import Survey
from .._units import format_bytes, format_seconds
from .._update._blocks import BlockSize
from ..report._layout import short_source
from ._reasons import reason_of

_SEEN = 0.01
"""Part of a step from which hidden copies are worth a word."""


def decision_records(
    survey: Survey, decisions: Decisions, plan: StepPlan, preferences: Preferences
) -> tuple[DecisionRecord, ...]:
    """One record per value that the backward pass needs or the plan stores.

    And per array of the state that could not leave, but for small ones (`notes`).

    **Arguments:** `plan` is what the step does under the decisions.
    """

    def record(stack: str, value: Value, count: int, **fields: Any) -> DecisionRecord:
        return DecisionRecord(
            stack=stack,
            value=value.index,
            name=value.name,
            source=value.source,
            role=value.role,
            shape=value.shape,
            dtype=value.dtype,
            count=count,
            pinned=preferences.matched(value),
            **fields,
        )

    records = []
    for body, chosen in zip(survey.bodies, decisions, strict=True):
        parts = updated_on_host(body, chosen)
        stack = plan.stacks.get(body.name)
        stored = stack.stored if stack else {}
        for value, decision in zip(body.values, chosen, strict=True):
            read = value.needed and not value.available
            if value.index in stored and decision != "offload":
                decision = "keep"  # a virtual one in name
            if decision is None or (decision == "recompute" and not read):
                continue
            count = _count(survey, body, value)
            records.append(
                record(
                    body.name,
                    value,
                    count,
                    bytes=0 if value.virtual else value.bytes * body.copies // count,
                    decision=decision,
                    travel=stored.get(value.index, "").partition(" ")[2] or None,
                    reason=reason_of(survey, body, value, decision, parts),
                )
            )
    for staying in survey.staying:
        if not staying.small:
            value, count = staying.value, staying.count
            records.append(
                record(
                    STATE,
                    value,
                    count,
                    bytes=value.bytes // count,
                    decision="keep",
                    reason=f"it stays: {value.stays}",
                )
            )
    return tuple(records)


def _count(survey: Survey, body: Body, value: Value) -> int:
    """How many arrays a value stands for: one a layer, or all that are alike."""
    if body.phase == "layers" or survey.state is None:
        return body.copies
    return len(survey.state.leaves[value.index])


def stack_records(
    survey: Survey, evaluation: Evaluation | None, *, rewritten: bool
) -> tuple[StackRecord, ...]:
    """One record per repeated body."""
    forward = backward = (0.0,) * len(survey.bodies)
    if evaluation is not None:
        forward = evaluation.forward_window_used
        backward = evaluation.backward_window_used
    records = []
    for k, body in enumerate(survey.bodies):
        if body.phase == "update":
            continue
        traced = survey.step.stacks[body.name]
        records.append(
            StackRecord(
                name=body.name,
                source=traced.stack.source,
                count=body.count,
                unrolled=traced.stack.separate and not traced.stack.segment,
                segment=traced.stack.segment,
                tiles=traced.stack.tiles,
                group=traced.stack.group,
                blocks=tuple(product.source for product in traced.body.blocks),
                fingerprint=traced.body.forward.fingerprint,
                forward_seconds=body.forward_seconds,
                backward_seconds=body.backward_seconds,
                forward_window_used=forward[k],
                backward_window_used=backward[k],
                outline=tuple(outline(traced.body.forward.jaxpr)) if rewritten else (),
            )
        )
    return tuple(records)


def baseline_records(
    space: Space,
    problem: Problem,
    budget: int,
    counts: Callable[[str], bool] = lambda name: True,
) -> tuple[Baseline, ...]:
    """The policies beside the plan: its own cost model, and memory predicted likewise.

    None where nothing repeats: there is nothing that a policy could decide. `counts`
    says which are meant, by name.
    """
    records = []
    for name, decisions in policies(problem).items():
        if not counts(name):
            continue
        if space.survey.refused and any("offload" in c for c in decisions):
            continue  # JAX itself refuses it here
        try:
            evaluation = evaluate(problem, decisions)
        except ValueError:
            continue  # a policy that names what cannot be computed again
        if "offload" in name and not evaluation.host_bytes:
            continue  # nothing of it may move
        device = space.memory.expected(decisions)
        records.append(
            Baseline(
                name=name,
                device_bytes=device,
                host_bytes=evaluation.host_bytes,
                seconds=evaluation.seconds,
                fits=device <= budget
                and evaluation.host_bytes <= space.asked.host_budget,
            )
        )
    return tuple(records)


_UNROLLED = (
    "the layers of its Python loop run one after the other, as they are written: "
    "nothing of them has to leave the device. Pin an activation or a parameter to "
    "'offload' to have them run as a loop"
)
_NESTED = (
    "a gradient is taken inside of what is differentiated: the loops hand on what its "
    "backward pass reads, and that stays. With jax.checkpoint around the layer it is "
    "little more than the layer's input"
)
_MANUAL = (
    "layers inside of jax.shard_map run as they are written: not a quarter of the "
    "matrix products are in there. With jax.checkpoint around the layer they keep "
    "little more than its input"
)


def notes(
    survey: Survey,
    fits: bool,
    host_bytes: int,
    decisions: Decisions | None,
    *,
    unrolled: bool = False,
) -> tuple[str, ...]:
    """What a user has to know about the target, and about what was not possible.

    `host_bytes` are those of the plan's compiled program, `decisions` its own;
    `unrolled` says that the plan leaves the layers of a Python loop as they are.
    """
    target = survey.target
    found = list(target.notes)
    if target.pinned_bytes is not None:
        attached = not target.compile_only
        more = beyond_the_pool(host_bytes, target.pinned_bytes, attached=attached)
        found[:0] = [more] if more else []
    if unrolled:
        found.insert(0, _UNROLLED)
    if decisions:
        stacks = survey.step.stacks.values()
        found[:0] = _ways_of_running(stacks, roll=survey.options.roll)
    left = survey.step.recording.left
    if left:
        found.insert(0, f"what is differentiated runs as written: {'; '.join(left)}")
    calls = survey.step.recording.calls
    if effects := [place for call in calls for place in loops_with_effects(call)]:
        places = dict.fromkeys(short_source(place) for place in effects)
        found.insert(
            0,
            f"the loop at {' and at '.join(places)} runs as it is written: what it "
            "calls (jax.experimental.io_callback, say) must not run twice",
        )
    if survey.step.recording.nested and not fits:
        found.insert(0, _NESTED)
    repeats = any(not t.stack.segment for t in survey.step.stacks.values())
    if survey.step.recording.manual and not repeats and not fits:
        found.insert(0, _MANUAL)
    elif not survey.bodies and not fits and not left:
        found.insert(
            0,
            "no layers repeat in what is differentiated, and stowax moves the values "
            "of repeated layers: write them as jax.lax.scan, or as a Python loop over "
            "equal blocks",
        )
    hosted = survey.state.hosted(decisions[0]) if decisions and survey.state else ()
    if hosted and survey.gradients_on_host:
        found.insert(
            0,
            "gradients that the step returns of parameters in host memory come in host "
            "memory, too: on the device they would not fit. What computes with them "
            "next has to fetch them (jax.device_put)",
        )
    small = [staying for staying in survey.staying if staying.small]
    if small and hosted:
        count = sum(staying.count for staying in small)
        size = format_bytes(sum(staying.value.bytes for staying in small))
        least = format_bytes(BlockSize.least(survey.least_bytes).leaf_bytes)
        what = "1 array" if count == 1 else f"{count} arrays"
        found.append(
            f"{what} of the state ({size}) {'stays' if count == 1 else 'stay'} on the "
            f"device: copies of less than {least} are not worth it"
        )
    found += survey.refused
    return tuple(found)


def _ways_of_running(traced: Collection[TracedStack], *, roll: bool) -> list[str]:
    """What runs otherwise than the user wrote it: blocks, groups, segments."""
    found, stacks = [], [one.stack for one in traced]
    products = [product for one in traced for product in one.body.blocks]
    if products:
        places = dict.fromkeys(short_source(product.source) for product in products)
        found.append(
            f"what is made of the product at {' and at '.join(places)} runs in "
            f"{max(product.count for product in products)} blocks within its layer, "
            "each computed again for its gradient: gradients of what all blocks read "
            "are added up in another order. forbid=('tile',) rules it out"
        )
    tiles = [stack for stack in stacks if stack.tiles]
    if tiles:
        places = dict.fromkeys(short_source(stack.source) for stack in tiles)
        most = max(stack.count for stack in tiles)
        found.append(
            f"what is made of the product at {' and at '.join(places)} runs in {most} "
            "blocks of tokens: sums over tokens, those of gradients too, are added up "
            "in another order. forbid=('tile',) rules it out"
        )
    found += [
        f"the layers at {short_source(stack.source)} run in groups of {stack.group}: "
        "only the input of each group's first layer is stored, and the group runs "
        "forward once more before its backward pass"
        for stack in stacks
        if stack.group
    ]
    segments = sum(stack.segment for stack in stacks)
    if segments:
        found.append(
            f"what stands outside of {'layers' if roll else 'scans'} is planned in "
            f"{segments} segments: its values are kept or computed again, and none "
            "leaves the device, as XLA drops copies in straight-line code"
        )
    return found


def host_notes(
    survey: Survey, decisions: Decisions | None, inspection: Any | None
) -> tuple[str, ...]:
    """What the host's processor does in a plan's program, planned or not."""
    found = []
    parts = [
        part
        for body, chosen in zip(survey.bodies, decisions or (), strict=False)
        for part in updated_on_host(body, chosen)
    ]
    if parts:
        chip = survey.target.chip
        rate = (chip.host_rate() or 0.0) / 1e9
        known = "a measured" if chip.host_update.known else "an assumed"
        count = sum(len(part.values) for part in parts)
        found.append(
            f"the host's processor updates {count} value{'s' * (count != 1)} of the "
            f"state, at {known} {rate:.3g} GB/s a device; forbid=['host update'] "
            "streams them through the device"
        )
    hazards = inspection.hazards if inspection else ()
    moved = sum(hazard.kind == "host-compute" for hazard in hazards)
    if wrong := sum(hazard.kind == "misplaced-copy" for hazard in hazards):
        found.insert(
            0,
            f"the compiler copies {wrong} slices of the step's own from or to other "
            "places than it says, planned or not: numbers are wrong. stowax inspect "
            "says where",
        )
    if moved:
        found.append(
            f"the compiler moved arithmetic onto the host's processor, unasked, in "
            f"{moved} places: stowax inspect says where"
        )
    return tuple(found)


def overlap_notes(survey: Survey, inspection: Any | None) -> tuple[str, ...]:
    """What is not yet seen of a GPU's simulated seconds (docs/results/gpu.md)."""
    if inspection is None or survey.target.platform != "gpu":
        return ()
    if not any(copy.trips > 1 for copy in inspection.transfers):
        return ()
    timeline = inspection.timeline
    crossing = timeline.device_to_host_seconds + timeline.host_to_device_seconds
    hidden = crossing - timeline.exposed_seconds
    if hidden < _SEEN * timeline.step_seconds:
        return ()
    return (
        "seconds are simulated with copies in loops beside the computing. On an H200 "
        "with JAX 0.11.2 they came one after the other, as XLA runs loops as CUDA "
        f"graphs: up to {format_seconds(hidden)} a step more",
    )


def _storing_for_nothing(body: Body) -> Body:
    values = (dataclasses.replace(value, keep_seconds=0.0) for value in body.values)
    return dataclasses.replace(body, values=tuple(values))


def unplanned_seconds(survey: Survey, problem: Problem) -> float:
    """Seconds of the step as written, under the planner's model: all is kept.

    Storing has a price in a scan alone: a Python loop's layers have no stacks.
    """
    if not survey.bodies:
        return survey.other_seconds
    stacks = survey.step.stacks
    bodies = tuple(
        _storing_for_nothing(body)
        if body.name in stacks and stacks[body.name].stack.separate
        else body
        for body in problem.bodies
    )
    problem = dataclasses.replace(problem, bodies=bodies)
    return evaluate(problem, baselines(problem)["keep all"]).seconds
