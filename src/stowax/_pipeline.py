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
  fetched
  in the one that reads them: what is made early is read late in the backward pass. The
  next iteration's value would overwrite a carried one soon, and the copy would have to
  hurry.

A model written as a Python loop has one array per layer where a scan has stacked ones.
The loop over the layer number then takes the layer's own arrays by `lax.switch`, which
copies one layer's worth, and never stacks them. Straight-line code would not do: there
XLA folds the round trip through the host away whenever it believes that there is room.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _jax
from ._host_slots import (
    empty_layers,
    empty_slots,
    read_slot,
    staged,
    write_layer,
    write_slot,
)
from ._jaxpr import evaluate
from ._linearize import LinearizedBody, linearize_body

Stored = Mapping[int, str]
"""Value number → "keep", "offload" or "offload early" (see above)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A body that runs `count` times, fed by its own carry.

    The body's inputs are constants, carry and per-layer inputs, in this order; its
    outputs are the carry and per-layer outputs. `separate` per-layer inputs come as one
    array per layer (an unrolled model), others stacked along their first axis (a scan).
    `source` says where the user wrote it. With `row_major`, stored values lie in memory
    as their shapes say, whatever the compiler would like (see `lay_out`).
    """

    name: str
    source: str
    count: int
    body: Any
    const_count: int
    carry_count: int
    reverse: bool = False
    separate: bool = False
    row_major: bool = False

    def lay_out(self, value: Any) -> Any:
        """`value`, to be stored or just read, in the order in which it is stored.

        The two loops are compiled one after the other. Where the forward one would
        rather write a value transposed, and the backward one read it straight, the
        compiler transposes the whole stack between them: both are alive then.
        """
        return _jax.row_major(value) if self.row_major and value.ndim > 1 else value

    @property
    def carry_inputs(self) -> range:
        """Numbers of the body inputs that are carried."""
        return range(self.const_count, self.const_count + self.carry_count)


Choose = Callable[[Stack, LinearizedBody], Stored]
"""Decides what is stored, once the differentiated inputs are known."""


@jax.tree_util.register_static
class _Static:
    """Carries what is known while tracing from the forward to the backward rule."""

    def __init__(self, value: Any):
        self.value = value


def scope_name(stack: str, position: int) -> str:
    """Named scope of the forward operation `position`, in a labelled trace."""
    return f"stowax.value.{stack}.{position}"


