"""The scan that puts a plan into effect: copies have most of a layer's time to hide in.

A stack of repeated bodies becomes a `custom_vjp` around two scans of our own.

*Forward.* Each iteration runs the body and hands out the values that are kept, stacked
on the device. *Backward.* A scan in reverse: each iteration runs the body's backward
program. What was not stored is computed again from what is at hand; what nobody reads
does not run. No checkpoint names and no policies are involved, so there is nothing that
could silently match nothing.

Offloaded values go to host memory in one of two ways, after where in the layer they
arise:

- *Late* ones ("offload") are carried, on the device, into the next iteration and copied
  there; host slot i holds layer i-1, and the last layer's never leave the device. The
  backward scan likewise starts the copy back of what the next iteration reads. A copy
  has the time until the body makes, or last reads, the value that takes the same place
  in the carry: for a value made late, nearly a layer.
- *Early* ones ("offload early") are copied in the iteration that makes them, and
  fetched in the one that reads them: what is made early is read late in the backward
  pass. The next iteration's value would overwrite a carried one soon, and the copy
  would have to hurry.
- *Early* ones that are read at once in the backward pass ("offload ahead"), because
  what it begins with is computed again from them, are copied like early ones, and
  fetched like late ones, for the next iteration. The last layer's stay on the device.

What is fetched for the next iteration is moved aside when the layer is done, and not
before: the compiler, who knows of no queue on the link, would wait for it anywhere.

A model written as a Python loop has one array per layer where a scan has stacked ones.
The loop over the layer number then takes the layer's own arrays by `lax.switch`, which
copies one layer's worth, and never stacks them. Straight-line code would not do: there
XLA folds the round trip through the host away whenever it believes that there is room.

A stack may run as two *parts*, each with decisions of its own: what one more value of
all layers would not fit into is filled with that value of some. Two forward loops, and
two backward ones: the gradients of weights are written in place, into the same arrays.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import jax

from .. import _jax
from ._boundary import (
    Boundary,
    Emission,
    emit_backward,
    emit_forward,
    emit_plain,
)
from ._host_slots import empty_array
from ._linearize import Linearize, LinearizedBody
from ._passes import Activity, Kept, zeros
from ._stack import Choose, Stack, Stored, parts_of, scope_name

__all__ = ["Choose", "Stack", "Stored", "run_stack", "scope_name"]


@jax.tree_util.register_static
class _Static:
    """Carries what is known while tracing from the forward to the backward rule."""

    def __init__(self, value: Any):
        self.value = value


def run_stack(
    stack: Stack,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
    *,
    choose: Choose,
    linearize: Linearize,
    row_major: bool = False,
    parts: Mapping[str, int] = types.MappingProxyType({}),
    label: bool = False,
    boundary: MutableMapping[str, Emission] | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs `stack` so that its backward pass stores what `choose` says.

    **Arguments:** `per_layer` holds one stacked array per input, or, for a `separate`
    stack, one sequence of `count` arrays per input. **Returns:** final carry, the
    per-layer outputs stacked along their first axis, and the constants, handed through:
    what reads them later should read these (see `LinearizedBody`: their cotangents are
    then added in the order of plain JAX). Where `parts` has the stack's name, with the
    runs of the first part, it runs as two, and `choose` decides for each.

    With a `boundary`, each of the stack's loops is one `jit` equation of the traced
    step, and `boundary` receives, under that equation's name, what is needed to emit
    the loop again with weights and gradients in host memory (see `Emission`).
    """
    stack = dataclasses.replace(stack, row_major=row_major)
    split = stack.const_count, stack.const_count + stack.carry_count

    def by_kind(inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        return inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]

    @jax.custom_vjp
    def run(consts: Any, carry: Any, per_layer: Any) -> tuple[Any, Any, Any]:
        carry, ys = emit_plain(stack, consts, carry, per_layer, boundary)
        return carry, ys, consts

    def forward(consts: Any, carry: Any, per_layer: Any) -> tuple[Any, Any]:
        inputs = (consts, carry, per_layer)
        values = jax.tree.map(lambda p: p.value, inputs, is_leaf=_is_primal)
        layers = [
            any(p.perturbed for p in leaf) if stack.separate else leaf.perturbed
            for leaf in per_layer
        ]
        perturbed = [*(p.perturbed for p in consts), *(p.perturbed for p in carry)]
        active = [i for i, flag in enumerate([*perturbed, *layers]) if flag]
        carried = split[0], stack.carry_count
        body = linearize(stack.body, active, carried)
        mine = _for_inputs(stack, body.active_inputs)
        consts, carry, per_layer = values
        ran, left, ys = [], [], []
        emit = functools.partial(emit_forward, label=label, boundary=boundary)
        for part in parts_of(mine, parts.get(stack.name)):
            stored, inputs = choose(part, body), part.inputs_of(per_layer)
            carry, ys, kept = emit(part, body, stored, consts, carry, inputs)
            ran.append((part, dict(stored)))
            left.append(kept)
        static = _Static((mine, body, ran))
        return (carry, ys, list(consts)), [static, consts, per_layer, left]

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        static, consts, per_layer, left = residuals
        mine, body, ran = static.value
        active = Activity(mine, body)
        of_carry, of_ys, of_consts = cotangents
        wanted = (
            [_instantiate(of_carry[k]) for k in active.carry_out],
            [_instantiate(of_ys[k]) for k in active.y_out],
            [_instantiate(of_consts[i]) for i in active.consts],
        )
        grads = _pull_back(body, ran, left, consts, per_layer, wanted, boundary)
        return by_kind(_spread(mine, active, per_layer, grads))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(list(consts), list(carry), [_as_sequence(stack, x) for x in per_layer])


