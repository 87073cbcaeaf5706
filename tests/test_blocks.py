"""Wide products within layers in blocks: where, and the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
import wide_layers
from planned_models import compiled_total, plan
from planned_steps import assert_close, kept_at_random
from planned_steps import planned as planned_with
from stowax._jaxprs._jaxpr import Program, inline
from stowax._jaxprs._tile_region import find_tiling
from stowax._records._stages import Options
from stowax._step._trace import trace_step
from wide_layers import D, H, T, attention, with_scores

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

OPTIONS = Options(layer_blocks=4)

# The number of blocks of every wide product.
EXPECTED = {
    "attention": [4, 2],
    "gated": [2],
    "grouped": [4],
    "biased": [4],
    "with_dropout": [4],
    "over_batch": [4, 2],
    "normed_over_tokens": [2],
}


def step_of(layer, unrolled=False):
    def loss(weights, x):
        if unrolled:
            for k in range(len(weights["scale"])):
                x = layer(x, jax.tree.map(lambda w, k=k: w[k], weights))
        else:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, grads), value

    return step


def products(traced):
    return [p for one in traced.stacks.values() for p in one.body.blocks]


@pytest.mark.quick("attention", "gated")
@pytest.mark.parametrize("name", EXPECTED)
def test_layers_in_blocks_are_the_layers(name):
    step = step_of(getattr(wide_layers, name))
    args = wide_layers.weights(), wide_layers.tokens()
    traced = trace_step(step, args, OPTIONS)
    assert [product.count for product in products(traced)] == EXPECTED[name]
    (one,) = traced.stacks.values()
    largest = max(product.bytes for product in one.body.blocks)
    forward = one.body.forward
    made = [forward.avals[o] for node in forward.nodes for o in node.outputs]
    if name != "with_dropout":  # what is drawn is drawn as a whole
        assert all(4 * aval.size < largest for aval in made)
    expected = jax.jit(step)(*args)
    for seed in range(2):
        run = planned_with(step, args, kept_at_random(seed), OPTIONS, traced)
        assert_close(jax.jit(run)(*args), expected)


@pytest.mark.slow
def test_narrow_numbers_in_blocks():
    step = step_of(attention)
    args = wide_layers.weights(jnp.bfloat16), wide_layers.tokens(jnp.bfloat16)
    traced = trace_step(step, args, OPTIONS)
    assert [product.count for product in products(traced)] == EXPECTED["attention"]
    run = planned_with(step, args, kept_at_random(0), OPTIONS, traced)
    got, expected = jax.jit(run)(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [OPTIONS, Options(layer_blocks=4, as_written=True)])
def test_layers_of_a_python_loop(options):
    step = step_of(attention, unrolled=True)
    args = wide_layers.weights(), wide_layers.tokens()
    traced = trace_step(step, args, options)
    assert [product.count for product in products(traced)] == EXPECTED["attention"]
    run = planned_with(step, args, kept_at_random(0), options, traced)
    assert_close(jax.jit(run)(*args), jax.jit(step)(*args))


def test_straight_line_code_in_blocks():
    step = step_of(attention, unrolled=True)
    args = wide_layers.weights(layers=1), wide_layers.tokens()
    options = Options(layer_blocks=4, segments=True)
    traced = trace_step(step, args, options)
    assert [product.count for product in products(traced)] == EXPECTED["attention"]
    run = planned_with(step, args, kept_at_random(0), options, traced)
    assert_close(jax.jit(run)(*args), jax.jit(step)(*args))


def test_tokens_that_blocks_leave():
    """Of 514 tokens four blocks have 128, and two are left."""
    step = step_of(wide_layers.gated)
    x = jax.random.normal(jax.random.key(1), (1, 514, D))
    args = wide_layers.weights(), x
    traced = trace_step(step, args, OPTIONS)
    assert [product.count for product in products(traced)] == [4]
    run = planned_with(step, args, kept_at_random(0), OPTIONS, traced)
    assert_close(jax.jit(run)(*args), jax.jit(step)(*args))


def test_heads_may_be_spread_over_devices():
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(auto, auto))
    layer = {name: array[0] for name, array in wide_layers.weights().items()}
    with jax.sharding.use_abstract_mesh(mesh):
        made = jax.make_jaxpr(attention)(wide_layers.tokens(), layer)
    program = Program(inline(made))
    found = find_tiling(program, 4, in_layer=True)
    cut = [program.avals[i].shape[axis] for i, axis in found.cut]
    assert cut
    assert set(cut) == {T}  # tokens, neither heads nor examples


def test_what_is_wide_outside_of_the_layer_too():
    def loss(w, x):
        x, scores = jax.lax.scan(with_scores, x, w)
        return (x**2).mean() + scores.mean()

    traced = trace_step(
        jax.grad(loss), (wide_layers.weights(), wide_layers.tokens()), OPTIONS
    )
    assert products(traced) == []


# --- plans ----------------------------------------------------------------------------

LONG = 2048


def long_step(weights, x):
    def layer(x, w):
        q = (x @ w["q"]).reshape(1, LONG, H, -1)
        scores = jnp.einsum("bqhl,bkhl->bhqk", q, q) / 8
        shares = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhl->bqhl", shares, q).reshape(x.shape)
        return x + mixed @ w["out"], None

    def loss(weights, x):
        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def long_arguments():
    weights = {
        name: jax.ShapeDtypeStruct((4, 64, 64), "float32") for name in ("q", "out")
    }
    return weights, jax.ShapeDtypeStruct((1, LONG, 64), "float32")


@functools.cache
def planned(target, **wishes):
    scores = 4 * H * LONG**2
    return plan(long_step, *long_arguments(), target=target, budget=scores, **wishes)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5p-8", "cpu"])
def test_scores_of_attention_are_not_in_the_peak(target):
    found = planned(target)
    assert found.fits, str(found)
    assert found.program.options.layer_blocks >= 8
    assert [len(stack.blocks) for stack in found.program.stacks] == [1]
    told = " ".join(str(found).split())
    assert "what is made of the product at test_blocks.py:" in told
    assert "within its layer, each computed again for its gradient" in told
    assert "run it in blocks" in found.as_code()
    if target != "cpu":
        needed = compiled_total(found, long_step, *long_arguments())
        assert needed < 4 * H * LONG**2


@pytest.mark.slow
def test_a_plan_of_layers_in_blocks_is_kept_in_a_file_and_computes_the_same(tmp_path):
    planned("h200").save(tmp_path / "plan.json")
    read = stowax.load_plan(tmp_path / "plan.json")
    assert read.program.options.layer_blocks >= 8
    args = jax.tree.map(
        lambda s: jax.random.normal(jax.random.key(3), s.shape) / 8, long_arguments()
    )
    got = jax.jit(read.apply(long_step))(*args)
    assert_close(got, jax.jit(long_step)(*args))


@pytest.mark.slow
def test_blocks_within_layers_can_be_forbidden():
    found = planned("h200", forbid=("tile",))
    assert not found.fits
    assert found.program.options.layer_blocks == 0


@pytest.mark.quick("pin")
@pytest.mark.parametrize(
    "wish",
    [
        {"pin": {"exp*": "keep"}},
        {"forbid": ("recompute",)},
        {"forbid": ("recompute:exp*",)},
        {"forbid": ("recompute:dot_general*",)},  # none is read by a backward pass
    ],
    ids=["pin", "forbid", "forbid some", "forbid what is not read"],
)
def test_what_must_not_be_computed_again_is_in_no_blocks(wish):
    found = planned.__wrapped__("h200", **wish)
    assert not found.fits
    assert found.program.options.layer_blocks == 0
