"""What a user may hand over as state: odd leaves, changed trees, arrays given away.

Each gives the right thing or an error that says what to do. Plans are for an H200
(compile-only); their programs run on the CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from planned_models import plan, spec
from stowax._errors import ArgumentError, PlanMismatchError
from stowax._units import format_bytes

pytestmark = pytest.mark.usefixtures("usual_promotion")

ROWS, COLUMNS = 1024, 2048
MOMENT = ROWS * COLUMNS * 4  # 8 MiB, twice the least that streams
RATE, DECAY = 1e-2, 0.9
OFFLOAD = {"optimizer state": "offload"}


@stowax.stow
def loss_fn(w, x):
    return jnp.mean(jnp.tanh(w["w"]) * x)


def momentum_step(dtype, *, decode=lambda m: m, encode=lambda m: m):
    """Gradient descent with a momentum that is stored in `dtype`."""

    def step(w, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        moment = DECAY * decode(state["m"].astype(jnp.float32)) + grads["w"]
        w = {"w": w["w"] - RATE * moment}
        return w, {**state, "m": encode(moment).astype(dtype)}, loss

    return step


def specs(dtype=jnp.float32, rows=ROWS, **others):
    w = {"w": spec(rows, COLUMNS)}
    return w, {"m": spec(rows, COLUMNS, dtype=dtype), **others}, spec()


def arrays(args):
    """Weights of one half, a state of zeros, and a factor."""
    w, state, _ = args
    w = jax.tree.map(lambda s: jnp.full(s.shape, 0.5, s.dtype), w)
    return w, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state)


@functools.cache
def made_once():
    return plan(momentum_step(jnp.float32), *specs(), pin=OFFLOAD)


@pytest.fixture
def offloaded(usual_promotion):
    return made_once()


def decisions(found):
    return {d.name: d for d in found.decisions if d.role == "optimizer state"}


def kinds(tree):
    return jax.tree.map(lambda a: a.sharding.memory_kind, tree)


def check(found, step, args, steps=3):
    """The planned step gives the plain one's numbers, and every array its place."""
    mine = found.place(*arrays(args))
    before = kinds(mine)
    others = arrays(args)
    planned, plain = found.apply(step), jax.jit(step)
    for number in range(steps):
        x = jnp.float32(number + 1)
        *mine, my_loss = planned(*mine, x)
        *others, loss = plain(*others, x)
        np.testing.assert_allclose(my_loss, loss, rtol=1e-6)
        assert kinds(tuple(mine)) == before
    for left, right in zip(
        jax.tree.leaves(mine), jax.tree.leaves(tuple(others)), strict=True
    ):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
        np.testing.assert_allclose(left, right, rtol=1e-2, atol=1e-6)
    return before[1]


