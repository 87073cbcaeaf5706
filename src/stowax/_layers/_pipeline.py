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
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._jax import zeros
from .._records._stages import Options
from ._boundary import Boundary, emit_backward, emit_forward, emit_plain
from ._groups import runs_again
from ._linearize import Linearize, LinearizedBody
from ._passes import Activity
from ._stack import Choose, Stack, Stored, moves, scope_name

__all__ = ["Choose", "Running", "Stack", "Stored", "run_stack", "scope_name"]


@jax.tree_util.register_static
class _Static:
    """Carries what is known while tracing from the forward to the backward rule."""

    def __init__(self, value: Any):
        self.value = value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """How all stacks of a program run: `choose` says what each stores.

    With `label`, the operations of every body run under a named scope each (see
    `scope_name`). With a `boundary`, each of a stack's loops is one `jit` equation of
    the traced step, and `boundary` receives, under that equation's name, what is needed
    to emit the loop again with weights and gradients in host memory (see `Emission`).
    """

    choose: Choose
    options: Options
    linearize: Linearize
    label: bool = False
    boundary: Boundary = None


def run_stack(
    stack: Stack,
    consts: Sequence[Any],
    carry: Sequence[Any],
    per_layer: Sequence[Any],
    running: Running,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs `stack` so that its backward pass stores what a choice says.

    **Arguments:** `per_layer` holds one stacked array per input, or, for a `separate`
    stack, one sequence of `count` arrays per input. **Returns:** final carry, stacked
    per-layer outputs (a list each where they run `as_written`), and the constants,
    handed through: what reads them later should read these (see `LinearizedBody`).
    """
    stack = stack.under(running.options)
    boundary = running.boundary
    split = stack.const_count, stack.const_count + stack.carry_count

    def by_kind(inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        return inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]

    @jax.custom_vjp
    def run(consts: Any, carry: Any, per_layer: Any) -> tuple[Any, Any, Any]:
        carry, ys = emit_plain(stack, consts, carry, per_layer, boundary)
        return carry, ys, consts

    def forward(*inputs: Any) -> tuple[Any, Any]:
        consts, carry, per_layer = inputs
        values = jax.tree.map(lambda p: p.value, inputs, is_leaf=_is_primal)
        leaves = [*consts, *carry, *per_layer]
        active = [i for i, leaf in enumerate(leaves) if _is_perturbed(leaf)]
        carried = split[0], stack.carry_count
        blocks = 0 if stack.tiles else running.options.layer_blocks
        body = running.linearize(stack.body, active, carried, blocks)
        mine = _for_inputs(stack, body)
        consts, carry, per_layer = values
        stored = dict(running.choose(mine, body))
        early = running.options.early_gradients
        if early and (boundary is not None or moves(stored)):
            body = body.early
        carry, ys, kept = emit_forward(
            mine, body, stored, *values, label=running.label, boundary=boundary
        )
        static = _Static((mine, body, stored))
        return (carry, ys, list(consts)), [static, consts, per_layer, kept]

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
        static, consts, per_layer, kept = residuals
        mine, body, stored = static.value
        active = Activity(mine, body)
        of_carry, of_ys, of_consts = cotangents
        cotangents = (
            [_instantiate(of_carry[k]) for k in active.carry_out],
            [_instantiated(of_ys[k]) for k in active.y_out],
            [_instantiate(of_consts[i]) for i in active.consts],
        )
        of_carry, of_consts, of_layers = emit_backward(
            mine, body, stored, consts, per_layer, kept, cotangents, boundary
        )
        if stack.separate:  # an array per layer, as it was given
            of_layers = [[g[layer] for layer in range(stack.count)] for g in of_layers]
        grads = of_carry, of_consts, of_layers
        return by_kind(_spread(mine, active, per_layer, grads))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(list(consts), list(carry), [_as_sequence(stack, x) for x in per_layer])


def _for_inputs(stack: Stack, body: LinearizedBody) -> Stack:
    """The stack under a name that says which inputs are differentiated.

    A loss may be differentiated by its weights here and by its inputs there: the bodies
    differ, and a plan has decisions for each. Layers with effects are in no groups.
    """
    inputs = sum(1 << i for i in body.active_inputs)
    group = stack.group if stack.group and runs_again(stack, body) else 0
    return dataclasses.replace(stack, name=f"{stack.name}-{inputs:x}", group=group)


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _is_perturbed(leaf: Any) -> bool:
    """Whether an input is differentiated, or one of a list of them."""
    leaves = leaf if isinstance(leaf, list) else [leaf]
    return any(primal.perturbed for primal in leaves)


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


def _instantiated(of_layers: Any) -> Any:
    """The cotangent of a per-layer output, an array or a list of one per layer."""
    if isinstance(of_layers, list):
        return [_instantiate(ct) for ct in of_layers]
    return _instantiate(of_layers)


def _instantiate(cotangent: Any) -> Any:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return zeros(cotangent.aval)
    return cotangent
