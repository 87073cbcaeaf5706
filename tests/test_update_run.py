"""A step with its state in host memory gives the numbers of the step that it is.

Operation by operation (`jax.disable_jit`) the results are the same bits, whatever the
optimizer; compiled, within what another fusion may round. The CPU has host memory to
put the state in, so placement is checked for real; that it saves anything is not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from stowax._update._pieces import cut_out, put_in
from updates import SMALL, placed, streamed_step

pytestmark = pytest.mark.usefixtures("usual_promotion")


def weights(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "matrix": jax.random.normal(keys[0], (64, 128), dtype),
        "stack": jax.random.normal(keys[1], (6, 16, 128), dtype),
        "vector": jax.random.normal(keys[2], (16,), dtype),
    }


LABELS = {"matrix": "a", "stack": "b", "vector": "a"}
MASK = {"matrix": True, "stack": False, "vector": True}

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "scheduled": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "bfloat16 momentum": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "lion": optax.lion(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=32, momentum=0.9),
    "lamb": optax.lamb(1e-2),
    "parts": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.lion(1e-2)}, LABELS
    ),
    "masked": optax.masked(optax.adam(1e-2), MASK),
    "every second step": optax.MultiSteps(optax.adam(1e-2), 2),
    "only finite": optax.apply_if_finite(optax.adam(1e-2), 2),
    "averaged updates": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "muon": optax.contrib.muon(1e-2),
}


def train_step(optimizer):
    def step(params, state, batch):
        def loss(p):
            hidden = jnp.tanh(batch @ p["matrix"] + p["vector"].sum())
            return sum(jnp.mean((hidden @ layer.T) ** 2) for layer in p["stack"])

        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def check(step, state, *others, steps=2):
    """`step(params, state, batch)` a few times: plain, streamed, streamed compiled."""
    params, batch = others
    found = streamed_step(step, params, state, batch)
    assert any(leaf.way == "streamed" for leaf in found.leaves)
    expected, got = (params, state), (params, state)
    for _ in range(steps):
        with jax.disable_jit():
            expected = jax.tree.map(jnp.array, step(*expected, batch))
            got = found.run(*got, batch)
        same(expected, got)
        found.check_places(got)
    # Compiled beside compiled: what tanh saturates to a zero gradient depends on how it
    # is computed, and Adam makes a whole step of it.
    expected, got = (params, state), (params, state)
    for _ in range(steps):
        expected = jax.jit(step)(*expected, batch)
        got = found.compiled(*got, batch)
        found.check_places(got)
    close(expected, got)
    return found


def same(expected, got):
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def close(expected, got):
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        tolerance = 2e-2 if a.dtype == jnp.bfloat16 else 1e-3
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_numbers_under_any_optimizer(name):
    optimizer = OPTIMIZERS[name]
    params, batch = weights(), jnp.linspace(-1.0, 1.0, 4 * 64).reshape(4, 64)
    check(train_step(optimizer), optimizer.init(params), params, batch)


@pytest.mark.slow
def test_skipped_steps_leave_the_state_alone():
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 5)
    params = weights()
    check(
        train_step(optimizer),
        optimizer.init(params),
        params,
        jnp.full((4, 64), jnp.nan),
    )


@pytest.mark.slow
def test_average_of_parameters_kept_by_the_user():
    optimizer = optax.adam(1e-2)
    params, batch = weights(), jnp.ones((4, 64))

    def step(params, state, batch):
        inner, average = state
        params, inner = train_step(optimizer)(params, inner, batch)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return params, (inner, average)

    found = check(step, (optimizer.init(params), params), params, batch)
    # moments and average of a leaf pass through the device together
    assert {len(group.reads) for group in found.groups} == {3}


@pytest.mark.slow
def test_master_weights_live_in_host_memory():
    optimizer = optax.adam(1e-2)
    master, batch = weights(), jnp.ones((4, 64), jnp.bfloat16)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)

    def step(params, state, batch):
        inner, master = state
        grads = jax.grad(lambda p: jnp.mean((batch @ p["matrix"]) ** 2))(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner = optimizer.update(grads, inner, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
        return params, (inner, master)

    found = check(step, (optimizer.init(master), master), params, batch)
    assert {len(group.reads) for group in found.groups} == {3}


@pytest.mark.slow
def test_eight_bit_state_with_a_scale_per_row():
    params, batch = {"matrix": weights()["matrix"]}, jnp.ones((4, 64))
    codes = jnp.zeros((64, 128), jnp.int8)
    state = codes, jnp.full((64, 1), 0.01)

    def step(params, state, batch):
        codes, scale = state
        grad = jax.grad(lambda p: jnp.mean((batch @ p["matrix"]) ** 2))(params)[
            "matrix"
        ]
        moment = 0.9 * (codes.astype(jnp.float32) * scale) + 0.1 * grad
        codes = jnp.clip(jnp.round(moment / scale), -127, 127).astype(jnp.int8)
        return {"matrix": params["matrix"] - 1e-2 * moment}, (codes, scale)

    found = check(step, state, params, batch)
    assert found.groups[0].spread  # the scales are cut along


def test_a_vector_for_the_rows_of_a_square_leaf():
    """It is made before the loop: in there it would be taken for one of columns."""
    keys = jax.random.split(jax.random.key(0), 3)
    params, batch = jax.random.normal(keys[0], (64, 64)), jnp.ones((4, 64))
    state = jax.random.normal(keys[1], (64, 64)), jax.random.normal(keys[2], (64,))

    def step(params, state, batch):
        moment, rate = state
        moment = moment * jnp.exp(rate) + params
        return params - 1e-2 * moment * jnp.tanh(rate), (moment, rate)

    found = check(step, state, params, batch, steps=1)
    assert found.groups[0].spread


def test_a_choice_between_numbers():
    """They are literals of the program, spread out in the loop."""
    params, batch = weights()["matrix"], jnp.ones((4, 64))

    def step(params, state, batch):
        rate = jnp.where(jnp.sign(state) == jnp.sign(params), 1.25, 0.5)
        return params - 1e-2 * state * rate, state * rate

    check(step, weights()["matrix"] + 0.5, params, batch)


@pytest.mark.slow
def test_parameter_used_twice():
    optimizer = optax.adam(1e-2)
    params, batch = {"tied": weights()["matrix"]}, jnp.ones((4, 64))

    def step(params, state, batch):
        def loss(p):
            return jnp.mean(((batch @ p["tied"]) @ p["tied"].T) ** 2)

        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    check(step, optimizer.init(params), params, batch)


def test_leaves_that_only_go_whole_give_the_same_numbers():
    params, batch = {"matrix": weights()["matrix"]}, jnp.ones((4, 64))

    def step(params, state, batch):
        grad = jax.grad(lambda p: jnp.mean((batch @ p["matrix"]) ** 2))(params)[
            "matrix"
        ]
        state = jnp.sort(0.9 * state + grad, axis=0)
        return {"matrix": params["matrix"] - 1e-2 * state}, state

    plain = jnp.ones((64, 128))
    found = streamed_step(step, params, plain, batch)
    assert [leaf.way for leaf in found.leaves] == ["whole"]
    with jax.disable_jit():
        same(step(params, plain, batch), found.run(params, plain, batch))
    close(step(params, plain, batch), found.compiled(params, plain, batch))


def test_state_that_comes_back_as_it_was():
    params, batch = {"matrix": weights()["matrix"]}, jnp.ones((4, 64))

    def step(params, state, batch):
        frozen, moment = state
        grad = jax.grad(lambda p: jnp.mean((batch @ p["matrix"]) ** 2))(params)[
            "matrix"
        ]
        moment = 0.9 * moment + grad * frozen
        return {"matrix": params["matrix"] - 1e-2 * moment}, (frozen, moment)

    check(step, (jnp.full((64, 128), 0.5), jnp.ones((64, 128))), params, batch)


def test_nothing_is_read_after_its_block_is_written():
    """Every block once: a count of visits in the state itself shows it."""
    params, batch = {"matrix": weights()["matrix"]}, jnp.ones((4, 64))

    def step(params, state, batch):
        one, two = state
        return {"matrix": params["matrix"] + one + two}, (one + 1.0, two + 1.0)

    state = jnp.zeros((64, 128)), jnp.zeros((64, 128))
    found = streamed_step(step, params, state, batch)
    got = found.compiled(params, state, batch)
    same((params["matrix"], state[0] + 1, state[1] + 1), (got[0]["matrix"], *got[1]))


def test_host_arrays_stay_where_they_are():
    found = streamed_step(
        train_step(optax.adam(1e-2)),
        weights(),
        optax.adam(1e-2).init(weights()),
        jnp.ones((4, 64)),
    )
    args = placed(found, weights(), optax.adam(1e-2).init(weights()), jnp.ones((4, 64)))
    kinds = [a.sharding.memory_kind for a in args]
    assert [k == "pinned_host" for k in kinds] == [
        i in found.host_inputs for i in range(len(args))
    ]
    assert isinstance(args[0].sharding, SingleDeviceSharding)
    assert SMALL.leaf_bytes > 16 * 4  # a vector of the tests stays on the device


def test_blocks_are_cut_where_a_loop_counts_with_64_bits():
    with jax.enable_x64(True):
        whole = jnp.arange(24.0).reshape(6, 4)
        at = [jnp.int64(2), jnp.int32(0)]
        part = cut_out(whole, at, (2, 4))
        np.testing.assert_array_equal(part, whole[2:4])
        put = put_in(whole, 0 * part, at)
        np.testing.assert_array_equal(put, whole.at[2:4].set(0))
