"""The commands and steps of a framework's objects."""

import json

import pytest

from test_cli import run

OBJECTS = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx

def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss

def make():
    with jax.numpy_dtype_promotion("standard"):
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return step, (model, optimizer, jnp.ones((32, 64)))

def jitted():
    return nnx.jit(step), make()[1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["make", "jitted"])
def test_steps_of_objects(tmp_path, monkeypatch, usual_promotion, name):
    """Each command takes what the step takes, jitted by a framework or not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objects.py").write_text(OBJECTS)
    where = f"objects.py:{name}"
    _, out, _ = run("inspect", where, "--target", "cpu", "--json")
    assert json.loads(out)["memory"]["device"]["argument"] >= 64 * 64 * 4
    assert run("plan", where, "--target", "cpu", "-o", "p.json")[0] == 0
    assert run("inspect", where, "p.json")[0] in (0, 1)
    code, out, _ = run("verify", where, "p.json")
    assert code == 0
    assert "PASSED" in out
