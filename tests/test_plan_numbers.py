"""Plans on the attached CPU: the numbers are those of the step without a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planned_models import arguments, mean_square, numbers, plan, step_of, train


def small():
    return arguments(width=64, rows=512)


def run(step, args, count=3):
    params, x = numbers(args)
    losses = []
    for _ in range(count):
        params, loss = step(params, x)
        losses.append(loss)
    return params, losses


@pytest.mark.quick("True")
@pytest.mark.parametrize("unrolled", [False, True])
def test_training_under_a_plan_gives_the_same_numbers(unrolled):
    args = arguments(width=64, rows=512, unrolled=unrolled)
    free = plan(train, *args, target="cpu")
    budget = int(0.6 * free.device_bytes)
    found = plan(train, *args, target="cpu", budget=budget)
    assert found.fits
    decisions = {d.decision for d in found.decisions}
    assert decisions == {"keep", "recompute"}  # a CPU has no other memory to go to
    assert found.host_bytes == 0
    expected = run(jax.jit(train), args)
    got = run(found.apply(train), args)
    # Sums of up to 512 rows in another order.
    bound = 512 * float(jnp.finfo(jnp.float32).eps)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * scale)


def test_a_plan_that_moves_nothing_gives_the_same_bits():
    found = plan(train, *small(), target="cpu")
    assert found.outcome == "unneeded"
    expected, got = run(jax.jit(train), small()), run(found.apply(train), small())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    lowered = found.apply(train).lower(*small())
    assert lowered.as_text() == jax.jit(train).lower(*small()).as_text()


def test_place_and_specs_one_in_one_out_several_a_tuple():
    found = plan(train, *small(), target="cpu")
    params, x = numbers(small())
    assert found.place(x) is x
    placed = found.place(params, np.asarray(x))
    assert isinstance(placed, tuple)
    assert isinstance(placed[1], jax.Array)
    assert placed[0]["up"] is params["up"]
    assert found.specs(x).shape == x.shape
    assert isinstance(found.specs(params), dict)
    assert isinstance(found.specs(params, x), tuple)
    jitted = found.apply(train)
    assert jitted.trace(params, x).out_info[1].shape == ()


def test_a_mark_alone_changes_nothing():
    params, x = numbers(small())
    plain = step_of(lambda p, x: mean_square.__wrapped__(p, x))
    got, expected = jax.jit(train)(params, x), jax.jit(plain)(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
