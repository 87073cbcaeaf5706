"""A stack's loops as equations that can be found again, and emitted again.

A step is first traced with everything on the device; derivatives exist only there. To
run it with layers' parameters in host memory, its jaxpr is evaluated once more. So each
loop of a stack stands in the jaxpr as one `jit` equation (its `name` parameter begins
with `stowax_`), and a registry holds an `Emission` for every such name:

    registry = {}
    ... trace with Rewriter(..., boundary=registry) ...
    def visit(equation, values):
        emission = registry.get(equation.params.get("name"))
        if emission is not None:
            return emission.emit(values, to_host=...)

`values` are the equation's inputs, where those that are per-layer inputs may be
`HostArray`s. Loops come in three kinds, and their inputs and outputs in this order:

- "forward": constants, carry, per-layer inputs → carry, per-layer outputs, kept values,
  host slots, the last layer's late values, a scalar that tells when it is done.
- "backward": constants, per-layer inputs, kept values, host slots, late values,
  that scalar, cotangents of the carry, of the per-layer outputs, totals of the
  constants → cotangents of the carry, of the constants, of the per-layer inputs, all
  active ones only.
- "plain" (not differentiated): as forward, and nothing is stored.

Per-layer inputs of an unrolled model come layer by layer: all layers of the first
input, then all of the second. Gradients always come stacked; an unrolled model's are
taken apart after the equation.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._jaxprs._jaxpr import spec_of
from ._groups import backward_groups, forward_groups
from ._host_layers import HostArray, HostLayers, Rows, host_layers
from ._linearize import LinearizedBody
from ._passes import (
    NOTHING,
    Activity,
    HostPlan,
    run_backward,
    run_forward,
    run_plain,
)
from ._stack import Stack, Stored
from ._straight import backward_straight, forward_straight, plain_straight

Boundary = MutableMapping[str, "Emission"] | None
"""Where loops are registered; `None` for loops that are emitted as they are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """One loop of a stack, to be emitted again.

    `kind` is "forward", "backward" or "plain"; `inputs` and `outputs` are the types of
    the flat inputs and outputs (orders: see the module). `layer_inputs` has, for each
    per-layer input of the stack, the numbers of the flat inputs that it is; `gradients`
    maps numbers of flat outputs to the per-layer input whose gradient each is.
    """

    name: str
    kind: str
    stack: Stack
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    layer_inputs: tuple[tuple[int, ...], ...]
    gradients: dict[int, int]
    build: Callable[[Any, HostPlan], Any]
    structure: Any

    def emit(
        self,
        flat: Sequence[Any],
        *,
        to_host: Collection[int] | Mapping[int, Rows | None] = (),
        lean: bool = False,
        late: bool = True,
    ) -> list[Any]:
        """The flat outputs, the loop being emitted once more.

        **Arguments:** `flat` are the flat inputs; those of a per-layer input may be
        `HostArray`s, all or none of them. `to_host` has the numbers of flat outputs
        that are to be in host memory: gradients of such inputs only. They come laid out
        and typed as the user's own array is, before its chain (for an unrolled model
        stacked, layers first), or as a mapping says. `lean` and `late` as for
        `HostPlan`.
        """
        values, hosted = list(flat), {}
        for j, numbers in enumerate(self.layer_inputs):
            mine = [flat[n] for n in numbers]
            if any(isinstance(value, HostArray) for value in mine):
                hosted[j] = host_layers(mine, separate=self.stack.separate)
                for number in numbers:
                    values[number] = hosted[j]
        rows = to_host if isinstance(to_host, Mapping) else dict.fromkeys(to_host)
        places = {
            self.gradients[k]: hosted[self.gradients[k]].gradients.lying(rows[k])
            for k in to_host
        }
        arguments = jax.tree.unflatten(self.structure, values)
        plan = HostPlan(places=places, lean=lean, late=late)
        return jax.tree.leaves(self.build(arguments, plan))


