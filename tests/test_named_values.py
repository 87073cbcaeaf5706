"""Values with a `checkpoint_name` lie on the devices as they would without it.

A name is lowered to nothing, so propagation says nothing of it. Counted whole on every
device, a named layer's input took the mesh's size too much of every budget.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import stowax
from stowax._records._stages import Options
from stowax._step._trace import trace_step
from stowax._survey._take import take_survey

LAYERS, ROWS, WIDTH = 3, 4096, 512


def named_first(x, w):
    return jnp.tanh(checkpoint_name(x, "first") @ w)


def named_last(x, w):
    return checkpoint_name(jnp.tanh(x @ w), "last")


def named_twice(x, w):
    x = checkpoint_name(checkpoint_name(x, "first"), "again")
    return checkpoint_name(jnp.tanh(x @ w), "last")


@pytest.mark.parametrize("body", [named_first, named_last, named_twice])
def test_named_values_of_a_sharded_step_count_per_device(body):
    target = stowax.target("v5p-8")
    mesh = target.mesh((target.device_count,), ("fsdp",))

    @stowax.stow
    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, weights)
        return jnp.mean(x)

    def spec(shape, *partition):
        sharding = NamedSharding(mesh, PartitionSpec(*partition))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    args = (
        spec((LAYERS, WIDTH, WIDTH), None, "fsdp"),
        spec((ROWS, WIDTH), "fsdp", None),
    )
    step, options = jax.grad(loss), Options()
    survey = take_survey(step, args, trace_step(step, args, options), target, options)
    (layers,) = (body for body in survey.bodies if body.count == LAYERS)
    rows = [v for v in layers.values if v.shape == (ROWS, WIDTH)]
    assert {v.bytes for v in rows} == {4 * ROWS * WIDTH // target.device_count}
