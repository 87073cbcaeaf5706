"""Values are called as the user knows them: by part of the model, function and line."""

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import stowax

WIDTH, BATCH = 32, 1024
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)

pytestmark = pytest.mark.usefixtures("usual_promotion")


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.Dense(4 * WIDTH, name="up")(linen.LayerNorm(name="norm")(x))
        return jnp.sin(x) + linen.Dense(WIDTH, name="down")(jnp.tanh(y))


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(4):
            x = LinenBlock()(x)
        return x


class Gate(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.gate = Gate(rngs)

    def __call__(self, x):
        return jnp.sin(x) * self.gate(x)


def haiku_stack(x):
    for _ in range(4):
        x = jnp.sin(x) + jnp.tanh(hk.nets.MLP([4 * WIDTH, WIDTH], name="mlp")(x))
    return x


def parts(step, *args):
    """Where a plan says that the values are made which it decides on."""
    found = stowax.plan(step, *args, budget="50%")
    inside = {decision.name.partition(" in ")[2] for decision in found.decisions}
    return inside - {""}  # a layer's input, and state


def step_of(apply):
    return lambda params, x: jax.grad(lambda p: apply(p, x).sum())(params)


@pytest.mark.slow
def test_a_module_of_linen_is_named_by_its_path_inside_of_the_layer():
    model = LinenStack()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    # What the block does itself has the block's class: not the first block's number.
    found = parts(step_of(model.apply), params, X)
    assert found == {"norm", "up", "LinenBlock"}


def test_a_module_of_nnx_is_named_by_its_classes():
    model = nnx.eval_shape(lambda: nnx.List([NnxBlock(nnx.Rngs(0)) for _ in range(4)]))
    graph, params = nnx.split(model)

    def apply(params, x):
        for block in nnx.merge(graph, params):
            x = block(x)
        return x

    assert parts(step_of(apply), params, X) == {"Gate", "NnxBlock"}


@pytest.mark.slow
def test_a_module_of_haiku_is_named_by_its_path():
    model = hk.without_apply_rng(hk.transform(haiku_stack))
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    assert parts(step_of(model.apply), params, X) == {"mlp", "haiku_stack"}


def test_plain_functions_are_named_as_before():
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def apply(w, x):
        return jax.lax.scan(layer, x, w)[0]

    w = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32)
    assert parts(step_of(apply), w, X) == {"layer"}
