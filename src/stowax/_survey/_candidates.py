"""From a linearized body to what the planner decides on: values and operations.

Every value gets a name that the user knows (`_naming`), its bytes per device, and the
decisions that make sense for it. Weights and constants are at hand in the backward
pass and need none; small or oddly shaped arrays are not offloaded, since copies of them
cost more than their bytes say (and some TPU copies refuse them).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import _jax
from .._cost._record import bytes_of
from .._cost._rules import rule_of
from .._jaxprs._jaxpr import Program, is_float
from .._layers._stack import scope_name
from .._planner import recomputed_values
from .._records._stages import Body, Decision, Operation, Point, Value
from .._step._trace import TracedStack, available
from ._naming import value_names

_AGAIN = {"gpu": 0.5}
"""Part of an elementwise operation's or reduction's time that it takes once more.

On a GPU it is computed again inside of the loop, or of the product, that reads it.
Seconds of a step, the first plan compiled for an H200, at the whole time and at half:
Gemma2-2B 0.417 (102 GiB) and 0.380 (62), Llama2-7B 1.432 and 1.43. On a v5p-8
PaliGemma2-3B would gain (1.423 after four programs, 1.371 with the first) and
Llama2-13B lose (5.850, 6.085).
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a value lies on the devices: bytes on each, and over how many it is split."""

    bytes: int
    shards: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BodyCosts:
    """Seconds of one run of a body: per forward operation, and of the backward program.

    `unpriced` names the operations that no rule knew, in both programs.
    """

    operations: tuple[tuple[float, bool], ...]
    backward_seconds: float
    unpriced: tuple[str, ...]


def make_body(
    traced: TracedStack,
    placements: Mapping[int, Placement],
    costs: BodyCosts,
    *,
    platform: str,
    least_bytes: int,
    points: tuple[Point, ...],
    virtual: frozenset[int] = frozenset(),
) -> Body:
    """The planner's record of one stack.

    **Arguments:** `placements` per value number (missing: whole on every device).
    Values under `least_bytes` are not offloaded, and none for the `platform` "cpu":
    its backend books no host memory, moving a value would save nothing. `virtual`
    values are no arrays (see `Value`).
    """
    stack, program = traced.stack, traced.body.forward
    at_hand = available(stack, traced.body)
    read = frozenset(traced.body.residuals)
    needed = _real(program, read, virtual)
    names = value_names(program)
    may_travel = platform != "cpu" and not (stack.as_written or stack.group)
    values = []
    for index, aval in enumerate(program.avals):
        placement = placements.get(index) or Placement(bytes=bytes_of(aval), shards=1)
        operation = program.maker.get(index)
        allowed: set[Decision] = {"keep", "offload", "recompute"}
        if operation is None or _jax.has_effects(program.nodes[operation].equation):
            allowed.discard("recompute")
        if index in virtual:
            allowed &= {"recompute", "keep"} if index in read else {"recompute"}
        large = len(aval.shape) >= 2 and placement.bytes >= least_bytes
        if not (may_travel and large and is_float(aval)):
            allowed.discard("offload")
        value = Value(
            index=index,
            name=names.get(index) or _input_name(stack, index),
            source=_value_source(program, index),
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            bytes=placement.bytes,
            operation=operation,
            available=index in at_hand,
            needed=index in needed,
            allowed=frozenset(allowed),
            tiled=stack.tiles,
            virtual=index in virtual,
        )
        values.append(value)
    operations = tuple(
        Operation(
            index=k,
            primitive=node.equation.primitive.name,
            source=_jax.source_text(node.equation),
            inputs=tuple(dict.fromkeys(i for i in node.inputs if i is not None)),
            outputs=node.outputs,
            seconds=0.0
            if virtual.issuperset(node.outputs)
            else _again(node.equation, platform) * costs.operations[k][0],
            repeatable=not _jax.has_effects(node.equation),
        )
        for k, node in enumerate(program.nodes)
    )
    return Body(
        name=stack.name,
        count=stack.count,
        values=tuple(values),
        operations=operations,
        forward_seconds=_forward_seconds(traced, costs),
        backward_seconds=costs.backward_seconds,
        points=points,
        in_loop=not stack.as_written,
        group=stack.group,
    )


def _real(
    program: Program, read: Iterable[int], virtual: frozenset[int]
) -> frozenset[int]:
    """The values that `read` are or, where these are virtual, are computed from."""
    found: set[int] = set()
    waiting, seen = [*read], set()
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        if number in virtual:
            node = program.nodes[program.maker[number]]
            waiting += [i for i in node.inputs if i is not None]
        else:
            found.add(number)
    return frozenset(found)


def kept_in_name(
    body: Body, chosen: Sequence[Decision | None]
) -> tuple[Decision | None, ...]:
    """`chosen`, with what is virtual kept where nothing real is computed again.

    It stands behind no barrier then, and the compiler does with straight-line code what
    it does with the step as it is written.
    """
    again, _ = recomputed_values(body, chosen)
    if any(not body.values[i].virtual for i in again):
        return tuple(chosen)
    return tuple(
        "keep" if value.virtual and "keep" in value.allowed else mine
        for value, mine in zip(body.values, chosen, strict=True)
    )


def _again(equation: Any, platform: str) -> float:
    """Part of an operation's time that it takes to run it once more."""
    rule = rule_of(equation)
    fused = rule is not None and rule.kind != "kernel"
    return _AGAIN.get(platform, 1.0) if fused else 1.0


