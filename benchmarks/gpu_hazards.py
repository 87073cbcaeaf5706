"""Three known faults of XLA on GPUs, planted: does the installed jaxlib have them?

1. *Residuals in the wrong order* (openxla/xla 46231): a scan whose carry is offloaded
   by a checkpoint policy. On jaxlib 0.11.0 its gradients are wrong by orders of
   magnitude, unless `xla_gpu_enable_dynamic_slice_fusion` is off.
2. *A reload that races the scheduler* (openxla/xla 37979, 45393): the same with larger
   values and `xla_gpu_enable_pipelined_host_offloading`, many times over.
3. *A donated host buffer that is overwritten within the step*: Adam with one moment on
   the device beside others in host memory, all donated; NaN has been seen at step 8.

Every program is compared with the same mathematics with nothing offloaded, on the same
device, products at their highest precision. Beside the patterns stands what stowax
makes of the same step. A pattern that is right here is right in these sizes, no more.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import stowax
from benchmarks.gpu_cells import Cell, Context, Row, filled, placed, say

PART = "hazards"
TOLERANCE = 1e-3
"""Of the largest entry: a fault is off by the entry's size, rounding by 1e-5 of it."""
FUSION = "xla_gpu_enable_dynamic_slice_fusion"
PIPELINED = "xla_gpu_enable_pipelined_host_offloading"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
STEPS, TINY_STEPS = 12, 2
Options = Mapping[str, Any]


def _loss(weights: Any, x: Any, policy: Any = None) -> Any:
    def body(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(checkpoint_name(x, "carry") @ w), None

    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    result, _ = jax.lax.scan(body, x, weights)
    return jnp.mean(result**2)


def _offloaded() -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )


def difference(found: Any, expected: Any) -> float:
    """The largest error of any leaf, as a part of the leaf's largest entry."""
    worst = 0.0
    for got, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        if not np.all(np.isfinite(got)):
            return float("inf")
        largest = float(np.max(np.abs(want))) or 1.0
        worst = max(worst, float(np.max(np.abs(got - want))) / largest)
    return worst


def _verdict(errors: list[float]) -> Row:
    finite = [e for e in errors if e != float("inf")]
    return {
        "runs": len(errors),
        "error": None,
        "difference": max(finite, default=None),
        "not_finite": len(errors) - len(finite),
        "wrong": sum(e > TOLERANCE for e in errors),
        "same_every_time": len(set(errors)) == 1,
    }


def _attempt(row: Row, what: str, options: Options, work: Callable[[Row], Row]) -> None:
    """One program; what cannot be compiled or run is a line, too."""
    line: Row = {"what": what, "options": dict(options)}
    try:
        line |= work(line)
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:500]
    say(f"{what} {dict(options) or ''}: {line.get('difference', line.get('error'))}")
    row.setdefault("lines", []).append(line)


def _seen(compiled: Any, line: Row) -> None:
    """What inspecting the program says of it beforehand."""
    found = stowax.inspect(compiled)
    line["host_bytes"] = found.memory.host.total
    line["warned"] = any(h.kind == "known-bad-version" for h in found.hazards)


def residuals(
    shape: tuple[int, int, int],
    tried: tuple[Options, ...],
    repeats: int,
    context: Context,
    row: Row,
) -> None:
    """Patterns 1 and 2: gradients through an offloaded carry."""
    layers, rows, width = (2, 4, 8) if context.tiny else shape
    repeats = 2 if context.tiny else repeats
    row["tolerance"] = TOLERANCE
    specs = (
        jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
    )
    there = placed(specs)
    with jax.default_matmul_precision("highest"):
        arguments = filled(there)
        expected = jax.device_get(jax.jit(jax.grad(_loss))(*arguments))

        def check(compiled: Any, given: Any, line: Row) -> Row:
            _seen(compiled, line)
            return _verdict(
                [difference(compiled(*given), expected) for _ in range(repeats)]
            )

        def by_hand(options: Options, line: Row) -> Row:
            slope = jax.grad(functools.partial(_loss, policy=_offloaded()))
            compiled = jax.jit(slope).lower(*there).compile(dict(options))
            return check(compiled, arguments, line)

        for options in tried[:1] if context.tiny else tried:
            work = functools.partial(by_hand, options)
            _attempt(row, "offloaded by a policy", options, work)

        def planned(line: Row) -> Row:
            slope = jax.grad(stowax.stow(_loss))
            pin = {} if context.tiny else {"carry": "offload"}
            plan = stowax.plan(slope, *specs, pin=pin, donate=False, progress=say)
            line["options"] = dict(plan.program.compiler_options)
            jitted = plan.apply(slope)
            compiled = jitted.lower(*plan.specs(*specs)).compile()
            return check(compiled, plan.place(*arguments), line)

        _attempt(row, "stowax's plan", {}, planned)


