"""Steps of `checkify`: JAX numbers their checks anew whenever it traces them."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import stowax
from stowax._verify._checks import comparable
from verified_steps import LARGE, arguments, train_step

pytestmark = [pytest.mark.usefixtures("usual_promotion")]


def checked(params, momentum, x):
    largest = jnp.max(x)
    checkify.check(largest < 100.0, "too large: {x}", x=largest)
    return train_step(params, momentum, x)


def test_errors_of_two_traces_compare_by_what_happened():
    error, again = (
        checkify.checkify(lambda x: checkify.check(x > 0, "no"))(1.0)[0]
        for _ in range(2)
    )
    assert comparable(error) == comparable(again)


def test_a_step_that_returns_an_error_passes():
    step = checkify.checkify(checked)
    args = jax.tree.map(jnp.copy, arguments(LARGE))
    plan = stowax.plan(
        step, *args, pin={"activation": "recompute"}, target="cpu", progress=False
    )
    v = stowax.verify(step, plan, *args, steps=2)
    assert v, v
    assert "bool" in {leaf.dtype for leaf in v.leaves}
