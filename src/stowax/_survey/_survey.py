"""What the planner needs to know about a step on a target: bytes, seconds, reserves.

Bytes per device of every candidate come from Shardy's own propagation over the lowered
step (each operation of a body is lowered under a named scope of its own), seconds from
the cost rules. What the step needs besides stored values comes from predicting the
memory of a program that is never compiled: the one that stores everything.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _mlir
from .._cost._cost import cost_of_jaxpr, operation_seconds, program_seconds
from .._layers._stack import LOOP_SCOPE
from .._planner import baselines
from .._predict._predict import MemoryPrediction, predict_memory
from .._records._lowered import shards_by_scope
from .._records._plan import ArgumentRecord, Streaming
from .._records._stages import (
    OFFLOAD_LEAST_BYTES,
    Body,
    Decision,
    Decisions,
    Options,
    Point,
    Problem,
    updated_on_host,
)
from .._state._shards import partition_of, shard_shape
from .._state._state import State, find_state, search_state
from .._state._stays import Staying, find_staying
from .._state._stream import hosted_of
from .._step._trace import Step, TracedStack, store_all
from .._target._compiled import LoweredProgram
from .._target._machine import Target
from .._target._specs import put_in_host_memory
from ._apply import StackPlan, StepPlan, apply_decisions
from ._candidates import BodyCosts, Placement, finest_shards, make_body, placed_values
from ._held import holding_if_ordered
from ._storing import with_storing
from ._travel import ways_to_store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A step on a target, ready to be planned.

    `bodies` are the layers' in forward order, before them the state's, if there is one
    (`state.body`); `staying` is state that is no candidate. `reserved_bytes` is what
    the layers need besides stored values, by the prediction for a program that stores
    everything, `update_reserved_bytes` what the step needs after them.
    With `donates`, buffers of the state are overwritten by its new values.
    `refused` has what stays on the device since the compiler refused it. Arrays under
    `least_bytes` stay on the device. With `tight`, gradients are written to host memory
    at once, even where that makes the next weights wait; with `gradients_on_host` those
    that the step returns of parameters in host memory come out there.
    """

    function: Callable[..., Any]
    specs: tuple[Any, ...]
    step: Step
    target: Target
    options: Options
    bodies: tuple[Body, ...]
    other_seconds: float
    reserved_bytes: int
    update_reserved_bytes: int
    unpriced: tuple[str, ...]
    refused: tuple[str, ...] = ()
    state: State | None = None
    staying: tuple[Staying, ...] = ()
    least_bytes: int = OFFLOAD_LEAST_BYTES
    tight: bool = False
    gradients_on_host: bool = False
    donates: bool = True

    def problem(
        self, device_bytes: int, host_bytes: int, correction: int = 0
    ) -> Problem:
        """The planner's question, with `correction` bytes added to what is reserved.

        One that is negative is the layers' alone: there live values are fused away. At
        the update nothing is added to the state but what was predicted.
        """
        reserved = self.reserved_bytes + correction
        at_update = self.update_reserved_bytes + max(correction, 0)
        bodies = tuple(
            dataclasses.replace(
                body,
                points=(Point(reserved_bytes=reserved, live=_read_in_backward(body)),)
                if body.phase == "layers"
                else (Point(reserved_bytes=at_update, live=()),),
            )
            for body in self.bodies
        )
        return Problem(
            bodies=bodies,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            link=self.target.link,
            loss_reserved_bytes=reserved,
            other_seconds=self.other_seconds,
        )

    def step_plan(self, decisions: Decisions) -> StepPlan:
        """The planner's decisions as what the step does."""
        plans = {}
        for body, chosen in zip(self.bodies, decisions, strict=True):
            if body.phase == "update":
                continue
            traced = self.step.stacks[body.name]
            plans[body.name] = StackPlan(
                fingerprint=traced.body.forward.fingerprint,
                stored=ways_to_store(body, chosen, self.target.link, tight=self.tight),
            )
        arguments, streaming = self.arguments(decisions), self.streaming(decisions)
        hosted = hosted_of(arguments, streaming, self.target.platform)
        return StepPlan(stacks=plans, hosted=hosted)

    def arguments(self, decisions: Decisions | None) -> tuple[ArgumentRecord, ...]:
        """The step's arguments, and where each is under decisions; `None`: none."""
        hosted, on_host, orders = (), (), {}
        if decisions and self.state:
            hosted = self.state.hosted(decisions[0])
            orders = self.state.orders(hosted)
            parts = updated_on_host(self.bodies[0], decisions[0])
            on_host = self.state.leaves_of(parts)
        specs = jax.tree.leaves(self.specs)
        return tuple(
            ArgumentRecord(
                path=argument.path,
                shape=tuple(argument.spec.shape),
                shard=shard_shape(specs[i]),
                partition=partition_of(specs[i]),
                dtype=str(argument.spec.dtype),
                role=argument.role,
                output=self.step.updates.get(i),
                memory_kind="pinned_host" if i in hosted else "device",
                on_host=i in on_host,
                order=orders.get(i),
            )
            for i, argument in enumerate(self.step.arguments)
        )

    def streaming(self, decisions: Decisions | None) -> Streaming:
        """How state in host memory comes and goes under decisions; `None`: none."""
        return Streaming(
            lean=decisions is not None and self._lean(decisions),
            late=not self.tight,
            gradients_on_host=self.gradients_on_host,
            least_bytes=self.least_bytes,
        )

    def _lean(self, decisions: Decisions) -> bool:
        """Whether the link sets the pace of layers whose parameters stream.

        Then nothing is gained by fetching earlier than there is room for.
        """
        passing: dict[str, float] = {}
        for body, chosen in zip(self.bodies, decisions, strict=True):
            for value, how in zip(body.values, chosen, strict=True):
                for passage in value.passages if how == "offload" else ():
                    seconds = passage.backward_in / self.target.link.host_to_device
                    passing[passage.body] = passing.get(passage.body, 0.0) + seconds
        return any(
            passing.get(body.name, 0.0) > body.backward_seconds for body in self.bodies
        )

    def lower(
        self, plan: StepPlan | None, *, donate: bool = True, label: bool = False
    ) -> LoweredProgram:
        """The step under `plan` (`None`: as the user wrote it), lowered."""
        jitted = apply_decisions(
            self.function if plan is None else self.step.recording,
            plan,
            self.options,
            donate=self.step.donate if donate and self.donates else (),
            label=label,
            linearized=self.step.linearized,
        )
        specs, hosted = self.specs, plan.hosted if plan else None
        if hosted is not None:
            specs = put_in_host_memory(specs, hosted.shards, hosted.orders)
        with warnings.catch_warnings():
            # JAX says it of the program that runs, if it is so there.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return self.target.lower(jitted, *specs)