def _forward_seconds(traced: TracedStack, costs: BodyCosts) -> float:
    """Seconds of what the body's own outputs take; residuals ride along."""
    program = traced.body.forward
    inputs = range(program.input_count + program.const_count)
    run = program.closure(traced.body.output_numbers, inputs, effects=True)
    return sum(costs.operations[k][0] for k in run)


def _value_source(program: Program, index: int) -> str:
    maker = program.maker.get(index)
    return "" if maker is None else _jax.source_text(program.nodes[maker].equation)


def _input_name(stack: Any, index: int) -> str:
    if index in stack.carry_inputs:
        return f"layer input {index - stack.const_count}"
    return f"constant {index}" if index < stack.const_count else f"weight {index}"


def placed_values(
    traced: TracedStack, scopes: Mapping[str, Any]
) -> dict[int, Placement]:
    """Where the values of a stack lie; `scopes` are `_lowered.shards_by_scope`.

    An operation that is lowered to nothing, as `checkpoint_name` is, has no scope: what
    it hands on lies as it did.
    """
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
    for _ in range(2):  # a name may stand at the layer's beginning, or at its end
        _hand_on(program, placed)
        for number, output in zip(stack.carry_inputs, program.outputs, strict=False):
            if isinstance(output, int) and output in placed:
                placed[number] = placed[output]
    return placed


def virtual_values(traced: TracedStack, scopes: Mapping[str, bool]) -> frozenset[int]:
    """The values of a body that are no arrays; `scopes` are `virtual_scopes`.

    An operation of which nothing is left changes a shape, or a name.
    """
    program, stack = traced.body.forward, traced.stack
    return frozenset(
        number
        for position, node in enumerate(program.nodes)
        for number in node.outputs
        if len(node.outputs) == 1
        and not _jax.has_effects(node.equation)
        and scopes.get(scope_name(stack.name, position), True)
    )


def _hand_on(program: Program, placed: dict[int, Placement]) -> None:
    for node in program.nodes:
        if node.equation.primitive.name != "name":
            continue
        (read,), (made,) = node.inputs, node.outputs
        if read in placed:
            placed.setdefault(made, placed[read])


def finest_shards(placements: Mapping[str, Mapping[int, Placement]]) -> int:
    """Into how many parts the most finely split value is split."""
    found = [p.shards for placed in placements.values() for p in placed.values()]
    return max(found, default=1)
