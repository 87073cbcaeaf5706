"""Layers in groups, of which only the first one's input is stored."""

import functools

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import plan, spec
from planned_steps import (
    assert_close,
    assert_same_bits,
    kept_at_random,
    planned,
    recompute_all,
    unfused,
)
from stowax._records._stages import Options
from stowax._step._trace import trace_step

WIDTH, ROWS = 128, 8192
INPUT, LAYER = 2 * ROWS * WIDTH, 2 * WIDTH * 4 * WIDTH * 2
QUIET = {"host_budget": 1}


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def train_step(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(layer, x, weights)
        return (y.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def arguments(count, rows=ROWS):
    sizes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    weights = {k: spec(count, *s, dtype=jnp.bfloat16) for k, s in sizes.items()}
    return weights, spec(rows, WIDTH, dtype=jnp.bfloat16)


@functools.cache
def smallest(count, **wishes):
    """The plan for a budget that is far too small."""
    wishes = QUIET | wishes
    return plan(train_step, *arguments(count), budget=1 << 20, **wishes)


# --- numbers --------------------------------------------------------------------------


def whole_model(weights, x):
    """Per-layer outputs, constants with gradients, a count and a key in the carry."""

    def layer(state, w):
        x, count, key = state
        key, drop = jax.random.split(key)
        kept = jax.random.bernoulli(drop, 0.8, x.shape)
        x = x + jnp.where(kept, jnp.tanh(x @ w + weights["shared"][None]), 0)
        return (x, count + 1, key), (x.sum(), count)

    start = x, jnp.int32(0), jax.random.key(3)
    (x, count, _), (sums, counts) = jax.lax.scan(
        layer, start, weights["layers"], reverse=weights["reverse"] is not None
    )
    seen = count.astype(x.dtype), counts.sum().astype(x.dtype)
    return (x**2).mean() * seen[0] + jnp.sin(sums).sum() + seen[1]


@pytest.mark.quick("3-up")
@pytest.mark.parametrize("reverse", [None, ()], ids=["down", "up"])
@pytest.mark.parametrize("size", [3, 2])
def test_numbers_are_the_same_to_the_bit(reverse, size):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "layers": jax.random.normal(keys[0], (7, 8, 8)) / 4,
        "shared": jax.random.normal(keys[1], (8,)),
        "reverse": reverse,
    }
    args = weights, jax.random.normal(keys[2], (4, 8))
    step = jax.value_and_grad(whole_model, argnums=(0, 1))
    options = Options(group=size)
    traced = trace_step(step, args, options)
    (found,) = traced.stacks.values()
    assert (found.stack.group, found.stack.count) == (size, 7)
    with unfused():
        expected = step(*args)
        for choose in (kept_at_random(1), kept_at_random(2), recompute_all):
            run = planned(step, args, choose, options, traced)
            assert_same_bits(run(*args), expected)


def test_layers_that_print_what_is_read_run_once():
    def told(x):
        jax.debug.print("large: {}", x.max())
        return x / 2

    def step(weights, x):
        def layer(x, w):
            return jax.lax.cond(x.max() > 1, told, jnp.tanh, x @ w), None

        return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(weights)

    args = jnp.ones((6, 4, 4)), jnp.ones((4, 4))
    (found,) = trace_step(step, args, Options(group=2)).stacks.values()
    assert found.stack.group == 0


def test_a_short_loop_is_in_no_groups():
    (found,) = trace_step(train_step, arguments(4), Options(group=4)).stacks.values()
    assert found.stack.group == 0


# --- plans ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_smallest_budget_grows_as_the_root_of_the_layers():
    def beside_weights(count):
        found = smallest(count, forbid=("tile",))  # blocks spare both the same
        return found.device_bytes - count * LAYER, found

    few, _ = beside_weights(16)
    many, found = beside_weights(256)
    (stack,) = found.program.stacks
    assert stack.group == 16
    # Four times as many inputs of layers, and sixteen times as many layers.
    assert many < 4.2 * few
    assert many < 256 * INPUT / 3


@pytest.mark.slow
def test_a_plan_in_groups_says_so_and_is_kept_in_a_file(tmp_path):
    count = 16
    args = arguments(count, rows=512)
    least = plan(train_step, *args, budget=1 << 20, **QUIET).device_bytes
    found = plan(train_step, *args, budget=int(least * 1.05), **QUIET)
    assert found.fits
    (stack,) = found.program.stacks
    assert 1 < stack.group < count
    text = " ".join(str(found).split())
    assert f"16 layers in groups of {stack.group} (scan)" in text
    assert "the group runs forward once more before its backward pass" in text
    assert "policies run layers in groups, too" in text
    assert f"They run in groups of {stack.group}" in found.as_code()
    # What is stored is that of one group.
    (kept,) = (d for d in found.decisions if d.name == "layer input 0")
    assert (kept.decision, kept.count) == ("keep", stack.group)

    found.save(tmp_path / "plan.json")
    read = stowax.load_plan(tmp_path / "plan.json")
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(k, s.shape, s.dtype) / 16
        for k, s in zip(keys, jax.tree.leaves(args), strict=True)
    ]
    arrays = jax.tree.unflatten(jax.tree.structure(args), arrays)
    expected = jax.jit(train_step)(*arrays)
    assert_close(jax.jit(read.apply(train_step))(*arrays), expected)


@pytest.mark.slow
def test_groups_are_left_where_memory_is_not_short():
    args = arguments(16)
    found = plan(train_step, *args, budget=16 * (INPUT + LAYER) + 20 * INPUT, **QUIET)
    assert found.fits
    assert [stack.group for stack in found.program.stacks] == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wishes",
    [{"pin": {"*dot_general*": "keep"}}, {"forbid": ("recompute",)}],
)
def test_what_a_user_keeps_is_not_computed_again(wishes):
    found = plan(train_step, *arguments(16), budget=1 << 20, **QUIET, **wishes)
    assert [stack.group for stack in found.program.stacks] == [0]


@pytest.mark.slow
def test_groups_on_a_tpu():
    count = 64
    rolled = smallest(count, target="v5p-8", forbid=("recompute",))
    found = smallest(count, target="v5p-8")
    assert found.program.stacks[0].group == 8
    mine, own = found.device_bytes, rolled.device_bytes
    assert mine - count * LAYER < (own - count * LAYER) / 4
