"""Steps whose plans were refused by what surrounds them: meshes, placed state, effects.

Random programs found each of these: a plan was made, and the step called as the plan
wants it was no longer the one that was planned, or JAX failed on it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stowax

LAYERS, WIDTH, ROWS = 2, 256, 64


def arrays():
    draw = np.random.default_rng(0).normal
    weights = {
        "w": jnp.asarray(0.05 * draw(size=(WIDTH, WIDTH)), jnp.float32),
        "v": jnp.asarray(0.05 * draw(size=(WIDTH, WIDTH)), jnp.float32),
    }
    momentum = jax.tree.map(jnp.zeros_like, weights)
    return weights, momentum, jnp.asarray(draw(size=(ROWS, WIDTH)), jnp.float32)


def loss_of(params, x):
    for _ in range(LAYERS):  # the same weights in every layer
        x = 0.7 * x + jnp.tanh(x @ params["w"]) @ params["v"]
    return jnp.mean(x**2)


def update(loss, grads, params, momentum):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss


def train_step(params, momentum, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return update(loss, grads, params, momentum)


def check(step, plan):
    expected = jax.jit(step)(*arrays())
    params, momentum, x = arrays()
    got = plan.apply(step)(*plan.place(params, momentum), x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_state_that_is_placed_beside_a_batch_that_is_not():
    """Placed arrays are on a mesh of one device, the batch is on none."""
    pin = {"optimizer state": "offload", "*tanh*": "recompute"}
    plan = stowax.plan(
        train_step, *arrays(), target="h200", budget="4MiB", pin=pin, progress=False
    )
    assert {a.memory_kind for a in plan.program.arguments} == {"device", "pinned_host"}
    assert plan.program.rewritten
    check(train_step, plan)


@pytest.mark.slow
def test_effects_in_a_fixed_order_leave_nothing_in_host_memory():
    def step(params, momentum, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        loss = io_callback(lambda v: np.float32(v), shape, loss, ordered=True)
        return update(loss, grads, params, momentum)

    plan = stowax.plan(step, *arrays(), target="h200", budget="3MiB", progress=False)
    assert {d.decision for d in plan.decisions} <= {"keep", "recompute"}
    assert any(
        note.startswith("nothing may be offloaded: ") for note in plan.proof.notes
    )
    assert plan.fits
    check(step, plan)


@pytest.mark.slow
def test_a_callback_that_is_given_what_the_update_is_given():
    """It gives nothing back that could be waited for; this one is very common."""
    seen = []

    def step(params, momentum, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
        out = update(loss, grads, params, momentum)
        jax.debug.callback(lambda *values: seen.append(values), loss, norm)
        return out

    pin = {"optimizer state": "offload"}
    plan = stowax.plan(
        step, *arrays(), target="h200", budget="4MiB", pin=pin, progress=False
    )
    assert {a.memory_kind for a in plan.program.arguments} == {"device", "pinned_host"}
    assert not any("cannot read" in note for note in plan.proof.notes)
    check(step, plan)
    jax.effects_barrier()
    assert len(seen) == 2
    np.testing.assert_allclose(*seen, rtol=1e-4)


def test_numbers_beside_arrays_on_an_explicit_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    home = NamedSharding(mesh, PartitionSpec())

    def step(params, x, rate):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    params, _, x = jax.tree.map(lambda a: jax.device_put(a, home), arrays())
    args = params, x, np.float32(0.1)
    expected = jax.jit(step)(*args)
    plan = stowax.plan(step, *args, pin={"*tanh*": "recompute"}, progress=False)
    got = plan.apply(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def spread(mesh, way):
    """A step that spreads over `mesh` what it is given anywhere."""
    here = NamedSharding(mesh, PartitionSpec("d"))

    def layer(y, w):
        return y + jnp.tanh(y @ w["w"]) @ w["v"], None

    def apart(y):
        return jax.lax.pmean(jnp.mean(y**2), "d")

    def loss(params, x):
        if way == "constraint":
            x = jax.lax.with_sharding_constraint(x, here)
        y, _ = jax.lax.scan(layer, x, params)
        if way == "constraint":
            return jnp.mean(y**2)
        spec = PartitionSpec("d"), PartitionSpec()
        return jax.shard_map(apart, mesh=mesh, in_specs=spec[0], out_specs=spec[1])(y)

    def step(params, x):
        loss_, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss_

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "target"), [("constraint", None), ("shard_map", "h200x4")]
)
def test_arrays_that_are_put_nowhere_go_where_the_step_spreads_them(way, target):
    draw = np.random.default_rng(0).normal
    make = lambda: {
        name: jnp.asarray(0.05 * draw(size=(4, 64, 64)), jnp.float32) for name in "wv"
    }
    params, x = make(), np.asarray(draw(size=(4096, 64)), np.float32)
    step = spread(jax.sharding.Mesh(jax.devices()[:4], ("d",)), way)
    planned = stowax.jit(step, budget="70%", target=target, progress=False)
    given = jax.tree.map(jnp.copy, params)
    for _ in range(3):
        params, want = jax.jit(step)(params, x)
        given, got = planned(given, x)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert planned.plan.fits
    assert any(d.decision == "recompute" for d in planned.plan.decisions)
    if target is None:
        assert stowax.verify(step, planned.plan, make(), x)
