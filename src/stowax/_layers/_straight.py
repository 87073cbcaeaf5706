"""The layers of a Python loop as they are written: one after the other, no loop.

What a person gets by `jax.checkpoint` around each block, with any set of values kept.
Nothing of a layer moves to the host here: in straight-line code XLA folds the round
trip away. But no weights are picked by layer, no gradients stacked and taken apart, and
the compiler fuses across layers. The passes do what those of `_passes` do, in the same
order, so numbers are the same to the bit.

What is computed again is computed of operands behind a barrier that also holds the
layer's cotangents. Without one, XLA would find that the forward pass has computed the
same, and keep that; and nothing is computed again before the backward pass is there.
What a segment gives back is behind one, too. A gradient that waits for its update would
else be computed at the end, of values that stay until then.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._jax import barrier
from .._jaxprs._jaxpr import evaluate
from ._linearize import LinearizedBody
from ._passes import Activity, Cotangents
from ._stack import BACKWARD_SCOPE, LOOP_SCOPE, Stack, Stored, scope_name, ways

Straight = list[dict[int, Any]]
"""What the forward pass leaves for the backward one: by layer, what is kept."""


def plain_straight(
    stack: Stack, consts: Sequence[Any], carry: Sequence[Any], per_layer: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The final carry, and the per-layer outputs as a list each; nothing stored."""
    carry, made = list(carry), []
    with jax.named_scope(LOOP_SCOPE):
        for layer in range(stack.count):
            given = [*consts, *carry, *(x[layer] for x in per_layer)]
            out = evaluate(stack.body, given)
            carry = out[: stack.carry_count]
            made.append(out[stack.carry_count :])
    return carry, _by_output(made)


def forward_straight(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
    *,
    label: bool = False,
) -> tuple[list[Any], list[Any], Straight]:
    """The final carry, the per-layer outputs as a list each, and what is stored."""
    keep, *moving = ways(stored)
    assert not any(moving), "straight-line code keeps and recomputes only"
    if stack.segment:  # what others read is at hand, whatever is decided
        keep = list(dict.fromkeys([*keep, *body.output_numbers]))
    wanted = list(dict.fromkeys([*body.output_numbers, *keep]))

    def scope(position: int) -> Any:
        return jax.named_scope(scope_name(stack.name, position))

    carry, made, kept = list(carry), [], []
    with jax.named_scope(LOOP_SCOPE):
        for layer in range(stack.count):
            given = [*consts, *carry, *(x[layer] for x in per_layer)]
            values = body.forward.run(
                wanted,
                dict(enumerate(given)),
                effects=True,
                scope=scope if label else None,
            )
            out = body.outputs(values)
            carry = out[: stack.carry_count]
            made.append(out[stack.carry_count :])
            kept.append({n: values[n] for n in keep})
    return carry, _by_output(made), kept


def backward_straight(
    stack: Stack,
    body: LinearizedBody,
    consts: Sequence[Any],
    per_layer: Sequence[Any],
    kept: Straight,
    cotangents: Cotangents,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Cotangents of the active carry, constants and per-layer inputs, in that order.

    Those of per-layer inputs are a list each.
    """
    active = Activity(stack, body)
    ct_carry, ct_ys, totals = (list(part) for part in cotangents)
    made: list[list[Any]] = []
    scope = f"{LOOP_SCOPE}/{BACKWARD_SCOPE}.{stack.name}"
    with jax.named_scope(scope if stack.among_segments else LOOP_SCOPE):
        for layer in reversed(range(stack.count)):
            inputs = enumerate(per_layer, start=stack.first_layer_input)
            at_hand = dict(enumerate(consts)) | {i: x[layer] for i, x in inputs}
            at_hand |= kept[layer]
            given = [*ct_carry, *(ct[layer] for ct in ct_ys)]
            after = made[-1] if made else []
            values, given, after = _residuals(body, at_hand, given, after)
            made[-1:] = [after] if made else []
            grads = body.pull_back(values, given, totals)
            if stack.segment and not at_hand.keys() >= {*body.residuals}:
                grads = barrier(grads)
            by_input = dict(zip(body.active_inputs, grads, strict=True))
            totals = [by_input[i] for i in active.consts]
            ct_carry = [by_input[i] for i in active.carry]
            made.append([by_input[i] for i in active.layers])
    return ct_carry, totals, _by_output(made[::-1])


def _residuals(
    body: LinearizedBody,
    at_hand: Mapping[int, Any],
    cotangents: list[Any],
    after: list[Any],
) -> tuple[dict[int, Any], list[Any], list[Any]]:
    """What a layer's backward pass reads, its cotangents, and what comes before it.

    Behind the barrier, as what is to be there `after` which something is computed
    again: the gradients of the layer before. Left alone, XLA computes these at the end,
    and keeps for them what each layer has computed again.
    """
    program = body.forward
    again = [n for n in body.residuals if n not in at_hand]
    values = {n: at_hand[n] for n in body.residuals if n in at_hand}
    run = program.closure(again, {**program.constants(), **at_hand})
    read = dict.fromkeys(i for k in run for i in program.nodes[k].inputs)
    operands = [i for i in read if i is not None and i in at_hand]
    if operands:
        held, cotangents, after = barrier(
            ([at_hand[i] for i in operands], cotangents, after)
        )
        at_hand = {**at_hand, **dict(zip(operands, held, strict=True))}
    return values | program.run(again, at_hand), cotangents, after


def _by_output(by_layer: Sequence[Sequence[Any]]) -> list[Any]:
    """Lists of one value per layer, of lists of one value per output."""
    return [list(values) for values in zip(*by_layer, strict=True)]
