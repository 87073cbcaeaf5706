"""The loops of a stack: forward, backward, and forward without a backward pass.

`_pipeline` calls these while the user's step is traced, inside of its derivative rule;
`_boundary` calls them again, outside of any, with some per-layer inputs in host memory
(`HostLayers`) and some gradients going there (`HostGradients`). What the loops do with
stored values is told in `_pipeline`, what they do with weights in `_host_feed`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._jax import aval_of, zeros
from .._jaxprs._jaxpr import Program, evaluate, inline
from ._host_feed import Feed, Writer, neighbour
from ._host_layers import HostGradients, HostLayers, after, can_order, first_element
from ._host_row import BackwardRow, Row, forward_row
from ._host_slots import (
    empty_layers,
    empty_slots,
    read_slot,
    staged,
    write_layer,
    write_slot,
)
from ._host_turns import Turn, fetch_turns, late_gradients
from ._linearize import LinearizedBody
from ._stack import LOOP_SCOPE, Stack, Stored, scope_name, ways

Kept = tuple[list[Any], dict[int, Any], dict[int, Any], list[Any]]
"""What the forward pass leaves for the backward one: kept values, slots in host memory,
the last layer's values that are fetched a layer ahead, which are still on the device,
and scalars that are there when the forward pass is done (none unless asked for)."""

Cotangents = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]
"""Of the active outputs that are carried, of the active per-layer outputs, and what the
active constants have got so far (see `Activity`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """What lies in host memory beside the weights that are `HostLayers`.

    `places` says, by per-layer input, which gradients go there. With `lean`, memory
    comes before time: each fetch waits until the weights before it have been read. That
    costs next to nothing where the link sets the pace. Without `late`, every gradient
    is written in the iteration that makes it.
    """

    places: Mapping[int, HostGradients] = dataclasses.field(default_factory=dict)
    lean: bool = False
    late: bool = True


NOTHING = HostPlan()
"""No gradients in host memory, and time before memory."""


def _hosted(per_layer: Sequence[Any]) -> bool:
    return any(isinstance(x, HostLayers) for x in per_layer)


def _turns(
    stack: Stack, row: Row | None, per_layer: Sequence[Any], plan: HostPlan
) -> dict[int, Turn]:
    """When a loop that runs `row` fetches the inputs that lie in host memory."""
    if row is None:
        return {}
    inputs = enumerate(per_layer, start=stack.first_layer_input)
    sizes = {i: x.layer_bytes for i, x in inputs if isinstance(x, HostLayers)}
    return fetch_turns(row.steps, sizes, row.avals, lean=plan.lean)


def run_plain(
    stack: Stack,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
    *,
    plan: HostPlan = NOTHING,
) -> tuple[list[Any], list[Any]]:
    """The final carry and the stacked per-layer outputs, nothing stored."""
    row = None
    if _hosted(per_layer):
        program = Program(inline(stack.body))
        row = forward_row(program, [o for o in program.outputs if isinstance(o, int)])
    feed = Feed(stack, per_layer, _turns(stack, row, per_layer, plan))

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        carry, ahead = state
        at_hand = dict(enumerate([*consts, *carry])) | feed.inputs(x, ahead)
        if row is None:
            out = evaluate(stack.body, list(at_hand.values()))
        else:
            values = row.run(at_hand, functools.partial(feed.missing, x))
            out = program.read_outputs(values, len(program.outputs))
            ahead = feed.following(x[0], ahead, values)
        return (out[: stack.carry_count], ahead), out[stack.carry_count :]

    start = (list(carry), feed.start(carry))
    (carry_out, _), ys = _scan(stack, step, start, feed.scanned())
    return carry_out, ys


def run_forward(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
    *,
    plan: HostPlan = NOTHING,
    label: bool = False,
    signed: bool = False,
) -> tuple[list[Any], list[Any], Kept]:
    """The final carry, the stacked per-layer outputs, and what is stored.

    **Arguments:** `per_layer` has arrays (for a `separate` stack lists of them) or
    `HostLayers`. With `label`, operations run under a named scope each. With `signed`,
    what is left says when the pass is done: the first weights of a backward pass are
    not to be fetched before that, and a cotangent may be known from the start.
    """
    keep, late, early, ahead_of_use = ways(stored)
    at_once = [*early, *ahead_of_use]
    program = body.forward
    wanted = list(dict.fromkeys([*body.output_numbers, *keep, *late, *at_once]))
    row = forward_row(program, wanted) if _hosted(per_layer) else None
    feed = Feed(stack, per_layer, _turns(stack, row, per_layer, plan))

    def scope(position: int) -> Any:
        return jax.named_scope(scope_name(stack.name, position))

    def scope_of(number: int) -> str:
        return f"stowax.offload.{stack.name}.{number}"

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        carry, pending, slots, kept, ahead = state
        slots = dict(slots)
        for n in late:
            moved = stack.lay_out(staged(pending[n], x[0]))
            slots[n] = write_slot(slots[n], moved, x[0], scope_of(n))
        at_hand = dict(enumerate([*consts, *carry])) | feed.inputs(x, ahead)
        if row is None:
            naming = scope if label else None
            values = program.run(wanted, at_hand, effects=True, scope=naming)
        else:
            values = row.run(at_hand, functools.partial(feed.missing, x))
            ahead = feed.following(x[0], ahead, values)
        out = body.outputs(values)
        for n in at_once:
            made = stack.lay_out(values[n])
            slots[n] = write_slot(slots[n], made, x[0], scope_of(n))
        pending = {n: values[n] for n in carried}
        kept = {n: write_layer(kept[n], stack.lay_out(values[n]), x[0]) for n in keep}
        carry_out, ys = out[: stack.carry_count], out[stack.carry_count :]
        return (carry_out, pending, slots, kept, ahead), ys

    # The backward pass begins with the last layer's before anything is fetched.
    carried = [*late, *ahead_of_use]
    nothing = {n: zeros(program.avals[n]) for n in carried}
    slots = {n: empty_slots(stack.count, program.avals[n]) for n in [*late, *at_once]}
    kept = {n: empty_layers(stack.count, program.avals[n]) for n in keep}
    start = (list(carry), nothing, slots, kept, feed.start(carry))
    (carry_out, last, slots, kept, _), ys = _scan(stack, step, start, feed.scanned())
    done = [c for c in carry_out if can_order(aval_of(c))] if signed else []
    signs = [first_element(c) for c in done[:1]]
    return carry_out, ys, ([kept[n] for n in keep], slots, last, signs)


def run_backward(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    consts: Sequence[Any],
    per_layer: Sequence[Any],
    stored_values: Kept,
    cotangents: Cotangents,
    *,
    plan: HostPlan = NOTHING,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Cotangents of the active carry, constants and per-layer inputs, in that order.

    **Arguments:** `per_layer` as for `run_forward`. Gradients of per-layer inputs are
    stacked, also for a `separate` stack.
    """
    kept, slots, last, signs = stored_values
    keep, late, early, ahead_of_use = ways(stored)
    active = Activity(stack, body)
    ct_carry, ct_ys, totals = cotangents
    places = {j + stack.first_layer_input: p for j, p in plan.places.items()}
    needs_row = places or _hosted(per_layer)
    row = BackwardRow(stack, body, stored) if needs_row else None
    feed = Feed(stack, per_layer, _turns(stack, row, per_layer, plan), backward=True)
    writer = _writer(stack, body, row, places, plan)

    def fetch(number: int, layer: Any) -> Any:
        scope = f"stowax.fetch.{stack.name}.{number}"
        return stack.lay_out(read_slot(slots[number], layer, scope))

    def step(state: Any, xs: Any) -> tuple[Any, Any]:
        ct_carry, ct_consts, current, ahead, buffers, waiting = state
        x, kept, ct_ys = xs
        kept = [stack.lay_out(v) for v in kept]
        following = {n: fetch(n, x[0]) for n in late}
        next_layer = neighbour(stack, x[0], 1, backward=True)
        following |= {n: fetch(n, next_layer) for n in ahead_of_use}
        buffers = writer.write_waiting(buffers, waiting, x[0])
        fetched = {n: fetch(n, x[0]) for n in early}
        first = list(fetched.values()) if plan.lean else []
        at_hand = dict(enumerate(consts)) | feed.inputs(x, ahead, first)
        at_hand |= dict(zip(keep, kept, strict=True))
        at_hand |= current
        at_hand |= fetched
        if row is None:
            values = body.forward.run(body.residuals, at_hand)
            grads = body.pull_back(values, [*ct_carry, *ct_ys], ct_consts)
        else:
            given = [*ct_carry, *ct_ys, *ct_consts]
            at_hand |= dict(enumerate(given, start=row.cotangents))
            values = row.run(at_hand, functools.partial(feed.missing, x))
            grads = row.results(values)
            ahead = feed.following(x[0], ahead, values)
        by_input = dict(zip(body.active_inputs, grads, strict=True))
        ct_consts = [by_input[i] for i in active.consts]
        carried = [by_input[i] for i in active.carry]
        # Not before the layer is done: a copy that nobody waits for holds nothing up.
        done = [ct for ct in carried if can_order(aval_of(ct))][:1]
        following = {n: staged(v, after(x[0], done)) for n, v in following.items()}
        buffers, waiting = writer.write(buffers, by_input, x[0])
        out = [by_input[i] for i in active.layers if i not in buffers]
        return (carried, ct_consts, following, ahead, buffers, waiting), out

    (ct_carry, ct_consts, _, _, buffers, waiting), stacked = _scan(
        stack,
        step,
        (list(ct_carry), list(totals), last, feed.start(signs), *writer.start()),
        (feed.scanned(), kept, list(ct_ys)),
        reverse=True,
    )
    buffers, rest = writer.finish(buffers, waiting), iter(stacked)
    ct_layers = [buffers[i] if i in buffers else next(rest) for i in active.layers]
    return ct_carry, ct_consts, ct_layers


def _writer(
    stack: Stack,
    body: LinearizedBody,
    row: BackwardRow | None,
    places: Mapping[int, HostGradients],
    plan: HostPlan,
) -> Writer:
    """What writes the gradients in `places`, by the number of the body's input."""
    if row is None or not places:
        return Writer(stack, {}, [], {})
    numbers = dict(zip(body.active_inputs, row.gradients, strict=True))
    made = {i: numbers[i] for i in places}
    avals = {
        i: row.avals[n] if isinstance(n, int) else aval_of(n.val)
        for i, n in made.items()
    }
    sizes = {i: aval.size * aval.dtype.itemsize for i, aval in avals.items()}
    late = late_gradients(row.steps, made, sizes) if plan.late else []
    return Writer(stack, places, late, avals)


class Activity:
    """Which inputs and outputs of a stack are differentiated, part by part.

    `consts`, `carry` and `layers` are numbers of the body's inputs; `carry_out` and
    `y_out` count the outputs of each kind.
    """

    def __init__(self, stack: Stack, body: LinearizedBody):
        active, first = body.active_inputs, stack.first_layer_input
        self.consts = [i for i in active if i < stack.const_count]
        self.carry = [i for i in active if i in stack.carry_inputs]
        self.layers = [i for i in active if i >= first]
        outputs = body.active_outputs
        self.carry_out = [k for k in outputs if k < stack.carry_count]
        self.y_out = [k - stack.carry_count for k in outputs if k >= stack.carry_count]


def _scan(stack: Stack, body: Any, init: Any, xs: Any, reverse: bool = False) -> Any:
    reverse = stack.reverse != reverse
    with jax.named_scope(LOOP_SCOPE):
        return jax.lax.scan(body, init, xs, length=stack.count, reverse=reverse)
