"""Scanned layers whose effects must not happen twice run as they are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import stowax
from verified_steps import LARGE, arguments

pytestmark = [pytest.mark.usefixtures("usual_promotion")]


def step_of(told):
    def loss_fn(params, x):
        def layer(x, w):
            x = x + jnp.tanh(jnp.sin(x @ w["up"]) @ w["down"])
            return told(x), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params, momentum, x):
        grads = jax.grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), momentum

    return step


def called(x):
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    mean = jax.lax.stop_gradient(jnp.mean(x))
    return x * io_callback(lambda _: np.float32(1.0), scale, mean)


def printed(x):
    jax.debug.callback(lambda _: None, jnp.mean(x))
    return x


@pytest.mark.parametrize(("told", "noted"), [(called, True), (printed, False)])
def test_a_plan_says_which_layers_it_leaves_for_their_effects(told, noted):
    how = {"budget": "90%", "target": "cpu", "progress": False}
    plan = stowax.plan(step_of(told), *arguments(LARGE), **how)
    said = [note for note in plan.proof.notes if "must not run twice" in note]
    assert len(said) == noted
    assert all(note.startswith("the loop at test_effects_note.py:") for note in said)