def test_state_in_bfloat16_streams():
    step, args = momentum_step(jnp.bfloat16), specs(jnp.bfloat16)
    found = plan(step, *args, pin=OFFLOAD)
    (decision,) = decisions(found).values()
    assert (decision.dtype, decision.bytes) == ("bfloat16", MOMENT // 2)
    assert "streams through the update in blocks" in decision.reason
    assert found.host_bytes == MOMENT // 2
    assert check(found, step, args) == {"m": "pinned_host"}


@pytest.mark.slow
def test_state_in_eight_bits_streams_and_its_scale_stays():
    # Codes of one step of SCALE; the scale itself is a number, and stays.
    scale = 1e-9
    step = momentum_step(
        jnp.int8,
        decode=lambda m: m * scale,
        encode=lambda m: jnp.clip(jnp.round(m / scale), -127, 127),
    )
    args = specs(jnp.int8, rows=4 * ROWS, scale=spec())
    found = plan(step, *args, pin=OFFLOAD)
    (decision,) = decisions(found).values()
    assert (decision.dtype, decision.bytes) == ("int8", MOMENT)
    assert check(found, step, args) == {"m": "pinned_host", "scale": "device"}


@pytest.mark.slow
def test_empty_and_scalar_leaves_stay():
    step = momentum_step(jnp.float32)
    args = specs(none=spec(0, 2048), count=spec(dtype=jnp.int32), all=spec(8, 0))
    found = plan(step, *args, pin=OFFLOAD)
    assert list(decisions(found)) == ["args[1]['m']"]
    staying = dict.fromkeys(("none", "count", "all"), "device")
    assert check(found, step, args) == {"m": "pinned_host", **staying}


@pytest.mark.slow
def test_leaves_that_cannot_be_cut_stay_and_the_plan_says_so():
    # A prime number of rows: nothing between one row and all of them.
    rows = 1021

    @stowax.stow
    def loss(w, x):
        return sum(jnp.mean(jnp.tanh(leaf) * x) for leaf in w.values())

    def step(w, state, x):
        loss_, grads = jax.value_and_grad(loss)(w, x)
        state = jax.tree.map(lambda m, g: DECAY * m + g, state, grads)
        return jax.tree.map(lambda w, m: w - RATE * m, w, state), state, loss_

    w = {"even": spec(ROWS, COLUMNS), "odd": spec(rows, COLUMNS)}
    found = plan(step, w, w, spec(), pin=OFFLOAD)
    even, odd = decisions(found).values()
    assert (even.decision, odd.decision) == ("offload", "keep")
    assert odd.reason == (
        f"it stays: its shape ({rows}, {COLUMNS}) cannot be cut evenly into small "
        "blocks"
    )
    assert f"({rows}, {COLUMNS}) cannot" in " ".join(str(found).split())
    assert check(found, step, (w, w, None)) == {"even": "pinned_host", "odd": "device"}


@pytest.mark.slow
def test_a_parameter_used_twice_has_one_state():
    @stowax.stow
    def loss(w, x):
        return jnp.mean((jnp.tanh(x * w["w"][:, :8].T) @ w["w"]) ** 2)

    optimizer = optax.adam(RATE)

    def step(w, state, x):
        loss_, grads = jax.value_and_grad(loss)(w, x)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state, loss_

    w, _, x = specs()
    args = w, jax.eval_shape(optimizer.init, w), x
    found = plan(step, *args, pin=OFFLOAD)
    assert {d.bytes for d in decisions(found).values()} == {MOMENT}
    assert found.host_bytes == 2 * MOMENT
    placed = jax.tree.leaves(check(found, step, args))
    assert sorted(placed) == ["device", "pinned_host", "pinned_host"]


def test_an_array_that_was_given_away_is_named_as_such(offloaded):
    w, state = offloaded.place(*arrays(specs()))
    step = offloaded.apply(momentum_step(jnp.float32))
    step(w, state, jnp.float32(1))
    # JAX's own words, which say it: a donated argument is gone, in either memory.
    for gone in (w["w"], state["m"]):
        with pytest.raises(RuntimeError, match="Array has been deleted with shape"):
            np.asarray(gone)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        step(w, state, jnp.float32(1))
    with pytest.raises(ArgumentError) as caught:
        offloaded.place(w, state)
    assert str(caught.value) == (
        "args[0]['w']: got an array that an earlier step was given and has donated. Go "
        "on with what that step returned, or keep a copy (jnp.copy) of what is needed "
        "after it."
    )


def test_a_state_that_changes_between_steps_is_named(offloaded):
    def growing(w, state, x):
        w, state, loss = momentum_step(jnp.float32)(w, state, x)
        return w, {**state, "more": jnp.ones(3)}, loss

    found = plan(growing, *specs(), pin=OFFLOAD)
    w, state = found.place(*arrays(specs()))
    w, state, _ = found.apply(growing)(w, state, jnp.float32(1))
    assert state["m"].sharding.memory_kind == "pinned_host"
    with pytest.raises(PlanMismatchError) as caught:
        found.apply(growing)(w, state, jnp.float32(2))
    assert str(caught.value) == (
        "step: args[1]['more'] is float32[3], and the plan was made for float32[] "
        "(args[2]). Call it as it was planned, or plan again for these arguments."
    )


@pytest.mark.parametrize("what", ["place", "specs"])
def test_state_of_another_dtype_is_not_left_on_the_device(offloaded, what):
    other = {"m": spec(ROWS, COLUMNS, dtype=jnp.bfloat16)}
    if what == "place":
        other = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), other)
    with pytest.raises(PlanMismatchError) as caught:
        getattr(offloaded, what)(other)
    assert str(caught.value) == (
        f"args[0]['m'] is bfloat16[{ROWS},{COLUMNS}], and the plan, which keeps "
        f"args[1]['m'] in host memory, was made for float32[{ROWS},{COLUMNS}]. Give "
        "the state that was planned; one of other shapes takes another plan."
    )


@pytest.mark.slow
def test_state_that_the_host_cannot_hold():
    step, half = momentum_step(jnp.float32), MOMENT // 2
    stays = plan(step, *specs(), budget="1MiB", host_budget=half)
    assert {d.decision for d in decisions(stays).values()} == {"keep"}
    assert not stays.fits
    assert stays.host_bytes == 0
    pinned = plan(step, *specs(), pin=OFFLOAD, host_budget=half)
    assert not pinned.fits
    with pytest.warns(UserWarning, match="does not fit") as caught:
        pinned.apply(step)
    assert str(caught[0].message) == (
        "plan: it does not fit 4.00 MiB of the host.\n"
        f"Its program takes {format_bytes(pinned.device_bytes)} of the device and "
        "8.00 MiB of the host.\n"
        "Give a larger host_budget, or pin less to 'offload'."
    )


def test_a_step_is_compiled_once_also_where_arrays_were_put_nowhere(offloaded):
    step = offloaded.apply(momentum_step(jnp.float32))
    w, state = offloaded.place(*arrays(specs()))
    for number in range(3):
        w, state, _ = step(w, state, np.float32(number))
    assert step._cache_size() == 1


def test_arrays_put_together_from_shards_are_host_arrays_in_type_too(offloaded):
    # So does a checkpointer make them. JAX calls their type that of a device array.
    (device, *_) = jax.devices()
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    shard = jax.device_put(np.zeros((ROWS, COLUMNS), np.float32), host)
    made = jax.make_array_from_single_device_arrays(shard.shape, host, [shard])
    w, _ = arrays(specs())
    step = offloaded.apply(momentum_step(jnp.float32))
    with pytest.raises(PlanMismatchError, match=r"what plan\.place\(...\) returns"):
        step(offloaded.place(w), {"m": made}, np.float32(1))
    placed = offloaded.place({"m": made})
    assert placed["m"].unsafe_buffer_pointer() == made.unsafe_buffer_pointer()
    _, state, _ = step(offloaded.place(w), placed, np.float32(1))
    assert kinds(state) == {"m": "pinned_host"}
