"""Copies that the compiler leaves out: what they are of stays, and nothing else."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from plan_parts import changed

LAYERS, WIDTH = 4, 48


def forward(w, x):
    out, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)
    return out


def step(w, moment, x):
    # The same pass twice: the compiler makes one of the two, and one's copies go.
    loss = lambda w: (forward(w, x) - 1).mean() ** 2 + (forward(w, x) ** 2).mean()
    gradient = jax.grad(loss)(w)
    moment = 0.9 * moment + gradient
    return w - 0.1 * moment, moment


@pytest.fixture(scope="module")
def plan():
    spec = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return stowax.plan(
        step,
        spec,
        spec,
        jax.ShapeDtypeStruct((16, WIDTH), jnp.float32),
        target="h200",
        budget="150%",
        pin={"optimizer state": "offload", "activation": "offload"},
        progress=False,
    )


@pytest.mark.slow
def test_other_values_are_offloaded_as_they_are_pinned(plan):
    decided = {d.role: d.decision for d in plan.decisions if d.stack == "state"}
    assert decided["optimizer state"] == "offload"
    (note,) = [n for n in plan.proof.notes if "may not be offloaded" in n]
    assert note.startswith("what it names may not be offloaded: the compiler left")


@pytest.mark.slow
def test_the_plan_says_of_which_pin_not_all_was_kept(plan):
    pinned = [d for d in plan.decisions if d.pinned == "activation"]
    assert {d.decision for d in pinned} == {"offload"}
    text = " ".join(str(plan).split())
    assert f"kept for {len(pinned)}; of others see the notes" in text
    assert "'optimizer state' to offload (1 value): costs" in text


@pytest.mark.slow
def test_where_nothing_is_refused_pins_have_their_price(plan):
    without = changed(plan, notes=())
    text = " ".join(str(without).split())
    assert "see the notes" not in text
    assert text.count("per step") + text.count("costs nothing") >= 2