def _for_inputs(stack: Stack, active_inputs: Sequence[int]) -> Stack:
    """The stack under a name that says which inputs are differentiated.

    A loss may be differentiated by its weights here and by its inputs there: the bodies
    differ, and a plan has decisions for each.
    """
    inputs = sum(1 << i for i in active_inputs)
    return dataclasses.replace(stack, name=f"{stack.name}-{inputs:x}")


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _as_sequence(stack: Stack, x: Any) -> Any:
    return list(x) if stack.separate else x


def _spread(
    stack: Stack,
    active: Activity,
    per_layer: Sequence[Any],
    found: tuple[list[Any], list[Any], list[Any]],
) -> list[Any]:
    """Cotangents of every input of the stack, in the form in which it is given."""
    ct_carry, ct_consts, ct_layers = found
    grads: list[Any] = [None] * (stack.first_layer_input + len(per_layer))
    numbers = active.consts + active.carry
    for i, grad in zip(numbers, ct_consts + ct_carry, strict=True):
        grads[i] = grad
    for i, grad in zip(active.layers, ct_layers, strict=True):
        grads[i] = grad
    for j, xs in enumerate(per_layer, start=stack.first_layer_input):
        if stack.separate and grads[j] is None:
            grads[j] = [None] * len(xs)
    return grads


def _pull_back(
    body: LinearizedBody,
    ran: Sequence[tuple[Stack, Stored]],
    left: Sequence[Kept],
    consts: Any,
    per_layer: Sequence[Any],
    wanted: tuple[list[Any], list[Any], list[Any]],
    boundary: Boundary,
) -> tuple[list[Any], list[Any], list[Any]]:
    """The backward loops of a stack's parts, the last one's first.

    **Arguments:** `ran` are the parts with what they store, `left` what each has left;
    `wanted` and the result as for `run_backward`, gradients of per-layer inputs in the
    form of the inputs.
    """
    carried, of_ys, totals = wanted
    active = Activity(ran[0][0], body)
    found: list[Any] = []
    for (part, stored), kept in zip(reversed(ran), reversed(left), strict=True):
        whole = found[-1] if found else _places(part, active, per_layer)
        carried, totals, layers = emit_backward(
            part,
            body,
            stored,
            consts,
            part.inputs_of(per_layer),
            kept,
            (carried, of_ys, totals, whole if part.is_part else []),
            boundary,
        )
        found.append(layers)
    return carried, totals, _all_layers([part for part, _ in ran], found[::-1])


def _places(part: Stack, active: Activity, per_layer: Sequence[Any]) -> list[Any]:
    """Arrays for the gradients of all layers; every part writes its own."""
    if not part.is_part:
        return []
    wholes = [per_layer[i - part.first_layer_input] for i in active.layers]
    types = [_jax.aval_of(whole) for whole in wholes]
    return [empty_array(t.shape, t, _jax.explicit_sharding(t)) for t in types]


def _all_layers(ran: Sequence[Stack], found: Sequence[list[Any]]) -> list[Any]:
    """Gradients of the per-layer inputs, of all parts, in the form of the inputs."""
    if not ran[0].separate:
        return found[0]
    return [
        [
            gradient[layer]
            for part, gradient in zip(ran, of_input, strict=True)
            for layer in range(part.count)
        ]
        for of_input in zip(*found, strict=True)
    ]


def _instantiate(cotangent: Any) -> Any:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return zeros(cotangent)
    return cotangent