def emit_plain(
    stack: Stack, consts: Any, carry: Any, per_layer: Any, boundary: Boundary
) -> Any:
    """`run_plain`, as an equation of its own with a `boundary`."""
    if stack.as_written:
        return plain_straight(stack, consts, carry, per_layer)

    def build(arguments: Any, plan: HostPlan) -> Any:
        consts, carry, per_layer = arguments
        return run_plain(stack, consts, carry, _inputs(per_layer), plan=plan)

    arguments = (list(consts), list(carry), list(per_layer))
    return _emit("plain", stack, arguments, build, boundary)


def emit_forward(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    consts: Any,
    carry: Any,
    per_layer: Any,
    *,
    label: bool,
    boundary: Boundary,
) -> Any:
    """`run_forward`, as an equation of its own with a `boundary`."""
    if stack.as_written:
        return forward_straight(
            stack, body, stored, consts, carry, per_layer, label=label
        )

    def build(arguments: Any, plan: HostPlan) -> Any:
        consts, carry, per_layer = arguments
        if stack.group:
            return forward_groups(stack, body, consts, carry, per_layer)
        return run_forward(
            stack,
            body,
            stored,
            consts,
            carry,
            _inputs(per_layer),
            plan=plan,
            label=label,
            signed=boundary is not None,
        )

    arguments = (list(consts), list(carry), list(per_layer))
    return _emit("forward", stack, arguments, build, boundary)


def emit_backward(
    stack: Stack,
    body: LinearizedBody,
    stored: Stored,
    consts: Any,
    per_layer: Any,
    kept: Any,
    cotangents: Any,
    boundary: Boundary,
) -> Any:
    """`run_backward`, as an equation of its own with a `boundary`."""
    if stack.as_written:
        return backward_straight(stack, body, consts, per_layer, kept, cotangents)

    def build(arguments: Any, plan: HostPlan) -> Any:
        consts, per_layer, kept, cotangents = arguments
        if stack.group:
            return backward_groups(
                stack, body, stored, consts, per_layer, kept, cotangents
            )
        return run_backward(
            stack,
            body,
            stored,
            consts,
            _inputs(per_layer),
            kept,
            cotangents,
            plan=plan,
        )

    arguments = (list(consts), list(per_layer), kept, cotangents)
    active = Activity(stack, body)
    first = len(active.carry) + len(active.consts)
    numbers = [i - stack.first_layer_input for i in active.layers]
    gradients = dict(enumerate(numbers, start=first))
    return _emit("backward", stack, arguments, build, boundary, gradients)


def _inputs(per_layer: Sequence[Any]) -> list[Any]:
    """Per-layer inputs as the passes take them: one record for all layers."""
    return [
        x[0] if isinstance(x, list) and isinstance(x[0], HostLayers) else x
        for x in per_layer
    ]


def _emit(
    kind: str,
    stack: Stack,
    arguments: Any,
    build: Callable[[Any, HostPlan], Any],
    boundary: Boundary,
    gradients: dict[int, int] | None = None,
) -> Any:
    if boundary is None:
        return build(arguments, NOTHING)
    leaves, structure = jax.tree.flatten(arguments)
    name = _name(kind, stack, boundary)
    seen: dict[str, Any] = {}

    def loop(*flat: Any) -> list[Any]:
        results = build(jax.tree.unflatten(structure, flat), NOTHING)
        out, seen["structure"] = jax.tree.flatten(results)
        seen["outputs"] = tuple(spec_of(_jax.aval_of(value)) for value in out)
        return out

    loop.__name__ = loop.__qualname__ = name
    out = jax.jit(loop)(*leaves)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    per_layer = numbers[1] if kind == "backward" else numbers[2]
    boundary[name] = Emission(
        name=name,
        kind=kind,
        stack=stack,
        inputs=tuple(spec_of(_jax.aval_of(leaf)) for leaf in leaves),
        outputs=seen["outputs"],
        layer_inputs=tuple(tuple(x) if stack.separate else (x,) for x in per_layer),
        gradients=gradients or {},
        build=build,
        structure=structure,
    )
    return jax.tree.unflatten(seen["structure"], out)


def _name(kind: str, stack: Stack, boundary: MutableMapping[str, Any]) -> str:
    """A name that is not in `boundary` yet."""
    name, times = f"stowax_{kind}.{stack.name}", 1
    while name in boundary:
        times += 1
        name = f"stowax_{kind}.{stack.name}.{times}"
    return name
