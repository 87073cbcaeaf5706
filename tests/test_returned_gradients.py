"""Steps that return gradients: on the device, or where they do not fit, on the host.

Numbers are of the CPU, bytes of programs compiled for chips that are not there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import stowax
from planned_models import MIB, QUICK, kinds, numbers, plan, spec, target_or_skip

LAYERS, WIDTH, ROWS = 8, 512, 64
PARAMETERS = 2 * LAYERS * WIDTH * WIDTH * 4
GRADIENTS = PARAMETERS
LITTLE = 10 * MIB  # two layers' weights and gradients, 4 MiB each, and some to spare
ENOUGH = GRADIENTS + LITTLE
NOTE = (
    "gradients that the step returns of parameters in host memory come in host memory"
)


def layer(x, w):
    return x + jnp.tanh(x @ w["in"]) @ w["out"]


@stowax.stow
def loss_fn(weights, x):
    if isinstance(weights, list):
        for w in weights:
            x = layer(x, w)
    else:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
    return jnp.mean((x - 1) ** 2)


def gradients(weights, x):
    return jax.value_and_grad(loss_fn)(weights, x)


def with_norm(weights, x):
    loss, grads = gradients(weights, x)
    squares = [jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(grads)]
    return loss, grads, jnp.sqrt(sum(squares))


def scaled(weights, x):
    loss, grads = gradients(weights, x)
    return loss, jax.tree.map(lambda g: 0.5 * g, grads)


def shapes(*, stacked=True):
    one = {"in": spec(WIDTH, WIDTH), "out": spec(WIDTH, WIDTH)}
    if not stacked:
        return [one] * LAYERS, spec(ROWS, WIDTH)
    return (
        jax.tree.map(lambda s: spec(LAYERS, *s.shape), one),
        spec(ROWS, WIDTH),
    )


def same(found, expected):
    for mine, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@functools.cache
def within_little(step, target):
    return plan(step, *shapes(), target=target, budget=LITTLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "target"), [(gradients, "h200"), (with_norm, "v5p-8")]
)
def test_what_fits_in_no_other_way_returns_them_in_host_memory(step, target, tmp_path):
    found = within_little(step, target)
    assert found.fits
    assert found.device_bytes <= LITTLE < GRADIENTS
    assert found.host_bytes >= PARAMETERS + GRADIENTS
    assert any(NOTE in note for note in found.proof.notes)
    reasons = {d.reason for d in found.decisions if d.role == "parameter"}
    assert all("its gradient, which the step returns" in reason for reason in reasons)
    args = numbers(shapes())
    found.save(tmp_path / "plan.json")
    again = stowax.load_plan(tmp_path / "plan.json", compiler_options=QUICK)
    out = again.apply(step)(*again.place(*args))
    assert kinds(out[1]) == {"pinned_host"}
    same(out, jax.jit(step)(*args))
    machine = target_or_skip(target)
    program = machine.compile(found.apply(step), *found.specs(*shapes()))
    inspection = stowax.inspect(program)
    assert not [h for h in inspection.hazards if h.kind == "host-compute"]
    out = sum(
        t.total_bytes for t in inspection.transfers if t.direction == "device-to-host"
    )
    # Once each, and at most the layers' inputs besides.
    assert GRADIENTS <= out <= GRADIENTS + LAYERS * ROWS * WIDTH * 4


@pytest.mark.slow
def test_the_gate_knows_where_they_belong():
    found = within_little(gradients, "h200")
    verified = stowax.verify(gradients, found, *numbers(shapes()))
    assert verified.passed, str(verified)


@pytest.mark.slow
def test_where_there_is_room_they_come_on_the_device():
    found = plan(gradients, *shapes(), budget=ENOUGH)
    assert found.fits
    assert not any(NOTE in note for note in found.proof.notes)
    assert found.smallest_budget <= LITTLE  # in host memory, as it knows
    args = numbers(shapes())
    out = found.apply(gradients)(*found.place(*args))
    assert kinds(out[1]) == {"device"}
    same(out, jax.jit(gradients)(*args))


@pytest.mark.slow
def test_what_is_made_of_gradients_comes_on_the_device():
    found = plan(scaled, *shapes(), budget=LITTLE)
    assert not found.fits
    assert found.smallest_budget > GRADIENTS
    roomy = plan(scaled, *shapes(), budget=ENOUGH)
    assert roomy.fits
    args = numbers(shapes())
    out = roomy.apply(scaled)(*roomy.place(*args))
    assert kinds(out[1]) == {"device"}
    same(out, jax.jit(scaled)(*args))


@pytest.mark.slow
def test_parts_of_one_buffer_come_on_the_device():
    """An unrolled model's gradients: no loop leaves each where it would be returned."""
    found = plan(gradients, *shapes(stacked=False), budget=LITTLE)
    assert not found.fits
    assert found.smallest_budget > GRADIENTS


@pytest.mark.slow
def test_each_device_of_a_mesh_returns_its_own_part():
    machine = target_or_skip("v5p-8")
    mesh = machine.mesh((4,), ("data",))
    spread = jax.sharding.NamedSharding(mesh, PartitionSpec(None, None, "data"))
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    weights, x = shapes()
    args = (
        jax.tree.map(lambda s: s.update(sharding=spread), weights),
        x.update(sharding=rows),
    )
    found = plan(gradients, *args, target="v5p-8", budget=LITTLE // 2)
    assert found.fits
    program = machine.compile(found.apply(gradients), *found.specs(*args))
    _, places = program.jax_compiled.output_shardings
    for place in jax.tree.leaves(places):
        assert place.memory_kind == "pinned_host"
        shard = place.shard_shape((LAYERS, WIDTH, WIDTH))
        assert shard == (LAYERS, WIDTH, WIDTH // 4)


@pytest.mark.slow
def test_they_are_tried_where_predictions_of_all_else_were_wrong():
    """Small arrays need more than is predicted: all compiles go before it is known."""

    def steps(weights, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        net = lambda weights: jax.lax.scan(layer, x, weights)[0]
        return jax.value_and_grad(lambda w: jnp.mean((net(w) - 1) ** 2))(weights)

    arrays = spec(6, 128, 128), spec(128, 128)
    for budget in (910 * 2**10, MIB):
        found = plan(steps, *arrays, target="h200", budget=budget)
        assert found.fits
        assert found.program.streaming.gradients_on_host
    least = plan(steps, *arrays, target="h200", budget=520 * 2**10)
    assert not least.fits
    assert 520 * 2**10 < least.smallest_budget <= least.device_bytes
