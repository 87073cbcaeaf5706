"""A plan that is given: `stowax.jit` says which file it was, and what it says."""

import jax
import jax.numpy as jnp

import stowax

ARGS = jnp.ones((64, 64)), jnp.ones((128, 64))


def step(w, x):
    return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def test_the_file_of_a_plan_is_named_at_the_first_call(tmp_path):
    made = stowax.plan(step, *ARGS, target="cpu", budget="1GiB", progress=False)
    file = tmp_path / "plan.json"
    made.save(file)
    said = []
    planned = stowax.jit(step, plan=file, progress=said.append)
    assert said == []
    planned(*ARGS)
    planned(*ARGS)
    (line,) = said
    assert line.startswith(f"step runs under the plan in {file}, made for cpu: ")
    assert line.endswith(" KiB of 1.00 GiB per device")


def test_who_has_the_plan_is_told_nothing():
    made = stowax.plan(step, *ARGS, target="cpu", progress=False)
    said = []
    stowax.jit(step, plan=made, progress=said.append)(*ARGS)
    assert said == []
