"""Layers along the last two axes, on a TPU: in host memory they lie first.

Bytes are of programs compiled for a v5p that is not there, numbers of the CPU, where
arrays lie as they are typed and the planned step does the same with them. That places
and results have the layouts that a plan says is seen on the CPU, too, which has them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from planned_models import QUICK, plan, spec, specs, target_or_skip
from stowax._errors import PlanMismatchError
from stowax._jax_layouts import order_of
from stowax._layers._axis_order import host_order
from stowax._state import _laying, _ordered_step

LAYERS, WIDTH, HIDDEN, ROWS = 8, 512, 1024, 32
MATRIX = WIDTH * HIDDEN * 2  # bytes, bfloat16
ORDERS = {1: (1, 0, 2), 2: (2, 0, 1)}
PARAMETER = {"parameter": "offload"}
STATE = PARAMETER | {"optimizer state": "offload"}
RATE = jnp.bfloat16(0.1)


@stowax.stow
def loss_fn(weights, x):
    def body(x, w):
        up, down = w
        return x + jnp.tanh(x @ up) @ down, None

    layers = [jnp.moveaxis(w, w.shape.index(LAYERS), 0) for w in weights]
    return jnp.mean(jax.lax.scan(body, x, layers)[0].astype(jnp.float32) ** 2)


def descent(weights, x):
    loss, grads = jax.value_and_grad(loss_fn)(weights, x)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), loss


def momentum(state, x):
    weights, velocity = state
    loss, grads = jax.value_and_grad(loss_fn)(weights, x)
    norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in grads))
    scale = jnp.minimum(1.0, 1.0 / norm).astype(jnp.bfloat16)
    velocity = jax.tree.map(lambda v, g: RATE * v + scale * g, velocity, grads)
    # A row of numbers is spread over each array: of other sizes along other axes.
    new = jax.tree.map(lambda w, v: w * decay(w) - RATE * v, weights, velocity)
    return (new, velocity), loss


def decay(w):
    shape = [1] * w.ndim
    shape[-1] = w.shape[-1]
    return jnp.linspace(0.9, 1.0, w.shape[-1], dtype=w.dtype).reshape(shape)


def arguments(axis, step):
    def stacked(*shape):
        return spec(*shape[:axis], LAYERS, *shape[axis:], dtype=jnp.bfloat16)

    weights = [stacked(WIDTH, HIDDEN), stacked(HIDDEN, WIDTH)]
    x = spec(ROWS, WIDTH, dtype=jnp.bfloat16)
    return (weights if step is descent else (weights, weights)), x


@functools.cache
def planned(axis, step):
    pin = PARAMETER if step is descent else STATE
    return plan(step, *arguments(axis, step), target="v5p-8", pin=pin)


def test_orders_are_for_the_last_two_axes_on_a_tpu():
    assert host_order(3, 0, "tpu") is None
    assert host_order(3, 1, "tpu") == (1, 0, 2)
    assert host_order(3, 2, "tpu") == (2, 0, 1)
    assert host_order(4, 1, "tpu") is None
    assert host_order(3, 1, "gpu") is None
    assert host_order(2, 0, "tpu") is None  # it is the first one already


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "step"), [(1, momentum), (2, descent)])
def test_a_few_layers_are_on_the_device_and_the_rest_lies_in_place(axis, step):
    found, args = planned(axis, step), arguments(axis, step)
    state = [a for a in found.program.arguments if len(a.shape) == 3]
    assert {(a.memory_kind, a.order) for a in state} == {("pinned_host", ORDERS[axis])}
    given = jax.tree.leaves(specs(found, *args))
    assert {order_of(s) for s in given} == {ORDERS[axis], None}
    target = target_or_skip("v5p-8")
    inspection = stowax.inspect(
        target.compile(found.apply(step), *specs(found, *args)), target=target
    )
    stacked = 2 * LAYERS * MATRIX  # the weights, and as much of momentum, of gradients
    parts = 2 if step is momentum else 1
    host = inspection.memory.host
    # What comes out lies as what came in, or it could not take its place.
    assert host.argument == host.output == host.alias == parts * stacked
    assert host.temp == stacked
    assert not [h for h in inspection.hazards if h.kind == "host-compute"]
    # Two layers' weights and one layer's gradients; libtpu counts what is in a loop
    # twice. Blocks of the update are smaller.
    assert found.device_bytes < 2 * 3 * (2 * MATRIX) < stacked
    copies = [t for t in inspection.transfers if "stowax.weights." in t.op_name]
    assert {t.bytes for t in copies} == {MATRIX}
    assert 4 * LAYERS <= sum(t.trips for t in copies) <= 4 * (LAYERS + 1)


def numbers(tree, seed):
    leaves, structure = jax.tree.flatten(tree)
    draw = np.random.default_rng(seed)
    made = [jnp.asarray(0.05 * draw.normal(size=s.shape), s.dtype) for s in leaves]
    return jax.tree.unflatten(structure, made)


def three_steps(found, step, args, place=lambda state: state):
    """The states after three steps, planned and as written."""
    state, x = numbers(args, 0)
    mine = place(found.place(jax.tree.map(jnp.copy, state)))
    planned_step = found.apply(step)
    for _ in range(3):
        mine, loss = planned_step(mine, x)
        state, expected = jax.jit(step)(state, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-2)
    for left, right in zip(jax.tree.leaves(mine), jax.tree.leaves(state), strict=True):
        left, right = (np.asarray(a, np.float32) for a in (left, right))
        np.testing.assert_allclose(left, right, rtol=2e-2, atol=2e-3)
    return mine


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "step"), [(2, momentum), (1, descent)])
def test_three_steps_are_those_with_everything_on_the_device(axis, step):
    found = planned(axis, step)
    # One of the two updates is the host's: this is both ways to work on what lies so.
    on_host = {a.on_host for a in found.program.arguments if len(a.shape) == 3}
    assert on_host == {step is descent}
    three_steps(found, step, arguments(axis, step))


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["parameter", "optimizer state"])
def test_what_lies_in_order_is_updated_with_what_is_on_the_device(kept):
    args = arguments(2, momentum)
    pin = STATE | {kept: "keep"}
    found = plan(momentum, *args, target="v5p-8", pin=pin)
    orders = {
        a.order for a in found.program.arguments if a.memory_kind == "pinned_host"
    }
    # Moments lie as the weights that they are updated with, if those are there at all.
    assert orders == {None if kept == "parameter" else ORDERS[2]}
    three_steps(found, momentum, args)


@pytest.mark.slow
def test_the_plan_file_keeps_the_order(tmp_path):
    found, args = planned(1, momentum), arguments(1, momentum)
    found.save(tmp_path / "plan.json")
    again = stowax.load_plan(tmp_path / "plan.json", compiler_options=QUICK)
    assert again == found
    assert again.specs(*args) == found.specs(*args)
    assert again.specs(*again.specs(*args)) == found.specs(*args)


@pytest.mark.slow
def test_arrays_lie_as_planned_and_others_are_refused(monkeypatch):
    """On a CPU that is taken for a machine with layouts."""
    monkeypatch.setattr(_ordered_step, "PLATFORMS", frozenset({"cpu"}))
    monkeypatch.setattr(_laying, "LARGEST_BLOCK", MATRIX)
    found, args = planned(1, momentum), arguments(1, momentum)

    def place(state):
        assert {order_of(a) for a in jax.tree.leaves(state)} == {ORDERS[1]}
        again = found.place(state)
        assert all(map(lambda a, b: a is b, *map(jax.tree.leaves, (state, again))))
        return state

    mine = three_steps(found, momentum, args, place)
    assert {order_of(a) for a in jax.tree.leaves(mine)} == {ORDERS[1]}
    step, (_, x) = found.apply(momentum), numbers(args, 0)
    usual = jax.tree.map(lambda a: jax.device_put(np.asarray(a), a.sharding), mine)
    with pytest.raises(PlanMismatchError) as caught:
        step(usual, x)
    assert str(caught.value) == (
        "step: args[0][0][0] lies in host memory with its axes in the order (0, 1, 2),"
        " and the plan has it in the order (1, 0, 2), as 8×512×1024: its layers first,"
        " which are fetched one by one. Call the step with what plan.place(...)"
        " returns, and compile it for plan.specs(...)."
    )
    for again in (usual, jax.tree.map(np.asarray, mine)):
        pairs = zip(*map(jax.tree.leaves, (found.place(again), mine)), strict=True)
        for left, right in pairs:
            assert order_of(left) == ORDERS[1]
            np.testing.assert_array_equal(left, right)
    with pytest.raises(PlanMismatchError, match=r"args.0..0..0. is in device memory"):
        step(numbers(args[0], 0), x)
    step(mine, x)


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
@pytest.mark.parametrize("axis", ORDERS)
def test_what_is_laid_out_passes_the_device_in_blocks(axis, kind):
    target, rows = target_or_skip("v5p-8"), 64
    given, _ = arguments(axis, descent)[0]
    given = given.update(sharding=target.sharding(memory_kind=kind))
    there = target.sharding(memory_kind="pinned_host")
    program = target.compile(_laying.in_blocks(there, ORDERS[axis], rows), given)
    block = LAYERS * MATRIX * rows // WIDTH
    # As it came and as it goes, and one more of each on its way.
    assert program.memory_analysis().temp_size_in_bytes < 4.5 * block
    found = stowax.inspect(program)
    assert not [h for h in found.hazards if h.kind == "host-compute"]
    assert found.memory.host.output == LAYERS * MATRIX


@pytest.mark.slow
def test_the_users_step_is_traced_once():
    traced = []

    def step(state, x):
        traced.append(x)
        return momentum(state, x)

    found, args = planned(1, momentum), arguments(1, momentum)
    jitted = found.apply(step)
    target = target_or_skip("v5p-8")
    target.lower(jitted, *specs(found, *args))
    target.lower(jitted, *specs(found, *args))
    assert len(traced) == 1
