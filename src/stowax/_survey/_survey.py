"""A step on a target, ready to be planned, and its programs.

`_take` finds what is in it. Here it answers: the planner's question, the step under
decisions, and what a lowered program should need.
"""

import contextlib
import dataclasses
import gc
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .. import _mlir
from .._layers._stack import BACKWARD_SCOPE, LOOP_SCOPE
from .._predict._predict import MemoryPrediction, predict_memory
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
from .._state._state import State
from .._state._stays import Staying
from .._state._stream import hosted_of
from .._step._trace import Step
from .._target._compiled import LoweredProgram
from .._target._machine import Target
from .._target._specs import put_in_host_memory
from ._apply import StackPlan, StepPlan, apply_decisions
from ._candidates import (
    kept_in_name,
)
from ._programs import Program, Programs
from ._travel import ways_to_store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A step on a target, ready to be planned.

    `bodies` are the layers' in forward order, before them the state's, if there is one
    (`state.body`); `staying` is state that is no candidate. `reserved_bytes` is what
    the layers need besides stored values, by the prediction for a program that stores
    everything, `update_reserved_bytes` what the step needs after them, and
    `straight_reserves` what backward passes of straight-line code need.
    With `donates`, buffers of the state are overwritten by its new values.
    `refused` has what stays on the device since the compiler refused it. Arrays under
    `least_bytes` stay on the device. With `tight`, gradients are written to host memory
    at once, even where that makes the next weights wait; with `gradients_on_host` those
    that the step returns of parameters in host memory come out there. All surveys of a
    step on a target share `programs`, however they read it.
    """

    function: Callable[..., Any]
    specs: tuple[Any, ...]
    step: Step
    target: Target
    options: Options
    bodies: tuple[Body, ...] = ()
    other_seconds: float = 0.0
    reserved_bytes: int = 0
    update_reserved_bytes: int = 0
    unpriced: tuple[str, ...] = ()
    straight_reserves: Mapping[str, int] = dataclasses.field(default_factory=dict)
    refused: tuple[str, ...] = ()
    state: State | None = None
    staying: tuple[Staying, ...] = ()
    least_bytes: int = OFFLOAD_LEAST_BYTES
    tight: bool = False
    gradients_on_host: bool = False
    donates: bool = True
    programs: Programs = dataclasses.field(
        default_factory=Programs, repr=False, compare=False
    )

    def problem(
        self, device_bytes: int, host_bytes: int, correction: int = 0
    ) -> Problem:
        """The planner's question, with `correction` bytes added to what is reserved.

        One that is negative is the layers' alone: there live values are fused away. At
        the update nothing is added to the state but what was predicted.
        """
        reserved = self.reserved_bytes + correction

        def points(body: Body) -> Point:
            mine = self.straight_reserves.get(body.name, self.reserved_bytes)
            live = read_in_backward(body)
            return Point(reserved_bytes=mine + correction, live=live)

        at_update = self.update_reserved_bytes + max(correction, 0)
        bodies = tuple(
            dataclasses.replace(
                body,
                points=(points(body),)
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
            mine = kept_in_name(body, chosen) if traced.stack.segment else chosen
            plans[body.name] = StackPlan(
                fingerprint=traced.body.forward.fingerprint,
                stored=ways_to_store(body, mine, self.target.link, tight=self.tight),
            )
        arguments, streaming = self.arguments(decisions), self.streaming(decisions)
        machine = self.target
        hosted = hosted_of(arguments, streaming, machine.platform, machine.device_kind)
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


def predict(
    survey: Survey, plan: StepPlan | None, *, donate: bool = True
) -> MemoryPrediction:
    """The predicted memory of the step under `plan` (`None`: as the user wrote it)."""
    program = _program(survey, plan, donate)
    if (known := survey.programs.prediction(program)) is not None:
        return known
    with _uncollected():
        graph = _mlir.read_graph(lowered(survey, plan, donate=donate).compiler_ir())
        platform = survey.target.platform
        prediction = predict_memory(graph, platform, LOOP_SCOPE, _BACKWARD)
    survey.programs.predicted.append((program, prediction))
    return prediction


def lowered(
    survey: Survey, plan: StepPlan | None, *, donate: bool = True
) -> LoweredProgram:
    """The step under `plan`, lowered just now or for the last prediction."""
    program, last = _program(survey, plan, donate), survey.programs.last
    if last is not None and last[0] == program:
        return last[1]
    survey.programs.last = None  # two need not be there at once
    found = survey.lower(plan, donate=donate)
    survey.programs.last = program, found
    return found


def _program(survey: Survey, plan: StepPlan | None, donate: bool) -> Program:
    donated = donate and survey.donates
    return (None, None, donated) if plan is None else (plan, survey.options, donated)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Python looks for no garbage inside, unless it is told to.

    A prediction makes so many objects that every second one would have it look through
    all that are alive, JAX's own included: a third of the prediction's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_BACKWARD = re.compile(re.escape(BACKWARD_SCOPE) + r"\.([^/()\"\s]+)")


def stored_bytes(
    bodies: Sequence[Body], decisions: Decisions, way: Decision = "keep"
) -> int:
    """Bytes of what is stored in one way, all layers together."""
    return sum(
        (body.copies if way == "keep" else body.count) * value.bytes
        for body, chosen in zip(bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        if decision == way
    )


def read_in_backward(body: Body) -> tuple[int, ...]:
    """Values that take working memory in the backward pass unless they are stored."""
    return tuple(v.index for v in body.values if v.needed and not v.available)
