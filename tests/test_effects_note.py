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


calls: list[float] = []


def called(x):
    def scale(mean):
        calls.append(float(mean))
        return np.float32(1.0)

    mean = jax.lax.stop_gradient(jnp.mean(x))
    return x * io_callback(scale, jax.ShapeDtypeStruct((), jnp.float32), mean)


def printed(x):
    jax.debug.callback(lambda _: None, jnp.mean(x))
    return x


def planned(told):
    step, args = step_of(told), jax.tree.map(jnp.copy, arguments(LARGE))
    plan = stowax.plan(step, *args, budget="99%", target="cpu", progress=False)
    said = [note for note in plan.proof.notes if "must not run twice" in note]
    assert all(note.startswith("the loop at test_effects_note.py:") for note in said)
    return plan, said


def test_layers_that_print_are_planned():
    assert planned(printed)[1] == []


def test_what_layers_call_is_called_once_or_they_are_left_and_named():
    """JAX 0.12 lets rules of our own have such effects inside, 0.10 and 0.11 do not."""
    plan, said = planned(called)
    again = [d for d in plan.decisions if d.decision == "recompute"]
    assert bool(said) != bool(again)
    if again:
        step, args = step_of(called), jax.tree.map(jnp.copy, arguments(LARGE))
        calls.clear()
        jax.block_until_ready(plan.apply(step)(*args))
        assert len(calls) == 4