def run_stack(
    stack: Stack,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
    *,
    choose: Choose,
    keep_checkpoint: Callable[[Any], bool],
    row_major: bool = False,
    label: bool = False,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs `stack` so that its backward pass stores what `choose` says.

    **Arguments:** `per_layer` holds one stacked array per input, or, for a `separate`
    stack, one sequence of `count` arrays per input. **Returns:** final carry, the
    per-layer outputs stacked along their first axis, and the constants, handed through:
    what reads them later should read these (see `LinearizedBody`: their cotangents are
    then added in the order of plain JAX).
    """
    stack = dataclasses.replace(stack, row_major=row_major)
    split = stack.const_count, stack.const_count + stack.carry_count

    def parts(inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        return inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]

    @jax.custom_vjp
    def run(consts: Any, carry: Any, per_layer: Any) -> tuple[Any, Any, Any]:
        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            out = evaluate(stack.body, [*consts, *carry, *_layer(stack, per_layer, x)])
            return out[: stack.carry_count], out[stack.carry_count :]

        carry, ys = _scan(stack, body, carry, _scanned(stack, per_layer))
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
        body = linearize_body(
            stack.body, active, (split[0], stack.carry_count), keep_checkpoint
        )
        mine = _for_inputs(stack, body.active_inputs)
        return _forward(mine, body, choose(mine, body), label, *values)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        static, *arrays = residuals
        mine, body, stored = static.value
        grads = _backward(mine, body, stored, arrays, cotangents)
        return parts(grads)

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


def _scan(
    stack: Stack, body: Callable, init: Any, xs: Any, reverse: bool = False
) -> Any:
    return jax.lax.scan(
        body, init, xs, length=stack.count, reverse=stack.reverse != reverse
    )


def _scanned(stack: Stack, per_layer: Sequence[Any]) -> tuple[Any, list[Any]]:
    """What a scan hands to each iteration: the layer's number, its stacked inputs."""
    return jnp.arange(stack.count), [] if stack.separate else list(per_layer)


def _layer(stack: Stack, per_layer: Sequence[Any], x: tuple[Any, Any]) -> list[Any]:
    """The per-layer inputs of one iteration, given what the scan hands to it."""
    number, stacked = x
    if not stack.separate:
        return list(stacked)
    if not per_layer:
        return []
    with jax.named_scope("stowax.layer"):
        branches = [
            lambda layer=layer: tuple(xs[layer] for xs in per_layer)
            for layer in range(stack.count)
        ]
        return list(jax.lax.switch(number, branches))


def _forward(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    label: bool,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
) -> tuple[Any, Any]:
    keep, late, early = _ways(stored)
    program = body.forward
    wanted = list(dict.fromkeys([*body.output_numbers, *keep, *late, *early]))

    def scope(position: int) -> Any:
        return jax.named_scope(scope_name(stack.name, position))

    def scope_of(number: int) -> str:
        return f"stowax.offload.{stack.name}.{number}"

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        carry, pending, slots, kept = state
        slots = dict(slots)
        for n in late:
            moved = stack.lay_out(staged(pending[n], x[0]))
            slots[n] = write_slot(slots[n], moved, x[0], scope_of(n))
        inputs = [*consts, *carry, *_layer(stack, per_layer, x)]
        values = program.run(
            wanted,
            dict(enumerate(inputs)),
            effects=True,
            scope=scope if label else None,
        )
        out = body.outputs(values)
        for n in early:
            made = stack.lay_out(values[n])
            slots[n] = write_slot(slots[n], made, x[0], scope_of(n))
        following = {n: values[n] for n in late}
        kept = {n: write_layer(kept[n], stack.lay_out(values[n]), x[0]) for n in keep}
        carry_out, ys = out[: stack.carry_count], out[stack.carry_count :]
        return (carry_out, following, slots, kept), ys

    nothing = {n: _zeros(program.avals[n]) for n in late}
    slots = {n: empty_slots(stack.count, program.avals[n]) for n in [*late, *early]}
    kept = {n: empty_layers(stack.count, program.avals[n]) for n in keep}
    (carry, last, slots, kept), ys = _scan(
        stack, step, (list(carry), nothing, slots, kept), _scanned(stack, per_layer)
    )
    residuals = (
        _Static((stack, body, dict(stored))),
        list(consts),
        list(per_layer),
        [kept[n] for n in keep],
        slots,
        last,
    )
    return (carry, ys, list(consts)), residuals


def _backward(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    residuals: Sequence[Any],
    cotangents: Any,
) -> list[Any]:
    consts, per_layer, kept, slots, last = residuals
    keep, late, early = _ways(stored)
    first_layer = stack.const_count + stack.carry_count
    active = body.active_inputs
    active_consts = [i for i in active if i < stack.const_count]
    active_carry = [i for i in active if i in stack.carry_inputs]
    active_layer = [i for i in active if i >= first_layer]
    carry_out = [k for k in body.active_outputs if k < stack.carry_count]
    y_out = [k - stack.carry_count for k in body.active_outputs if k not in carry_out]
    carry_cotangents, y_cotangents, const_cotangents = cotangents
    ct_carry = [_instantiate(carry_cotangents[k]) for k in carry_out]
    ct_ys = [_instantiate(y_cotangents[k]) for k in y_out]

    def fetch(number: int, layer: Any) -> Any:
        scope = f"stowax.fetch.{stack.name}.{number}"
        return stack.lay_out(read_slot(slots[number], layer, scope))

    def step(state: Any, xs: Any) -> tuple[Any, Any]:
        ct_carry, ct_consts, current = state
        x, kept, ct_ys = xs
        kept = [stack.lay_out(v) for v in kept]
        following = {n: fetch(n, x[0]) for n in late}
        at_hand = dict(enumerate(consts))
        at_hand |= dict(enumerate(_layer(stack, per_layer, x), start=first_layer))
        at_hand |= dict(zip(keep, kept, strict=True))
        at_hand |= current
        at_hand |= {n: fetch(n, x[0]) for n in early}
        values = body.forward.run(body.residuals, at_hand)
        grads = body.pull_back(values, [*ct_carry, *ct_ys], ct_consts)
        by_input = dict(zip(active, grads, strict=True))
        ct_consts = [by_input[i] for i in active_consts]
        carried = [by_input[i] for i in active_carry]
        following = {n: staged(value, x[0]) for n, value in following.items()}
        return (carried, ct_consts, following), [by_input[i] for i in active_layer]

    totals = [_instantiate(const_cotangents[i]) for i in active_consts]
    (ct_carry, ct_consts, _), ct_layers = _scan(
        stack,
        step,
        (ct_carry, totals, last),
        (_scanned(stack, per_layer), kept, ct_ys),
        reverse=True,
    )
    grads: list[Any] = [None] * (first_layer + len(per_layer))
    for i, grad in zip(active_consts + active_carry, ct_consts + ct_carry, strict=True):
        grads[i] = grad
    for i, grad in zip(active_layer, ct_layers, strict=True):
        grads[i] = (
            [grad[layer] for layer in range(stack.count)] if stack.separate else grad
        )
    for j, xs in enumerate(per_layer):
        if stack.separate and grads[first_layer + j] is None:
            grads[first_layer + j] = [None] * len(xs)
    return grads


def _ways(stored: Stored) -> tuple[list[int], list[int], list[int]]:
    """The numbers of the values that are kept, offloaded late and offloaded early."""
    ways = ("keep", "offload", "offload early")
    keep, late, early = (
        sorted(n for n, how in stored.items() if how == way) for way in ways
    )
    return keep, late, early


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)


def _instantiate(cotangent: Any) -> Any:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return _zeros(cotangent)
    return cotangent
