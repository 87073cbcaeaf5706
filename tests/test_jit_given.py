"""What planning says: of a plan that is given the file, of a share what it is of."""

import jax
import jax.numpy as jnp

import stowax
from stowax._units import format_bytes

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


def test_a_share_says_of_what_it_is_one():
    said = []
    made = stowax.plan(step, *ARGS, target="cpu", budget="60%", progress=said.append)
    (as_it_is,) = [line for line in said if " on the device, " in line]
    assert "budget" not in as_it_is
    taken = format_bytes(made.search.written.compiled_bytes)
    budget = format_bytes(made.budget_bytes)
    assert f"a budget of 60% of {taken} is {budget}" in said
