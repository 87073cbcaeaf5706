"""Decisions fill the budget: what there is room for stays on the device."""

import jax
import jax.numpy as jnp
import optax
import pytest

import stowax

pytestmark = [pytest.mark.usefixtures("usual_promotion")]
LAYERS, WIDTH = 4, 4096
MATRIX = WIDTH * WIDTH * 4

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


@stowax.stow
def loss_fn(params, x):
    loss = jnp.mean((forward(params, x) - x) ** 2)
    return loss + 0.001 * sum(jnp.sum(w**2) for w in params)


def forward(params, x):
    for w in params:
        x = gelu(x @ w)
    return x


def train_step(params, state, x):
    grads = jax.grad(loss_fn)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.slow
def test_parameters_stay_where_there_is_room_for_them():
    pytest.importorskip("jax_plugins")
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = [matrix] * LAYERS
    # Parameters, their gradients once as they come and once with the decay, the batch;
    # and a layer's input for each layer, or an array less.
    budget = (3 * LAYERS + 1 + LAYERS) * MATRIX
    found = stowax.plan(
        train_step,
        params,
        jax.eval_shape(optimizer.init, params),
        matrix,
        target="h200",
        budget=budget,
        pin={"optimizer state": "offload"},
        compiles=4,
        progress=False,
    )
    assert found.fits
    kept = {d.role for d in found.decisions if d.decision == "keep"}
    moved = {d.role for d in found.decisions if d.decision == "offload"}
    assert "parameter" in kept
    assert "parameter" not in moved
    assert len(found.search.trials) <= 4
