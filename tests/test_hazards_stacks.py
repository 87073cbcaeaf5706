"""Loops that stack what need not be there, named with their line and bytes; and loops
that look alike, of which nothing is said."""

import jax
import jax.numpy as jnp
import pytest

from compiled_programs import machine
from hazard_programs import hazards_of, line_of
from stowax._inspect._inspect import inspect

LAYERS, PARTS, ROWS, WIDTH = 4, 4, 256, 512
MIB = 2**20
KINDS = ("stacked-again", "kept-to-be-summed")
# One matrix of float32, and one of each layer or microbatch.
MATRIX = WIDTH * WIDTH * 4
assert (MATRIX, LAYERS * MATRIX) == (MIB, 4 * MIB)


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


STACK, X = spec(LAYERS, WIDTH, WIDTH), spec(ROWS, WIDTH)
WEIGHTS = {"in": spec(WIDTH, WIDTH), "out": spec(WIDTH, WIDTH)}
PART = spec(PARTS, ROWS, WIDTH)


def inspected(step, *args, **options):
    return inspect(jax.jit(step, **options), *args, target=machine("h200"))


def suspected(found):
    return [hazard for hazard in found.hazards if hazard.kind in KINDS]


# --- weights that are stacked a second time -----------------------------------------


def giving_back(x, w):
    return jnp.tanh(x @ w), w


def returning(ws, x):
    return jax.lax.scan(jax.checkpoint(giving_back), x, ws)


def forwarded(ws, x):
    """What JAX itself takes out of the loop."""
    return jax.lax.scan(giving_back, x, ws)


def test_a_loop_that_returns_its_weights():
    found = inspected(returning, STACK, X, donate_argnums=0)
    (hazard,) = found.hazards
    assert hazard.kind == "stacked-again"
    assert line_of(returning, "lax.scan").split(":")[1] + " (scan)" in hazard.where
    assert "test_hazards_stacks.py" in hazard.where
    assert hazard.cost == (
        "4.00 MiB, float32[4,512,512]: the loop returns what it reads, and it is "
        "there a second time"
    )
    assert "nnx.state(layer)" in hazard.remedy
    assert inspected(returning, STACK, X).hazards == found.hazards
    clean = inspected(forwarded, STACK, X, donate_argnums=0)
    assert clean.hazards == ()
    saved = found.memory.device.temp - clean.memory.device.temp
    assert saved == pytest.approx(LAYERS * MATRIX, abs=1024)  # and counters


def test_a_loop_that_returns_what_all_its_iterations_share():
    def step(w, x):
        layer = jax.checkpoint(lambda x, _: (jnp.tanh(x @ w), w))
        return jax.lax.scan(layer, x, length=LAYERS)

    (hazard,) = inspected(step, spec(WIDTH, WIDTH), X).hazards
    assert hazard.kind == "stacked-again"
    assert hazard.cost == (
        "4.00 MiB, float32[4,512,512]: the loop returns in each of 4 iterations what "
        "is the same in all"
    )


def test_weights_that_come_back_in_memory_of_their_own():
    """JAX has taken them out of the loop; the step's result is a copy all the same."""
    found = inspected(forwarded, STACK, X)
    (hazard,) = found.hazards
    assert hazard.kind == "argument-not-donated"
    assert hazard.where.endswith("(args[0])")
    assert hazard.cost == (
        "4.00 MiB of device memory: its result[1] is the argument as it is, and could "
        "take its memory"
    )
    given = inspected(forwarded, STACK, X, donate_argnums=0).memory.device
    made = found.memory.device.output - (given.output - given.alias)
    assert made == LAYERS * MATRIX


@pytest.mark.slow
def test_nnx_grad_of_a_loop_over_layers_that_are_recomputed():
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(Layer, in_axes=(0,), out_axes=0)
            self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)

        def __call__(self, x):
            axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
            body = nnx.remat(lambda x, layer: layer(x))
            return nnx.scan(body, **axes)(x, self.layers)

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    specs = jax.tree.map(lambda v: spec(*v.shape), state)
    loss = lambda model, x: (model(x) ** 2).mean()

    def updated(weights, gradients):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    def with_nnx(state, x):
        model = nnx.merge(graph, state)
        gradients = nnx.grad(loss)(model, x)
        return updated(nnx.state(model, nnx.Param), gradients)

    def with_jax(state, x):
        of_weights = lambda weights: loss(nnx.merge(graph, weights), x)
        return updated(state, jax.grad(of_weights)(state))

    weights = nnx.filter_state(specs, nnx.Param)
    (hazard,) = inspected(with_nnx, weights, X, donate_argnums=0).hazards
    assert hazard.kind == "stacked-again"
    assert hazard.cost.startswith("4.00 MiB, float32[4,512,512]: the loop returns")
    assert "test_hazards_stacks.py" in hazard.where
    assert "nnx.split(model, nnx.Param, ...)" in hazard.remedy
    assert inspected(with_jax, weights, X, donate_argnums=0).hazards == ()


# --- what is kept of every microbatch -----------------------------------------------


def loss_of(p, x):
    return jnp.mean(jnp.tanh(x @ p["in"]) @ p["out"])


def change(p, gradients):
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients)


def stacked(p, parts):
    _, (losses, gradients) = jax.lax.scan(
        lambda _, x: (None, jax.value_and_grad(loss_of)(p, x)), None, parts
    )
    return change(p, jax.tree.map(lambda g: g.mean(0), gradients)), losses


def mapped(p, parts):
    gradients = jax.lax.map(jax.jit(lambda x: jax.grad(loss_of)(p, x)), parts)
    mean = jax.jit(lambda tree: jax.tree.map(lambda g: jnp.sum(g / PARTS, 0), tree))
    return change(p, mean(gradients))


