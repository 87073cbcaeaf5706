"""Decisions fill the budget: what there is room for stays on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import stowax
from stowax._layers._rewrite import Options
from stowax._search._loop import Search
from stowax._step._trace import trace_step
from stowax._survey._options import wants_row_major
from stowax._survey._preferences import Preferences
from stowax._survey._survey import take_survey
from stowax._target import _target

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("usual_promotion")]
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


def test_parameters_stay_where_there_is_room_for_them():
    pytest.importorskip("jax_plugins")
    target = _target.target("h200")
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = [matrix] * LAYERS
    specs = target.specs(params, jax.eval_shape(optimizer.init, params), matrix)
    options = Options(row_major=wants_row_major(target, specs))
    traced = trace_step(train_step, specs, options)
    survey = take_survey(train_step, specs, traced, target, options)
    pinned = Preferences(pin={"optimizer state": "offload"})
    # Parameters, their gradients once as they come and once with the decay, the batch;
    # and a layer's input for each layer, or an array less.
    budget = (3 * LAYERS + 1 + LAYERS) * MATRIX
    search = Search(
        survey=dataclasses.replace(survey, bodies=pinned.narrow(survey.bodies)),
        budget=budget,
        host_budget=2**40,
        user_options={},
        donate=None,
        as_written=False,
        say=lambda line: None,
    )
    search.plan()
    best = search.best()
    assert best.fits(budget, 2**40)
    assert best.decisions is not None
    state, layers = survey.bodies[0], best.decisions[0]
    kept = {v.role for v, d in zip(state.values, layers, strict=True) if d == "keep"}
    assert kept == {"parameter"}
    assert len(search.attempts) <= 4
