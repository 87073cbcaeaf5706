"""Layers in groups: of each group only the input of its first layer is stored.

Of `n` layers in groups of `k`, a forward pass leaves `n / k` inputs. Before a group's
backward pass its layers run forward once more, and leave what `Stored` names, of `k`
layers at a time. With `k` near the square root of `n` memory grows as that root, for
one forward pass more (Chen et al., *Training Deep Nets with Sublinear Memory Cost*,
2016, arXiv:1604.06174).

Weights are read by the layer's number in both loops of a group, and gradients written
so: slices of a group's weights would be copies. Layers run in the order in which they
would without groups, and so do sums of constants' cotangents: numbers are the same to
the bit. The last group may be shorter; it runs before the loop over the others.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ._host_feed import Feed
from ._host_slots import empty_layers, write_layer
from ._linearize import LinearizedBody
from ._passes import Activity, Cotangents
from ._stack import LOOP_SCOPE, Stack, Stored

Starts = list[Any]
"""What the forward pass leaves: of each carried value, its stack of groups' inputs."""


def runs_again(stack: Stack, body: LinearizedBody) -> bool:
    """Whether a layer may run forward twice: no effect is in what that takes."""
    program = body.forward
    carried = [n for n in program.outputs[: stack.carry_count] if isinstance(n, int)]
    at_hand = range(program.input_count + program.const_count)
    run = program.closure([*carried, *body.residuals], at_hand)
    return not any(_jax.has_effects(program.nodes[k].equation) for k in run)


def forward_groups(
    stack: Stack,
    body: LinearizedBody,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
) -> tuple[Sequence[Any], Sequence[Any], Starts]:
    """The final carry, the stacked per-layer outputs, and the groups' inputs."""
    program, size = body.forward, stack.group
    feed = Feed(stack, per_layer, {})
    # A layer writes its input where the next group's is to be, whose own comes last.
    places = -(-(stack.count - 1) // size) + 1
    starts = [empty_layers(places, _jax.aval_of(value)) for value in carry]

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        carry, starts = state
        place = (_turn(stack, x[0]) + size - 1) // size
        starts = [
            write_layer(there, stack.lay_out(value), place)
            for there, value in zip(starts, carry, strict=True)
        ]
        at_hand = dict(enumerate([*consts, *carry])) | feed.inputs(x, {})
        values = program.run(body.output_numbers, at_hand, effects=True)
        out = body.outputs(values)
        return (out[: stack.carry_count], starts), out[stack.carry_count :]

    with jax.named_scope(LOOP_SCOPE):
        (carry, starts), ys = jax.lax.scan(
            step, (list(carry), starts), feed.scanned(), reverse=stack.reverse
        )
    return carry, ys, starts


def backward_groups(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    consts: Sequence[Any],
    per_layer: Sequence[Any],
    starts: Starts,
    cotangents: Cotangents,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Cotangents of the active carry, constants and per-layer inputs, in that order.

    Those of per-layer inputs are stacked, also for a `separate` stack.
    """
    group = _Group(stack, body, stored, consts, per_layer, cotangents[1])
    ct_carry, _, totals = cotangents
    state = list(ct_carry), list(totals), group.empty_gradients()
    whole, rest = divmod(stack.count, stack.group)

    def step(state: Any, number: Any) -> tuple[Any, None]:
        return group.run(state, number, starts, stack.group), None

    with jax.named_scope(LOOP_SCOPE):
        if rest:
            state = group.run(state, jnp.int32(whole), starts, rest)
        numbers = jnp.arange(whole, dtype=jnp.int32)
        state, _ = jax.lax.scan(step, state, numbers, reverse=True)
    return state


def _turn(stack: Stack, layer: Any) -> Any:
    """When a layer runs forward, counted from 0; the layer that runs then, likewise."""
    layer = jnp.int32(layer)
    return stack.count - 1 - layer if stack.reverse else layer


class _Group:
    """The backward pass of one group of layers, its forward pass before it."""

    def __init__(
        self,
        stack: Stack,
        body: LinearizedBody,
        stored: Stored,
        consts: Sequence[Any],
        per_layer: Sequence[Any],
        ct_ys: Sequence[Any],
    ):
        self.stack, self.body, self.consts, self.ct_ys = stack, body, consts, ct_ys
        self.keep = sorted(stored)
        self.active = Activity(stack, body)
        self.feed = Feed(stack, per_layer, {})

    def empty_gradients(self) -> list[Any]:
        """Memory for the gradients of all layers' inputs."""
        made = _jax.open_jaxpr(self.body.backward).outvars
        avals = dict(zip(self.body.active_inputs, made, strict=True))
        return [
            empty_layers(self.stack.count, avals[i].aval) for i in self.active.layers
        ]

    def run(self, state: Any, number: Any, starts: Starts, length: int) -> Any:
        """The `state` of a backward pass after group `number`, of `length` layers."""
        first = number * self.stack.group
        kept = self._forward(first, [_at(x, number) for x in starts], length)

        def step(state: Any, x: Any) -> tuple[Any, None]:
            turn, kept = x
            return self._backward(state, first + turn, kept), None

        turns = jnp.arange(length, dtype=jnp.int32)
        return jax.lax.scan(step, state, (turns, kept), reverse=True)[0]

    def _forward(self, first: Any, carry: list[Any], length: int) -> list[Any]:
        """What the layers of a group keep, stacked."""
        stack, program = self.stack, self.body.forward
        outputs = program.outputs[: stack.carry_count]
        carried = [n for n in outputs if isinstance(n, int)]
        wanted = list(dict.fromkeys([*carried, *self.keep]))

        def step(state: Any, turn: Any) -> tuple[Any, None]:
            carry, kept = state
            at_hand = dict(enumerate([*self.consts, *carry]))
            at_hand |= self._inputs(_turn(stack, first + turn))
            values = program.run(wanted, at_hand)
            kept = [
                write_layer(there, stack.lay_out(values[n]), turn)
                for there, n in zip(kept, self.keep, strict=True)
            ]
            return (program.read_outputs(values, stack.carry_count), kept), None

        carry = [stack.lay_out(value) for value in carry]
        kept = [empty_layers(length, program.avals[n]) for n in self.keep]
        turns = jnp.arange(length, dtype=jnp.int32)
        return jax.lax.scan(step, (carry, kept), turns)[0][1]

    def _backward(self, state: Any, turn: Any, kept: Sequence[Any]) -> Any:
        stack, body, active = self.stack, self.body, self.active
        ct_carry, totals, gradients = state
        layer = _turn(stack, turn)
        at_hand = dict(enumerate(self.consts)) | self._inputs(layer)
        kept = [stack.lay_out(value) for value in kept]
        at_hand |= dict(zip(self.keep, kept, strict=True))
        values = body.forward.run(body.residuals, at_hand)
        given = [*ct_carry, *(_at(ct, layer) for ct in self.ct_ys)]
        grads = body.pull_back(values, given, totals)
        by_input = dict(zip(body.active_inputs, grads, strict=True))
        gradients = [
            write_layer(there, by_input[i], layer)
            for there, i in zip(gradients, active.layers, strict=True)
        ]
        ct_carry = [by_input[i] for i in active.carry]
        return ct_carry, [by_input[i] for i in active.consts], gradients

    def _inputs(self, layer: Any) -> dict[int, Any]:
        """A layer's own inputs, by number."""
        separate = self.stack.separate
        stacked = () if separate else (_at(x, layer) for x in self.feed.device.values())
        return self.feed.inputs((layer, list(stacked)), {})


def _at(stacked: Any, place: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stacked, place, 0, keepdims=False)
