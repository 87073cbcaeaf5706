"""What the planner needs to know about a step on a target: bytes, seconds, reserves.

Bytes per device of every candidate come from Shardy's own propagation over the lowered
step (each operation of a body is lowered under a named scope of its own), seconds from
the cost rules. What the step needs besides stored values comes from predicting the
memory of a program that is never compiled: the one that stores everything.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _mlir
from ._apply import StackPlan, apply_decisions
from ._candidates import BodyCosts, Placement, make_body
from ._cost import cost_of_jaxpr, operation_seconds, program_seconds, seconds
from ._cost_record import OperationCost, bytes_of
from ._lowered import shards_by_scope
from ._machine import Target
from ._pipeline import scope_name
from ._planner import baselines
from ._predict import predict_memory
from ._rewrite import Options
from ._stages import Body, Decision, Decisions, Point, Problem, Value
from ._trace import Step, TracedStack, store_all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A step on a target, ready to be planned.

    `reserved_bytes` is what the step needs besides stored values, by the prediction for
    a program that stores everything. `without_offloads` says that JAX refused host
    memory in this step.
    """

    function: Callable[..., Any]
    specs: tuple[Any, ...]
    step: Step
    target: Target
    options: Options
    bodies: tuple[Body, ...]
    other_seconds: float
    reserved_bytes: int
    unpriced: tuple[str, ...]
    without_offloads: bool = False

    def problem(
        self, device_bytes: int, host_bytes: int, correction: int = 0
    ) -> Problem:
        """The planner's question, with `correction` bytes added to what is reserved."""
        reserved = self.reserved_bytes + correction  # below zero: live bytes fused away
        bodies = tuple(
            dataclasses.replace(
                body,
                points=(Point(reserved_bytes=reserved, live=_read_in_backward(body)),),
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

    def narrowed(self, allow: Callable[[Value], frozenset[Decision]]) -> "Survey":
        """The same survey with the decisions of every value narrowed by `allow`."""
        bodies = tuple(
            dataclasses.replace(
                body,
                values=tuple(
                    dataclasses.replace(v, allowed=allow(v)) for v in body.values
                ),
            )
            for body in self.bodies
        )
        return dataclasses.replace(self, bodies=bodies)

    def stack_plans(self, decisions: Decisions) -> dict[str, StackPlan]:
        """The planner's decisions as what each stack stores."""
        plans = {}
        for body, chosen in zip(self.bodies, decisions, strict=True):
            traced = self.step.stacks[body.name]
            plans[body.name] = StackPlan(
                fingerprint=traced.body.forward.fingerprint,
                stored={
                    index: _way(body, index, decision)
                    for index, decision in enumerate(chosen)
                    if decision in ("keep", "offload")
                },
            )
        return plans

    def jitted(
        self,
        stacks: Mapping[str, StackPlan] | None,
        *,
        donate: bool = True,
        label: bool = False,
    ) -> Any:
        """The jitted step under what is stored (`None`: as the user wrote it)."""
        return apply_decisions(
            self.function,
            stacks,
            self.options,
            donate=self.step.donate if donate else (),
            label=label,
        )


def take_survey(
    function: Callable[..., Any],
    specs: tuple[Any, ...],
    step: Step,
    target: Target,
    options: Options,
) -> Survey:
    """Finds bytes and seconds of everything that a plan for `step` decides on."""
    blank = Survey(
        function=function,
        specs=specs,
        step=step,
        target=target,
        options=options,
        bodies=(),
        other_seconds=0.0,
        reserved_bytes=0,
        unpriced=(),
    )
    placements = _placements(blank)
    bodies = tuple(
        _body(traced, target, placements[name]) for name, traced in step.stacks.items()
    )
    total = program_seconds(step.jaxpr, target.chip, shards=_shards(placements))
    inside = sum(
        b.count * (b.forward_seconds + b.backward_seconds + _all_stored(step, b))
        for b in bodies
    )
    survey = dataclasses.replace(
        blank,
        bodies=bodies,
        other_seconds=max(0.0, total - inside),
        unpriced=cost_of_jaxpr(step.jaxpr).unpriced,
    )
    return _with_reserves(survey)


def predict(survey: Survey, jitted: Any) -> tuple[Any, Any]:
    """The lowered program of `jitted`, and its predicted memory."""
    lowered = survey.target.lower(jitted, *survey.specs)
    graph = _mlir.read_graph(lowered.compiler_ir())
    return lowered, predict_memory(graph, survey.target.platform)


def stored_bytes(bodies: Sequence[Body], decisions: Decisions) -> int:
    """Device bytes of what is kept, all layers together."""
    return sum(
        body.count * value.bytes
        for body, chosen in zip(bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        if decision == "keep"
    )


def _way(body: Body, index: int, decision: str) -> str:
    """How an offloaded value travels: early if it arises in a layer's first half."""
    if decision != "offload":
        return decision
    maker = body.values[index].operation
    before = 0.0 if maker is None else sum(o.seconds for o in body.operations[:maker])
    return "offload early" if before < 0.5 * body.forward_seconds else "offload"


def _all_stored(step: Step, body: Body) -> float:
    """Seconds of storing in the step as it was traced, which keeps everything."""
    traced = step.stacks[body.name]
    return sum(
        body.values[i].keep_seconds for i in store_all(traced.stack, traced.body)
    )


def _with_storing(body: Body, target: Target) -> Body:
    """The body with the seconds that the device spends on storing each value.

    A kept value is read where it was made and written to its place in the stack. One
    that is offloaded late is moved aside twice, before its copy leaves and after its
    copy came back; one that is offloaded early is copied from where it was made.
    """

    def passes(value: Value, count: int) -> float:
        moved = OperationCost(bytes_read=value.bytes, bytes_written=value.bytes)
        return count * seconds(moved, target.chip)

    values = tuple(
        dataclasses.replace(
            value,
            keep_seconds=passes(value, 1),
            offload_seconds=passes(value, 2 if late else 0),
        )
        for value in body.values
        for late in [_way(body, value.index, "offload") == "offload"]
    )
    return dataclasses.replace(body, values=values)


def _read_in_backward(body: Body) -> tuple[int, ...]:
    """Values that take working memory in the backward pass unless they are stored."""
    return tuple(v.index for v in body.values if v.needed and not v.available)


def _with_reserves(survey: Survey) -> Survey:
    """Reserves, from the predicted memory of the program that stores everything."""
    if not survey.bodies:
        _, plain = predict(survey, survey.jitted(None))
        return dataclasses.replace(survey, reserved_bytes=plain.device_total)
    problem = survey.problem(survey.target.device_bytes, survey.target.host_bytes)
    everything = baselines(problem)["keep all"]
    _, whole = predict(survey, survey.jitted(survey.stack_plans(everything)))
    stored = stored_bytes(survey.bodies, everything)
    return dataclasses.replace(survey, reserved_bytes=whole.device_total - stored)


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
    labelled = survey.jitted(plans, label=True)
    lowered = survey.target.lower(labelled, *survey.specs)
    graph = _mlir.read_graph(lowered.compiler_ir())
    scopes = shards_by_scope(graph, "stowax.value.")
    return {name: _placed(traced, scopes) for name, traced in stacks.items()}


def _placed(traced: TracedStack, scopes: Mapping[str, Any]) -> dict[int, Placement]:
    program, stack = traced.body.forward, traced.stack
    placed: dict[int, Placement] = {}
    for position, node in enumerate(program.nodes):
        found = scopes.get(scope_name(stack.name, position))
        if found is None:
            continue
        for number in node.outputs:
            whole = bytes_of(program.avals[number])
            placed[number] = Placement(
                bytes=-(-whole // found.shards), shards=found.shards
            )
    # A layer's input lies as the layer's output does, being the next one's input.
    for number, output in zip(stack.carry_inputs, program.outputs, strict=False):
        if isinstance(output, int) and output in placed:
            placed[number] = placed[output]
    return placed


def _spread(spec: Any) -> bool:
    sharding = spec.sharding
    return sharding is not None and len(sharding.device_set) > 1


def _shards(placements: Mapping[str, Mapping[int, Placement]]) -> int:
    found = [p.shards for placed in placements.values() for p in placed.values()]
    return max(found, default=1)


def _body(
    traced: TracedStack,
    target: Target,
    placements: Mapping[int, Placement],
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
        # The CPU backend books no host memory: there, moving a value saves nothing.
        can_offload=target.platform != "cpu",
        points=(),
    )
    return _with_storing(body, target)
