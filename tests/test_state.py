"""Optimizer state in host memory, as part of a plan: bytes, numbers, memory kinds.

Bytes are of an H200 (compile-only): the CPU's compiler books no host memory. Numbers
are of the CPU, which runs the very same program, state in pinned host memory included.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from planned_models import compiled_total, kinds, plan, spec
from stowax._errors import ArgumentError, PlanMismatchError
from stowax._records._plan import stored_by

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH, ROWS = 4, 256, 64
MIB = 2**20
STACK = LAYERS * WIDTH * 4 * WIDTH * 4  # bytes of one stacked weight
STATE = 2 * 2 * STACK  # two weights, two moments


@stowax.stow
def loss_fn(params, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def step_with(optimizer):
    def train_step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train_step


def arguments(optimizer, dtype=jnp.float32):
    params = {
        "up": spec(LAYERS, WIDTH, 4 * WIDTH, dtype=dtype),
        "down": spec(LAYERS, 4 * WIDTH, WIDTH, dtype=dtype),
    }
    return params, jax.eval_shape(optimizer.init, params), spec(ROWS, WIDTH)


def arrays(optimizer):
    keys = jax.random.split(jax.random.key(0), 2)
    params, _, x = arguments(optimizer)
    params = {
        name: 0.02 * jax.random.normal(key, leaf.shape)
        for key, (name, leaf) in zip(keys, params.items(), strict=True)
    }
    return params, optimizer.init(params), jnp.zeros(x.shape)


ADAM = optax.adamw(1e-3)
OFFLOAD = {"optimizer state": "offload"}


@functools.cache
def made_once():
    return plan(step_with(ADAM), *arguments(ADAM), pin=OFFLOAD)


@pytest.fixture
def offloaded(usual_promotion):
    return made_once()


@functools.cache
def least_without_offloads():
    step, args = step_with(ADAM), arguments(ADAM)
    return plan(step, *args, forbid=("offload",), budget="1MiB").smallest_budget


def state_decisions(found):
    return {d.name: d.decision for d in found.decisions if d.role == "optimizer state"}


@pytest.mark.slow
def test_the_state_costs_no_device_memory_but_blocks(offloaded):
    step, args = step_with(ADAM), arguments(ADAM)
    written = plan(step, *args).search.trials[0]
    assert written.what == "as written"
    stack, *_ = offloaded.program.stacks
    assert not stored_by(offloaded.decisions, stack.name) or offloaded.fits
    assert set(state_decisions(offloaded).values()) == {"offload"}
    assert compiled_total(offloaded, step, *args) == offloaded.device_bytes
    # Each of two moments has at most two blocks of a megabyte on the device.
    assert offloaded.device_bytes <= written.compiled_bytes - STATE + 4 * MIB
    assert offloaded.host_bytes >= STATE


@pytest.mark.slow
def test_it_goes_when_the_budget_asks_for_it():
    step, args = step_with(ADAM), arguments(ADAM)
    found = plan(step, *args, budget=least_without_offloads() - STATE // 2)
    assert found.fits
    assert "offload" in state_decisions(found).values()
    baseline = {b.name: b for b in found.baselines}["offload state"]
    weights = STATE // 2
    assert baseline.host_bytes == STATE + 2 * weights  # with parameters and gradients
    assert "state:" in str(found)
    reasons = {d.reason for d in found.decisions if d.decision == "offload"}
    assert any(r.startswith("streams through the update in blocks") for r in reasons)


@pytest.mark.slow
def test_what_the_host_cannot_hold_stays():
    step, args = step_with(ADAM), arguments(ADAM)
    found = plan(step, *args, pin=OFFLOAD, host_budget=STATE - 1)
    assert not found.fits  # the pin asks for more than there is
    least = least_without_offloads()
    found = plan(step, *args, budget=least, host_budget=STATE // 2)
    assert found.fits
    assert found.host_bytes <= STATE // 2


@pytest.mark.slow
def test_without_donation_it_stays():
    found = plan(step_with(ADAM), *arguments(ADAM), donate=False, budget="1MiB")
    assert set(state_decisions(found).values()) == {"keep"}


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)),
    "several steps": optax.MultiSteps(optax.adam(1e-3), every_k_schedule=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_without_a_plan(name):
    optimizer = OPTIMIZERS[name]
    step, args = step_with(optimizer), arrays(optimizer)
    found = plan(step, *arguments(optimizer), pin=OFFLOAD)
    assert "offload" in state_decisions(found).values()
    params, state, _ = args
    planned, plain = found.apply(step), jax.jit(step)
    mine = found.place(jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, state))
    assert "pinned_host" in kinds(mine[1])
    for number in range(20):
        x = jax.random.normal(jax.random.key(number), (ROWS, WIDTH))
        params, state, loss = plain(params, state, x)
        *mine, my_loss = planned(*mine, x)
        np.testing.assert_allclose(my_loss, loss, rtol=1e-5)
        assert kinds(mine[0]) == {"device"}
        assert "pinned_host" in kinds(mine[1])
    tolerance = 20 * float(np.finfo(np.float32).eps) * 20
    for left, right in zip(
        jax.tree.leaves(mine), jax.tree.leaves((params, state)), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(left), np.asarray(right), rtol=1e-4, atol=tolerance
        )


@pytest.mark.slow
def test_place_knows_the_state_alone_and_moves_nothing_twice(offloaded):
    params, state, x = arrays(ADAM)
    placed = offloaded.place(state)
    assert kinds(placed) == {"pinned_host"}
    again = offloaded.place(placed)
    pairs = zip(jax.tree.leaves(placed), jax.tree.leaves(again), strict=True)
    assert all(a is b for a, b in pairs)
    assert kinds(offloaded.place(params)) == {"device"}
    assert kinds(offloaded.specs(*arguments(ADAM))[1]) == {"pinned_host"}
    assert kinds(offloaded.specs(arguments(ADAM)[1])) == {"pinned_host"}
    assert kinds(offloaded.specs(x)) == {"device"}


@pytest.mark.slow
def test_eval_shape_of_a_planned_step_keeps_memory_kinds(offloaded):
    step = offloaded.apply(step_with(ADAM))
    out = jax.eval_shape(step, *offloaded.specs(*arguments(ADAM)))
    shapes = jax.tree.map(lambda s: s.shape, jax.tree.leaves(out[1]))
    assert shapes == [leaf.shape for leaf in jax.tree.leaves(arguments(ADAM)[1])]


def test_state_that_was_not_placed_is_refused(offloaded):
    params, state, x = arrays(ADAM)
    with pytest.raises(PlanMismatchError) as caught:
        offloaded.apply(step_with(ADAM))(params, state, x)
    assert str(caught.value) == (
        "step: args[1][0].mu['down'] is in device memory, and the plan keeps it in "
        "host memory. Call the step with what plan.place(...) returns."
    )


def test_state_of_another_structure_is_refused(offloaded):
    params, _, x = arrays(ADAM)
    other = optax.sgd(1e-3, momentum=0.9).init(params)
    with pytest.raises(PlanMismatchError, match=r"args\[1\]"):
        offloaded.apply(step_with(ADAM))(params, offloaded.place(other), x)


def test_a_plan_with_state_survives_its_file(offloaded, tmp_path):
    offloaded.save(tmp_path / "plan.json")
    loaded = stowax.load_plan(tmp_path / "plan.json")
    assert loaded == offloaded
    assert kinds(loaded.place(arrays(ADAM)[1])) == {"pinned_host"}


@pytest.mark.slow
def test_a_batch_that_looks_like_a_weight_takes_no_weights_place():
    # (batch, params, state): all of one shape, and the batch comes first.
    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda c, m: (jnp.tanh(c @ m), None), x[0], w)[0])

    marked = stowax.stow(loss)

    def step(x, w, momentum):
        momentum = 0.9 * momentum + jax.grad(marked)(w, x)
        return w - 0.1 * momentum, momentum

    like = spec(LAYERS, 2 * WIDTH, 2 * WIDTH)
    found = plan(step, like, like, like, pin=OFFLOAD)
    args = [0.05 * jax.random.normal(jax.random.key(i), like.shape) for i in range(3)]
    plain = jax.jit(step)(*args)
    mine = found.apply(step)(*found.place(*[jnp.copy(a) for a in args]))
    assert [m.sharding.memory_kind for m in mine] == ["device", "pinned_host"]
    for left, right in zip(mine, plain, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_small_state_is_no_candidate():
    small = {"up": spec(2, 64, 256), "down": spec(2, 256, 64)}
    args = small, jax.eval_shape(ADAM.init, small), spec(ROWS, 64)
    with pytest.raises(ArgumentError, match=r"smaller than 4\.00 MiB on a device"):
        plan(step_with(ADAM), *args, pin=OFFLOAD)
