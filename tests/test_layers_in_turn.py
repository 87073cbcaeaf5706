"""Layers that repeat in turn, as with two windows: two of them are one body."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import plan, spec, target_or_skip, total

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

ROWS, WIDTH, LAYERS = 1 << 15, 512, 6


def layer(number, w, x):
    """A block that turns its rows, in every second layer."""
    turned = jnp.roll(x, 64 * (number % 2), 0)
    h = jnp.tanh(turned @ w["up"])
    h = jax.nn.gelu(h / (1 + jnp.abs(h)))
    return x + jnp.roll(h @ w["down"], -64 * (number % 2), 0)


def step_with(wrapped):
    def loss_fn(weights, x):
        for number, w in enumerate(weights):
            x = wrapped(layer, static_argnums=0)(number, w, x)
        return jnp.mean(x**2)

    def train_step(weights, x):
        grads = jax.grad(loss_fn)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    return train_step


def as_it_is(function, static_argnums):
    return function


def arguments():
    one = {"up": spec(WIDTH, 4 * WIDTH), "down": spec(4 * WIDTH, WIDTH)}
    return [dict(one) for _ in range(LAYERS)], spec(ROWS, WIDTH)


@pytest.mark.slow
def test_a_pin_of_what_a_layer_reads_is_kept_to():
    pin = {"layer input*": "keep"}
    found = plan(step_with(as_it_is), *arguments(), budget="20%", pin=pin)
    (pinned,) = [d for d in found.decisions if d.name.startswith("layer input")]
    assert pinned.decision == "keep"


@pytest.mark.slow
def test_they_fit_where_a_checkpoint_around_each_does():
    args = arguments()
    program = target_or_skip("h200").compile(jax.jit(step_with(jax.checkpoint)), *args)
    by_hand = total(program.memory_analysis())
    budget = int(1.3 * by_hand)
    found = plan(step_with(as_it_is), *args, budget=budget, forbid=("tile",))
    assert found.fits
    assert "recompute" in {d.decision for d in found.decisions}
    assert any("stands outside of scans" in note for note in found.proof.notes)


@pytest.mark.slow
def test_chains_that_the_compiler_fuses_are_not_priced_as_arrays():
    args, step = arguments(), step_with(as_it_is)
    found = plan(step, *args, budget="1500MiB", forbid=("tile",))
    written = stowax.inspect(jax.jit(step), *args, target=target_or_skip("h200"))
    (priced,) = (b.seconds for b in found.baselines if b.name == "keep all")
    assert priced == pytest.approx(written.timeline.step_seconds, rel=0.35)