def take_survey(
    function: Callable[..., Any],
    specs: tuple[Any, ...],
    step: Step,
    target: Target,
    options: Options,
    least_bytes: int = OFFLOAD_LEAST_BYTES,
    *,
    gradients_on_host: bool = False,
) -> Survey:
    """Finds bytes and seconds of everything that a plan for `step` decides on.

    Arrays under `least_bytes` stay on the device. `gradients_on_host`: see `Survey`.
    """
    blank = Survey(
        function=function,
        specs=specs,
        step=step,
        target=target,
        options=options,
        bodies=(),
        other_seconds=0.0,
        reserved_bytes=0,
        update_reserved_bytes=0,
        unpriced=(),
        least_bytes=least_bytes,
        gradients_on_host=gradients_on_host,
    )
    placements = _placements(blank)
    layers = tuple(
        _body(traced, target, placements[name], least_bytes)
        for name, traced in step.stacks.items()
    )
    leaves = jax.tree.leaves(specs)
    returned = gradients_on_host
    searched = search_state(step, leaves, target, least_bytes, returned=returned)
    state = find_state(step, leaves, target, searched, least_bytes, returned=returned)
    bodies, refused = holding_if_ordered(
        (state.body, *layers) if state else layers, step.recording.jaxpr
    )
    total = program_seconds(step.jaxpr, target.chip, shards=finest_shards(placements))
    inside = sum(
        b.count * (b.forward_seconds + b.backward_seconds + _all_stored(step, b))
        for b in layers
    )
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


