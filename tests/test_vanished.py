"""A planned copy that the compiled program does not hold is an error, never a surprise.

Copies are taken out of what is read of the compiled program, as a compiler that folds
them away would.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import plan, spec
from stowax._trial import _compiled

LAYERS, WIDTH, ROWS = 3, 1024, 64


def layer(x, w):
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


@stowax.stow
def loss_fn(params, x):
    if isinstance(params, list):
        for w in params:
            x = layer(x, w)
    else:
        x = jax.lax.scan(lambda c, w: (layer(c, w), None), x, params)[0]
    return jnp.mean(x**2)


def train_step(params, x):
    grads = jax.grad(loss_fn)(params, x)
    return jax.tree.map(lambda w, g: w - 0.5 * g, params, grads)


def arguments(form):
    one = {"in": spec(WIDTH, WIDTH), "out": spec(WIDTH, WIDTH)}
    stacked = {name: spec(LAYERS, WIDTH, WIDTH) for name in one}
    return [one] * LAYERS if form == "loop" else stacked, spec(ROWS, WIDTH)


def without(monkeypatch, lost):
    """Inspections from here on lack the copies that `lost` says."""
    whole = _compiled.inspect_program

    def inspect_program(*args):
        found = whole(*args)
        left = tuple(t for t in found.transfers if not lost(t))
        return dataclasses.replace(found, transfers=left)

    monkeypatch.setattr(_compiled, "inspect_program", inspect_program)


def scoped(kind, number):
    """Whether a copy is under the scope of a kind, for one input of the layers."""
    return lambda t: f"stowax.{kind}." in t.op_name and f".{number}/" in t.op_name


def unnamed(t):
    """Copies in branches lose their names: what an unrolled loop fetches."""
    return t.direction == "host-to-device" and "stowax." not in t.op_name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "lost", "named"),
    [
        ("scan", scoped("weights", 0), "offloads them: weight 1 of the layers at"),
        ("scan", scoped("gradients", 1), "them: gradients of weight 2 of the layers"),
        ("loop", unnamed, "weight 1 of .*, weight 2 of "),
    ],
)
def test_a_stream_that_is_not_there_is_named_and_its_values_stay(
    form, lost, named, monkeypatch
):
    without(monkeypatch, lost)
    found = plan(train_step, *arguments(form), pin={"parameter": "offload"})
    assert any(re.search(named, note) for note in found.proof.notes)
    parameters = [d for d in found.decisions if d.role == "parameter"]
    assert {d.decision for d in parameters} == {"keep"}
