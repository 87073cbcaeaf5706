"""Layers' weights and gradients in host memory: bytes of loss and gradients.

Sixteen layers of two products, (4096, 16384) and back, in bfloat16: 4 GiB of weights
and 4 GiB of gradients, all of it in host memory. Three ways to write the same layers: a
scan over the weights' first axis, a scan over their second, a Python loop. Activations
that the backward pass reads are offloaded, too. Device totals are arguments + outputs -
aliased + temporaries of the compiled program; copies are seen in its schedule.

    python -m benchmarks.host_weights

Prints a table. Bars: 0.51 GiB scanned, 0.60 otherwise, and no computation on the host's
processor. A layer's weights are 0.25 GiB, and so are its gradients.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

import stowax
from benchmarks import _record
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

LAYERS, WIDTH, HIDDEN, ROWS = 16, 4096, 16384, 256
BARS = {"scan": 0.51, "scan, axis 1": 0.60, "loop": 0.60}


def _layer(x: Any, weights: Any) -> Any:
    up, down = weights
    return (x @ up) @ down


def _scan(weights: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (_layer(x, w), None), x, weights)[0]


def _scan_axis_1(weights: Any, x: Any) -> Any:
    return _scan([jnp.moveaxis(w, 1, 0) for w in weights], x)


def _loop(weights: Any, x: Any) -> Any:
    for w in zip(*weights, strict=True):
        x = _layer(x, w)
    return x


FORMS = {"scan": _scan, "scan, axis 1": _scan_axis_1, "loop": _loop}


def step_of(form: str) -> Callable[..., Any]:
    """Loss and gradients of layers that are written as `form` says."""

    @stow
    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(FORMS[form](weights, x).astype(jnp.float32))

    return jax.value_and_grad(loss)


def specs_of(
    form: str,
    layers: int = LAYERS,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    rows: int = ROWS,
) -> tuple[Any, Any]:
    """Types of the step's weights and input."""
    shapes = (width, hidden), (hidden, width)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    if form == "loop":
        matrix = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
        return [[m] * layers for m in matrix], x
    axis = FORMS[form] is _scan_axis_1
    return [
        jax.ShapeDtypeStruct((*s[:axis], layers, *s[axis:]), jnp.bfloat16)
        for s in shapes
    ], x


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


def row(machine: Target, form: str, compiled: Any) -> tuple[Any, ...]:
    """What a compiled program needs, and how it copies."""
    found = stowax.inspect(compiled)
    kinds = [hazard.kind for hazard in found.hazards]
    timeline = found.timeline
    link = max(timeline.device_to_host_seconds, timeline.host_to_device_seconds)
    return (
        machine.name,
        f"{form} (bar {BARS[form]})",
        _record.gib(found.memory.device.total),
        _record.gib(found.memory.host.total),
        kinds.count("host-compute"),
        kinds.count("synchronous-copy"),
        f"{timeline.step_seconds * 1e3:.1f}",
        f"{timeline.exposed_seconds * 1e3:.1f}",
        f"{link * 1e3:.1f}",
    )


HEAD = (
    "target",
    "layers",
    "device GiB",
    "host GiB",
    "host computations",
    "synchronous copies",
    "step ms",
    "waiting ms",
    "busier link ms",
)


def main() -> None:
    """Compiles the three programs for each target and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=("h200", "v5p-8"))
    parser.add_argument("--form", action="append", choices=FORMS)
    options = parser.parse_args()
    rows = []
    for name in options.target or ("h200", "v5p-8"):
        machine = stowax.target(name)
        for form in options.form or FORMS:
            compiled = compile_hosted(machine, form, specs_of(form))
            rows.append(row(machine, form, compiled))
    print(_record.table(HEAD, rows), end="")


if __name__ == "__main__":
    main()