def predict(
    survey: Survey, plan: StepPlan | None, *, donate: bool = True
) -> tuple[LoweredProgram, MemoryPrediction]:
    """The lowered program of the step under `plan`, and its predicted memory."""
    lowered = survey.lower(plan, donate=donate)
    graph = _mlir.read_graph(lowered.compiler_ir())
    return lowered, predict_memory(graph, survey.target.platform, LOOP_SCOPE)


def stored_bytes(
    bodies: Sequence[Body], decisions: Decisions, way: Decision = "keep"
) -> int:
    """Bytes of what is stored in one way, all layers together."""
    return sum(
        body.count * value.bytes
        for body, chosen in zip(bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        if decision == way
    )


def _all_stored(step: Step, body: Body) -> float:
    """Seconds of storing in the step as it was traced, which keeps everything."""
    traced = step.stacks[body.name]
    if not body.in_loop:  # operations write what they make, as their prices say
        return 0.0
    return sum(
        body.values[i].keep_seconds for i in store_all(traced.stack, traced.body)
    )


def _read_in_backward(body: Body) -> tuple[int, ...]:
    """Values that take working memory in the backward pass unless they are stored."""
    return tuple(v.index for v in body.values if v.needed and not v.available)


def _with_reserves(survey: Survey) -> Survey:
    """Reserves, from the predicted memory of the program that stores everything."""
    if not survey.bodies:
        _, plain = predict(survey, None)
        return _reserving(survey, plain.device_total, plain.device_total)
    problem = survey.problem(survey.target.device_bytes, survey.target.host_bytes)
    everything = baselines(problem)["keep all"]
    _, whole = predict(survey, survey.step_plan(everything))
    outside = whole.device_total - whole.temp
    layers, update = outside + whole.layers_temp, outside + whole.update_temp
    if survey.state is None:
        layers = update = whole.device_total
    stored = stored_bytes(survey.bodies, everything)
    # Gradients that are the state's are in its bytes, and there at the update.
    state = stored_bytes(survey.bodies[:1], everything[:1]) if survey.state else 0
    return _reserving(survey, layers - stored, update - state)


def _reserving(survey: Survey, layers: int, update: int) -> Survey:
    return dataclasses.replace(
        survey, reserved_bytes=layers, update_reserved_bytes=update
    )


def _placements(survey: Survey) -> dict[str, dict[int, Placement]]:
    """Bytes per device of every value of every body, where the step is sharded."""
    stacks = survey.step.stacks
    if not stacks or not any(_spread(a.spec) for a in survey.step.arguments):
        return {name: {} for name in stacks}
    plans = {
        name: StackPlan(
            fingerprint=traced.body.forward.fingerprint,
            stored=store_all(traced.stack, traced.body),
        )
        for name, traced in stacks.items()
    }
    lowered = survey.lower(StepPlan(stacks=plans), label=True)
    graph = _mlir.read_graph(lowered.compiler_ir())
    scopes = shards_by_scope(graph, "stowax.value.")
    return {name: placed_values(traced, scopes) for name, traced in stacks.items()}


def _spread(spec: Any) -> bool:
    sharding = spec.sharding
    return sharding is not None and len(sharding.device_set) > 1


def _body(
    traced: TracedStack,
    target: Target,
    placements: Mapping[int, Placement],
    least_bytes: int,
) -> Body:
    program, chip = traced.body.forward, target.chip

    def shards_of(number: int) -> int:
        return placements[number].shards if number in placements else 1

    finest = max((p.shards for p in placements.values()), default=1)
    backward = traced.body.backward
    costs = BodyCosts(
        operations=tuple(operation_seconds(program, chip, shards_of)),
        backward_seconds=program_seconds(backward, chip, shards=finest),
        unpriced=cost_of_jaxpr(backward).unpriced,
    )
    body = make_body(
        traced,
        placements,
        costs,
        platform=target.platform,
        points=(),
        least_bytes=least_bytes,
    )
    return with_storing(body, target)
