"""A plan applied to what it was not made for: refused with what differs, or right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stowax
from planned_models import target_or_skip
from stowax._errors import PlanMismatchError
from stowax._layers._host_layers import not_positive

LAYERS, WIDTH, ROWS = 4, 64, 64
PIN = {"optimizer state": "offload", "parameter": "offload"}


def arrays():
    draw = np.random.default_rng(0).normal
    weights = jnp.asarray(0.05 * draw(size=(LAYERS, WIDTH, 4 * WIDTH)), jnp.float32)
    return (
        weights,
        jnp.zeros_like(weights),
        jnp.asarray(draw(size=(ROWS, WIDTH)), jnp.float32),
    )


def loss_of(weights, x):
    layer = lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None)
    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def train_step(weights, momentum, x):
    loss, grads = jax.value_and_grad(loss_of)(weights, x)
    momentum = 0.9 * momentum + grads
    return weights - 0.1 * momentum, momentum, loss


def loss_first(*args):
    weights, momentum, loss = train_step(*args)
    return loss, weights, momentum


@pytest.fixture(scope="module")
def plan():
    return stowax.plan(
        train_step, *arrays(), target="h200", budget="90%", pin=PIN, progress=False
    )


@pytest.mark.slow
def test_results_in_another_order(plan):
    """Where an array comes back is part of the plan."""
    message = (
        r"step: args\[0\] is in host memory by the plan, and cannot be in this step: .*"
        r"whose results came in the same order\."
    )
    for run in (plan.apply(loss_first), stowax.jit(loss_first, plan=plan)):
        weights, momentum, x = arrays()
        args = (weights, momentum) if run.__class__.__name__ == "Planned" else None
        placed = args or plan.place(weights, momentum)
        with pytest.raises(PlanMismatchError, match=message):
            run(*placed, x)


def test_a_step_that_fails_by_itself_fails_so_under_a_plan(plan):
    def broken(weights, momentum, x):
        return train_step(weights, momentum, x @ jnp.ones((3, 3)))

    weights, momentum, x = arrays()
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        plan.apply(broken)(*plan.place(weights, momentum), x)


def test_state_of_other_shapes_is_placed_nowhere_where_nothing_is_on_the_host():
    plan = stowax.plan(train_step, *arrays(), target="cpu", progress=False)
    others = [jnp.concatenate([a, a]) for a in arrays()[:2]]
    assert all(a is b for a, b in zip(plan.place(*others), others, strict=True))
    with pytest.raises(PlanMismatchError, match=r"step: args\[0\] is float32"):
        plan.apply(train_step)(*others, arrays()[2])


def test_what_a_copy_waits_for_may_be_complex():
    values = [jnp.asarray([1j - 3, 2.0]), jnp.asarray([2.5])]
    assert not_positive(values) == -3


@pytest.fixture(scope="module")
def spread():
    """A plan for parameters that are cut along a mesh's only axis."""
    mesh = target_or_skip("h200x8").mesh((8,), ("fsdp",))
    cut = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    specs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        for a, sharding in zip(arrays(), (cut, cut, rows), strict=True)
    ]
    return stowax.plan(
        train_step, *specs, target="h200x8", budget="95%", pin=PIN, progress=False
    )


@pytest.mark.slow
def test_state_that_is_spread_otherwise_is_refused(spread):
    weights, momentum, x = arrays()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    for partition in (PartitionSpec(), PartitionSpec(None, "fsdp")):
        other = jax.device_put((weights, momentum), NamedSharding(mesh, partition))
        with pytest.raises(PlanMismatchError) as raised:
            spread.place(*other)
        wanted = PartitionSpec(None, None, "fsdp")
        assert f"made for {wanted}" in str(raised.value)
        assert "another sharding takes another plan" in str(raised.value)
    cut = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    placed = spread.place(*jax.device_put((weights, momentum), cut))
    whole = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))
    got = spread.apply(train_step)(*placed, whole)
    assert got[0].sharding.is_equivalent_to(placed[0].sharding, 3)
    for a, b in zip(got, jax.jit(train_step)(*arrays()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_mesh_with_other_axes_is_refused_and_one_device_is_not(spread):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    weights, momentum, x = arrays()
    placed = jax.device_put((weights, momentum), host)
    with pytest.raises(PlanMismatchError, match="is on a mesh with the axes x, and "):
        spread.apply(train_step)(*placed, x)
    got = spread.apply(train_step)(*spread.place(weights, momentum), x)
    for a, b in zip(got, jax.jit(train_step)(*arrays()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
