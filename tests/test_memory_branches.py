"""Loops with branches in them: memory and the timeline have one axis."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import spec, target_or_skip


def step(x, w):
    def layer(y, k):
        branches = [lambda y, i=i: jnp.tanh(y @ w[i]) @ w[i + 1] for i in range(3)]
        return jax.lax.switch(k, branches, y), None

    return jax.lax.scan(layer, x, jnp.arange(3))[0]


@pytest.mark.parametrize(
    "name", ["h200", pytest.param("v5p-8", marks=pytest.mark.slow)]
)
def test_branches_take_their_share_of_the_turns(name):
    machine = target_or_skip(name)
    args = spec(512, 256), spec(4, 256, 256)
    found = stowax.inspect(jax.jit(step), *args, target=machine)
    last = found.memory_timeline.device.moments[-1].seconds
    # Every branch in every turn would be three times as long.
    assert last == pytest.approx(found.timeline.step_seconds, rel=0.2)