def summed_as_it_goes(p, parts):
    def body(total, x):
        loss, gradients = jax.value_and_grad(loss_of)(p, x)
        return jax.tree.map(jnp.add, total, gradients), loss

    total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, p), parts)
    return change(p, jax.tree.map(lambda g: g / PARTS, total)), losses


@pytest.mark.quick("stacked")
@pytest.mark.parametrize("step", [stacked, mapped])
def test_gradients_of_every_microbatch(step):
    found = inspected(step, WEIGHTS, PART, donate_argnums=0)
    (hazard,) = suspected(found)
    assert hazard.kind == "kept-to-be-summed"
    line = line_of(step, "lax.scan" if step is stacked else "lax.map").split(":")[1]
    assert hazard.where.endswith(f"test_hazards_stacks.py:{line} (scan)")
    assert hazard.count == 2
    assert hazard.cost == (
        "8.00 MiB, 2 arrays, the largest float32[4,512,512]: of each of 4 iterations "
        "this is kept, until it is summed"
    )
    assert "jax.tree.map(jnp.add, total, gradients)" in hazard.remedy
    clean = inspected(summed_as_it_goes, WEIGHTS, PART, donate_argnums=0)
    assert clean.hazards == ()
    # One microbatch's gradients are needed in any case.
    saved = found.memory.device.temp - clean.memory.device.temp
    assert saved >= 0.99 * (PARTS - 1) * 2 * MATRIX


def with_carry(p, parts):
    add = lambda total, x: (total + loss_of(p, x), None)
    return jax.lax.scan(add, jnp.float32(0), parts)[0]


def with_results(p, parts):
    return jax.jit(lambda p: jax.lax.map(lambda x: loss_of(p, x), parts).mean())(p)


def with_counter(p, parts):
    add = lambda i, total: total + loss_of(p, parts[i])
    return jax.lax.fori_loop(0, PARTS, add, jnp.float32(0))


def recomputed(p, parts):
    return jax.lax.map(jax.checkpoint(lambda x: loss_of(p, x)), parts).mean()


@pytest.mark.quick("with_carry")
@pytest.mark.parametrize("loss", [with_carry, with_results, with_counter])
def test_a_loss_over_microbatches_that_is_differentiated_as_a_whole(loss):
    (hazard,) = suspected(inspected(jax.value_and_grad(loss), WEIGHTS, PART))
    assert hazard.kind == "kept-to-be-summed"
    assert "test_hazards_stacks.py" in hazard.where
    assert "of each of 4 iterations this is kept for the backward pass" in hazard.cost
    assert "jax.checkpoint" in hazard.remedy
    assert suspected(inspected(jax.value_and_grad(recomputed), WEIGHTS, PART)) == []


# --- loops that look alike, and are as they should be -------------------------------


def layers(ws, x):
    """Residuals of layers: each iteration needs the one before."""
    return jax.value_and_grad(lambda ws: jnp.mean(forwarded(ws, x)[0] ** 2))(ws)


def linear_layers(ws, x):
    """They keep a cast of their weights, which no other iteration changes."""
    layer = lambda x, w: (x @ w.astype(jnp.bfloat16).astype(jnp.float32), None)
    mean = lambda x: jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)
    return jax.value_and_grad(mean)(x)


def over_time(w, parts):
    def body(h, x):
        h = jnp.tanh(x @ w[0] + h)
        return h, h.mean()

    mean = lambda w: jax.lax.scan(body, jnp.zeros_like(parts[0]), parts)[1].mean()
    return jax.value_and_grad(mean)(w) if parts.ndim == 3 else mean(w)


def read_by_index(ws, x):
    body = lambda i, x: jnp.tanh(x @ jax.lax.dynamic_index_in_dim(ws, i, 0, False))
    return jax.lax.fori_loop(0, LAYERS, body, x)


def changed(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), w * 0.9), x, ws)


def dropped(ws, x):
    """Nobody reads what the loop returns, so it is not made."""
    return returning(ws, x)[0]


def activations(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws)


def each_clipped(ws, x):
    """Of every microbatch its gradient's norm: all of it is read twice."""
    mean = lambda w, x: jnp.mean(jnp.tanh(x @ w))
    gradients = jax.lax.map(lambda x: jax.grad(mean)(ws[0], x), jnp.stack([x] * PARTS))
    norms = jnp.sqrt(jnp.sum(gradients**2, axis=(1, 2), keepdims=True))
    return jnp.mean(gradients / norms, axis=0)


def variance(ws, x):
    gradients = jax.lax.map(lambda w: x.T @ (x @ w), ws)
    return jnp.mean((gradients - jnp.mean(gradients, 0, keepdims=True)) ** 2, axis=0)


@pytest.mark.parametrize(
    "step",
    [
        *(layers, linear_layers, read_by_index, changed, dropped, activations),
        *(each_clipped, variance),
    ],
)
def test_nothing_is_said_of_loops_that_look_alike(step):
    assert suspected(inspected(step, STACK, X)) == []


def test_nothing_is_said_of_a_loop_over_time():
    assert suspected(inspected(over_time, STACK, PART)) == []


def test_the_size_tells_stacks_that_are_there_from_those_that_are_not():
    """Two of one size are asked for, and one of them is right."""

    def step(ws, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), (w, w * 0.9)))
        return jax.lax.scan(layer, x, ws)

    (hazard,) = suspected(inspected(step, STACK, X))
    assert (hazard.count, hazard.cost[:8]) == (1, "4.00 MiB")
    assert hazards_of(inspected(step, STACK, X), "kept-to-be-summed") == []
