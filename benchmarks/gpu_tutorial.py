"""The tutorial's three examples as training: on the device, by hand, under stowax.

- activations: ten layers of 4096 × 16384 and back in bfloat16, 16,384 rows, as on the
  tutorial's third page; by hand the policy there that offloads every layer's input, a
  plan for the memory that it takes.
- parameters: the sixteen layers of `models.host_layers`, scanned; by hand each
  layer is fetched twice, and updated alone in a loop, in place.
- optimizer state: the four layers of `models.adam_tutorial`; by hand the published
  recipe. The rate is small, so that the steps mean something.

The step on the device is run once more from a state that is one rounding away: what
that does to the losses is what no other program can be held to.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import stowax
from benchmarks.gpu_cells import (
    Cell,
    Context,
    Row,
    Workload,
    compile_by_hand,
    compiled_figures,
    each,
    filled,
    placed,
    plan_of,
    run,
    run_and_measure,
    run_plan,
)
from benchmarks.models import adam_tutorial
from stowax._survey._options import plan_options

PART = "tutorial"
WITHOUT_GRAPHS = ", without CUDA graphs"
WAYS = (
    "on the device",
    "by hand",
    "stowax",
    "by hand" + WITHOUT_GRAPHS,
    "stowax" + WITHOUT_GRAPHS,
)
"""XLA runs loops as CUDA graphs, one operation after the other: no copy overlaps."""
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
STEPS, TINY_STEPS = 25, 4
Made = tuple[Workload, Workload, Any]


def _layer(x: Any, w: Any) -> tuple[Any, None]:
    return (x @ w[0]) @ w[1], None


def _on_device(tree: Any) -> Any:
    return jax.device_put(tree, jax.memory.Space.Device)


def _policy(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _rate(weight: Any) -> Any:
    """What sixteen layers learn with; at 16 times as much they diverge at once.

    The gradient of a mean over the width has a part of 2 / width of the weight. In
    bfloat16 much of what is learned is rounded away.
    """
    return jnp.asarray(min(weight.shape[-2:]) / 16000, weight.dtype)


def _descent(body: Any, update: Any = None) -> Callable[..., Any]:
    """Gradient descent on layers under a scan; `update` of weights and gradients."""

    @stowax.stow
    def loss(weights: Any, x: Any) -> Any:
        result, _ = jax.lax.scan(body, x, weights)
        return jnp.mean((result - x).astype(jnp.float32) ** 2)

    def descend(weights: Any, gradients: Any) -> Any:
        return jax.tree.map(lambda w, g: w - _rate(w) * g, weights, gradients)

    def step(weights: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return (update or descend)(weights, gradients), value

    return step


def _layer_specs(layers: int, width: int, hidden: int, rows: int) -> tuple[Any, Any]:
    shapes = (layers, width, hidden), (layers, hidden, width)
    weights = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    return weights, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)


def activations(tiny: bool) -> Made:
    """Layers whose inputs are offloaded."""
    specs = _layer_specs(*((3, 32, 64, 256) if tiny else (10, 4096, 16384, 16384)))

    def named(x: Any, w: Any) -> Any:
        return _layer(checkpoint_name(x, "x"), w)

    by_hand = jax.remat(named, policy=_policy("x"), prevent_cse=False)
    # By hand it takes 6.63 GiB: what does a plan make of as much?
    options = {"budget": "7GiB", "pin": {"parameter": "keep"}}
    mine = Workload(step=_descent(_layer), specs=specs, options={} if tiny else options)
    return mine, Workload(step=_descent(by_hand), specs=specs), placed(specs)


def parameters(tiny: bool) -> Made:
    """Layers whose weights are in host memory."""
    specs = _layer_specs(*((3, 64, 128, 8) if tiny else (16, 4096, 16384, 256)))

    def fetching(x: Any, w: Any) -> Any:
        return _layer(x, _on_device(w))

    def update(weights: Any, gradients: Any) -> Any:
        return jax.tree.map(_updated_by_layer, weights, gradients)

    nothing = jax.checkpoint_policies.nothing_saveable
    by_hand = jax.remat(fetching, policy=nothing, prevent_cse=False)
    pin = {"parameter": "offload"}
    mine = Workload(
        step=_descent(_layer), specs=specs, options={} if tiny else {"pin": pin}
    )
    there = placed(specs[0], "pinned_host"), placed(specs[1])
    return mine, Workload(step=_descent(by_hand, update), specs=specs), there


def _updated_by_layer(weight: Any, gradient: Any) -> Any:
    """Gradient descent in a loop over layers: one comes over, and goes back."""

    def body(i: Any, weight: Any) -> Any:
        at = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        here, slope = _on_device((at(weight), at(gradient)))
        new = here - _rate(here) * slope
        back = jax.device_put(new, jax.memory.Space.Host)
        return jax.lax.dynamic_update_index_in_dim(weight, back, i, 0)

    return jax.lax.fori_loop(0, weight.shape[0], body, weight)


def optimizer_state(tiny: bool) -> Made:
    """Adam's moments in host memory."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))
    loss = stowax.stow(lambda params, x: adam_tutorial.compute_loss(params, x))

    def step(state: Any, x: Any, over: Any = lambda moments: moments) -> Any:
        moments = over(state["moments"])
        with jax.numpy_dtype_promotion("standard"):  # page and optax rely on it
            value, gradients = jax.value_and_grad(loss)(state["weights"], x)
            updates, moments = optimizer.update(gradients, moments, state["weights"])
        weights = optax.apply_updates(state["weights"], updates)
        return {"weights": weights, "moments": moments}, value

    params, _, x = adam_tutorial.arguments(64 if tiny else adam_tutorial.DIM)
    specs = {"weights": params, "moments": jax.eval_shape(optimizer.init, params)}, x
    pin = {"optimizer state": "offload"}
    mine = Workload(step=step, specs=specs, options={} if tiny else {"pin": pin})
    there = {
        "weights": placed(params),
        "moments": placed(specs[0]["moments"], "pinned_host"),
    }
    by_hand = functools.partial(step, over=_on_device)
    return mine, Workload(step=by_hand, specs=specs), (there, placed(x))


EXAMPLES: dict[str, Callable[[bool], Made]] = {
    "activations": activations,
    "parameters": parameters,
    "optimizer state": optimizer_state,
}


def work(example: str, way: str, context: Context, row: Row) -> None:
    """One way to run one example."""
    mine, by_hand, there = EXAMPLES[example](context.tiny)
    steps = TINY_STEPS if context.tiny else STEPS
    told = way.endswith(WITHOUT_GRAPHS) and stowax.target().platform == "gpu"
    graphs = NO_GRAPHS if told else {}
    if way.startswith("stowax"):
        plan = plan_of(context, f"{PART} {example}", mine)
        run_plan(plan, mine, steps, row, graphs)
        return
    if way.startswith("by hand"):
        options = plan_options(stowax.target(), True) | graphs
        compiled = compile_by_hand(by_hand, there, options)
        compiled_figures(compiled, row)
        run_and_measure(compiled, by_hand, there, steps, row)
        return
    here = placed(mine.specs)
    compiled = compile_by_hand(mine, here)
    compiled_figures(compiled, row)
    run_and_measure(compiled, mine, here, steps, row)
    shaken: Row = {}
    run(compiled, *filled(here, seed=1), steps, shaken)
    row["shaken_losses"] = shaken["losses"]


def cells() -> list[Cell]:
    """The ways to run each of the three examples."""
    pairs = list(itertools.product(EXAMPLES, WAYS))
    return each(PART, 30, ", ".join, lambda pair, *rest: work(*pair, *rest), pairs)
