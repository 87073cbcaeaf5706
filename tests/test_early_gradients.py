"""Weights' gradients that are computed where they arise: numbers, order, bytes."""

import functools

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import spec
from stowax._jaxprs._jaxpr import Program, evaluate, inline
from stowax._layers._early_gradients import with_early_gradients
from stowax._layers._linearize import linearize_body

WIDTH, ROWS = 8, 64


def body(w, v, b, x):
    h = jnp.tanh(x @ w) + b[None, :]
    return x + h @ v


@functools.cache
def linearized():
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    bias = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda *args: [body(*args)])(*weights, bias, x)
    return linearize_body(jaxpr, (0, 1, 2, 3), (3, 1), lambda _: False)


def barriers(jaxpr):
    nodes = Program(inline(jaxpr)).nodes
    return [n for n in nodes if n.equation.primitive.name == "optimization_barrier"]


def test_a_weight_s_gradient_comes_before_what_goes_on():
    """With the cotangent that both are made of; those of the first product may wait."""
    backward = linearized().backward
    early = with_early_gradients(backward, [0, 1, 2])
    assert not barriers(backward)
    shapes = [sorted(v.aval.shape for v in n.equation.outvars) for n in barriers(early)]
    assert shapes == [[(WIDTH, WIDTH), (ROWS, WIDTH)]]


def test_it_computes_the_same_numbers():
    backward = linearized().backward
    early = with_early_gradients(backward, [0, 1, 2])
    keys = iter(jax.random.split(jax.random.key(0), 100))
    types = [v.aval for v in backward.jaxpr.invars]
    values = [jax.random.normal(next(keys), t.shape, t.dtype) for t in types]
    for one, other in zip(
        evaluate(backward, values), evaluate(early, values), strict=True
    ):
        assert (one == other).all()


def test_a_bias_s_gradient_is_no_product():
    backward = linearized().backward
    assert with_early_gradients(backward, [2]) is backward


def test_a_gradient_that_takes_more_than_it_is_made_of_may_wait():
    def few(w, x):
        return jnp.tanh(x @ w)

    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (1, 64))]
    jaxpr = jax.make_jaxpr(lambda *args: [few(*args)])(*specs)
    backward = linearize_body(jaxpr, (0, 1), (1, 1), lambda _: False).backward
    assert with_early_gradients(backward, [0]) is backward


# --- on a GPU, whose scheduler would rather compute them last -------------------------

LAYERS, MODEL, HIDDEN, WORDS = 4, 256, 4096, 4096
BATCH, SEQUENCE, HEADS = 8, 1024, 4


def attention(p, x):
    q, k, v = jnp.split((x @ p["qkv"]).reshape(BATCH, SEQUENCE, HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return out.reshape(x.shape) @ p["out"]


def loss_fn(params, x, y):
    def layer(x, p):
        x = x + attention(p, x)
        return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(logits, y, axis=2))


def train_step(params, moments, x, y):
    grads = jax.grad(loss_fn)(params, x, y)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, params, moments)
    return params, moments


def arguments():
    layers = {
        "qkv": spec(LAYERS, MODEL, 3 * MODEL),
        "out": spec(LAYERS, MODEL, MODEL),
        "gate": spec(LAYERS, MODEL, HIDDEN),
        "up": spec(LAYERS, MODEL, HIDDEN),
        "down": spec(LAYERS, HIDDEN, MODEL),
    }
    params = {"layers": layers, "head": spec(MODEL, WORDS)}
    y = jax.ShapeDtypeStruct((BATCH, SEQUENCE, 1), jnp.int32)
    return params, params, spec(BATCH, SEQUENCE, MODEL), y


@pytest.mark.slow
def test_they_make_it_fit_where_nothing_else_does():
    """Computed as late as XLA would, they hold values of their layers until then."""
    pytest.importorskip("jax_plugins")
    plan = stowax.plan(
        train_step,
        *arguments(),
        target="h200",
        budget="800MiB",
        pin={"args[1]*": "offload"},
        forbid="tile",
    )
    late = [trial.compiled_bytes for trial in plan.search.trials[:2]]
    assert min(late) > 850 * 2**20
    assert plan.fits
    assert plan.program.options.early_gradients


@pytest.mark.slow
def test_they_wait_where_there_is_room():
    """Copies hide behind them."""
    pytest.importorskip("jax_plugins")
    pin = {"args[1]*": "offload"}
    plan = stowax.plan(
        *(train_step, *arguments()), target="h200", budget="2GiB", pin=pin
    )
    assert plan.fits
    assert not plan.program.options.early_gradients