OPTIMIZER = optax.adam(1e-3)


def _adam(state: Any, x: Any, over: Any = lambda moments: moments) -> Any:
    """A step of Adam on products one after the other; `over` brings moments over."""

    @stowax.stow
    def loss(weights: Any) -> Any:
        y = x
        for w in weights.values():
            y = jnp.tanh(y @ w)
        return jnp.mean((y - x) ** 2)

    value, slope = jax.value_and_grad(loss)(state["weights"])
    moments = over(state["moments"])
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        updates, moments = OPTIMIZER.update(slope, moments, state["weights"])
    weights = optax.apply_updates(state["weights"], updates)
    return {"weights": weights, "moments": moments}, value


def _adam_specs(width: int) -> tuple[Any, Any]:
    spec = jax.ShapeDtypeStruct((width, width), jnp.float32)
    weights = {f"w{i}": spec for i in range(1, 5)}
    moments = jax.eval_shape(OPTIMIZER.init, weights)
    return {"weights": weights, "moments": moments}, spec


def _beside(specs: Any) -> Any:
    """The moments in host memory, but one leaf."""

    def place(path: Any, spec: Any) -> Any:
        resident = "mu['w1']" in jax.tree_util.keystr(path)
        return placed(spec, "device" if resident else "pinned_host")

    return jax.tree.map_with_path(place, specs)


def _train(step: Any, state: Any, x: Any, steps: int) -> Any:
    losses = []
    for _ in range(steps):
        state, loss = step(state, x)
        losses.append(float(loss))
    return np.asarray(losses), jax.device_get(state["weights"])


def donated(context: Context, row: Row) -> None:
    """Pattern 3: state that stays beside state that moves, all of it donated."""
    steps = TINY_STEPS if context.tiny else STEPS
    specs = _adam_specs(16 if context.tiny else 2048)
    row |= {"tolerance": TOLERANCE, "steps": steps}
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(_adam)
        expected = _train(plain, *filled(placed(specs)), steps)
        there = (
            {
                "weights": placed(specs[0]["weights"]),
                "moments": _beside(specs[0]["moments"]),
            },
            placed(specs[1]),
        )

        def by_hand(options: Options, line: Row) -> Row:
            out = jax.tree.map(lambda spec: spec.sharding, there[0]), None
            over = functools.partial(jax.device_put, device=jax.memory.Space.Device)
            step = functools.partial(_adam, over=over)
            jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
            compiled = jitted.lower(*there).compile(dict(options))
            _seen(compiled, line)
            found = _train(compiled, *filled(there), steps)
            return _verdict([difference(found, expected)])

        tried: tuple[Options, ...] = ({}, {SCHEDULER: True}, {PIPELINED: True})
        for options in tried[:1] if context.tiny else tried:
            work = functools.partial(by_hand, options)
            _attempt(row, "one moment on the device", options, work)

        def planned(line: Row) -> Row:
            pin = {"optimizer state": "offload"}
            wishes = {} if context.tiny else {"pin": pin}
            plan = stowax.plan(_adam, *specs, progress=say, **wishes)
            line["options"] = dict(plan.program.compiler_options)
            compiled = plan.apply(_adam).lower(*plan.specs(*specs)).compile()
            _seen(compiled, line)
            state, x = filled(plan.specs(*specs))
            found = _train(compiled, state, x, steps)
            return _verdict([difference(found, expected)])

        _attempt(row, "stowax's plan", {}, planned)


def cells() -> list[Cell]:
    """One cell per pattern."""
    ordered = ({}, {FUSION: True}, {FUSION: False})
    raced = (
        {},
        {PIPELINED: True},
        {PIPELINED: True, SCHEDULER: True, FUSION: False},
        {PIPELINED: False, SCHEDULER: True, FUSION: False},
    )
    first = functools.partial(residuals, (16, 1024, 512), ordered, 2)
    second = functools.partial(residuals, (16, 4096, 2048), raced, 10)
    return [
        Cell(part=PART, name="1: residuals in the wrong order", work=first, seconds=15),
        Cell(part=PART, name="2: a reload that races", work=second, seconds=30),
        Cell(part=PART, name="3: a donated buffer", work=donated, seconds=30),
    ]
