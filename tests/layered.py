"""Small layers and steps that the tests of rewriting share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from planned_steps import check
from stowax._mark import stow

WIDTH, ROWS, LAYERS = 4, 3, 3


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


WEIGHTS = {"w": draw(1, LAYERS, WIDTH, WIDTH), "b": draw(2, LAYERS, WIDTH)}
X = draw(3, ROWS, WIDTH)


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"][None, :])


def one_layer(weights, k):
    return jax.tree.map(lambda w: w[k], weights)


def run_layers(body, x, weights, *, unrolled=False):
    if unrolled:
        for k in range(LAYERS):
            x = body(x, one_layer(weights, k))
        return x
    return lax.scan(lambda x, p: (body(x, p), None), x, weights)[0]


def gradient_step(loss):
    """The step that returns loss and gradients of a marked `loss(weights, x)`."""
    return lambda *args: jax.value_and_grad(stow(loss))(*args)


def check_layers(body, unrolled, weights=WEIGHTS, x=X, **how):
    def loss(weights, x):
        return jnp.mean(jnp.square(run_layers(body, x, weights, unrolled=unrolled)))

    return check(gradient_step(loss), (weights, x), [LAYERS], **how)
