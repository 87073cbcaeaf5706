"""Layers with weights and gradients in host memory, compiled by the parts of stowax.

Activations that the backward pass reads are offloaded, too. `benchmarks.state` plans
the same layers as a user would.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from benchmarks.models.host_layers import FORMS
from stowax._jaxprs._jaxpr import evaluate, trace
from stowax._layers._axis_order import host_order
from stowax._layers._boundary import Emission
from stowax._layers._host_layers import HostArray
from stowax._layers._rewrite import Rewriter
from stowax._mark import stow
from stowax._records._stages import Options
from stowax._step._recording import record
from stowax._survey._options import overlap_options, wants_row_major
from stowax._target._machine import Target


def step_of(form: str) -> Callable[..., Any]:
    """Loss and gradients of layers that are written as `form` says."""

    @stow
    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(FORMS[form](weights, x).astype(jnp.float32))

    return jax.value_and_grad(loss)


def offload_all(stack: Any, body: Any) -> dict[int, str]:
    """Decisions that offload every activation that the backward pass reads."""
    weights = range(stack.first_layer_input, body.forward.input_count)
    given = {*range(stack.const_count), *weights, *body.forward.constants()}
    return {n: "offload early" for n in body.residuals if n not in given}


@dataclasses.dataclass(frozen=True, slots=True)
class _Hosted:
    """A gradient in host memory, as its parameter is laid out."""

    array: Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostStep:
    """A step that can run with some of its inputs in host memory.

    `jaxpr` is the step with everything on the device, its loops registered in
    `boundary`; `hosted` are the flat inputs that lie in host memory, under a mesh with
    their shardings. With `gradients` theirs go there.
    """

    jaxpr: Any
    boundary: Mapping[str, Emission]
    hosted: Mapping[int, Any]
    gradients: bool = True
    lean: bool = False
    late: bool = True

    def __call__(self, *flat: Any) -> list[Any]:
        """The flat outputs; of an unrolled model's gradients one stack per input."""
        given = [
            HostArray(array=value, sharding=self.hosted[k])
            if k in self.hosted
            else value
            for k, value in enumerate(flat)
        ]
        out = evaluate(self.jaxpr, given, visit=self._visit)
        found: dict[int, Any] = {}
        for k, value in enumerate(out):
            hosted = isinstance(value, _Hosted)
            found[id(value.array) if hosted else -k] = value.array if hosted else value
        return list(found.values())

    def _visit(self, equation: Any, values: list[Any]) -> list[Any] | None:
        hosted = [v for v in values if isinstance(v, HostArray)]
        emission = self.boundary.get(equation.params.get("name", ""))
        if emission is not None:
            gone = [
                k
                for k, j in emission.gradients.items()
                if isinstance(values[emission.layer_inputs[j][0]], HostArray)
                and self.gradients
            ]
            out = emission.emit(values, to_host=gone, lean=self.lean, late=self.late)
            return [_Hosted(v) if k in gone else v for k, v in enumerate(out)]
        if equation.primitive.name == "custom_vjp_call":  # not differentiated here
            return evaluate(equation.params["call_jaxpr"], values, visit=self._visit)
        if equation.primitive.name in ("jit", "pjit"):
            return None
        if hosted:
            return [hosted[0].then(equation)]
        # Casts, transpositions and slices of gradients that are where they belong.
        found = [v for v in values if isinstance(v, _Hosted)]
        return found[:1] or None


def host_step(
    step: Callable[..., Any],
    arguments: Sequence[Any],
    hosted: Sequence[int] | Mapping[int, Any],
    *,
    choose: Any = offload_all,
    options: Options | None = None,
    gradients: bool = True,
    lean: bool = False,
    late: bool = True,
) -> HostStep:
    """`step` traced on `arguments`; the flat inputs `hosted` lie in host memory."""
    boundary: dict[str, Emission] = {}
    leaves, structure = jax.tree.flatten(tuple(arguments))
    rewriter = Rewriter(choose, options or Options(), boundary=boundary)

    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    recording = record(step, specs, structure)
    return HostStep(
        jaxpr=trace(lambda *values: recording.replay(rewriter, values), *specs),
        boundary=boundary,
        hosted=hosted if isinstance(hosted, Mapping) else dict.fromkeys(hosted),
        gradients=gradients,
        lean=lean,
        late=late,
    )


def compile_hosted(
    machine: Target,
    form: str,
    arguments: Sequence[Any],
    *,
    lean: bool = True,
    late: bool | None = None,
    choose: Any = offload_all,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Layers written as `form` says, with weights and gradients in host memory.

    **Arguments:** `late` is by default what is best for the machine: a TPU's compiler
    counts every place that an array ever had, so there a gradient that is carried costs
    more than what it saves, unless weights are fetched by `switch`, which waits.
    """
    weights, x = arguments
    hosted = range(len(jax.tree.leaves(weights)))
    if late is None:
        late = machine.platform != "tpu" or form == "loop"
    run = host_step(
        step_of(form),
        arguments,
        hosted,
        choose=choose,
        options=Options(row_major=wants_row_major(machine)),
        lean=lean,
        late=late,
    )
    host = machine.sharding(memory_kind="pinned_host")
    axis = 1 if form == "scan, axis 1" else None
    places = [Format(_order(machine, w, axis), host) for w in jax.tree.leaves(weights)]
    grads = [host] * len(weights) if form == "loop" else places
    jitted = jax.jit(
        run,
        in_shardings=[*places, machine.sharding()],
        out_shardings=[machine.sharding(), *grads],
    )
    specs = [w.update(sharding=host) for w in jax.tree.leaves(weights)]
    options = {**overlap_options(machine), **(compiler_options or {})}
    if machine.platform == "tpu":
        options["xla_disable_automatic_host_compute_offload"] = True
    return machine.compile(
        jitted, *specs, x.update(sharding=machine.sharding()), compiler_options=options
    )


def _order(machine: Target, spec: Any, axis: int | None) -> Layout | None:
    """How an array is to lie in memory, where that is not the usual order."""
    if axis is None:
        return None
    order = host_order(spec.ndim, axis, machine.platform)
    return None if order is None else Layout(major_to_minor=order)
