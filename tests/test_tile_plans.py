"""Plans with a loss in blocks of tokens: they fit, are kept, and can be ruled out."""

import functools

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import compiled_total, plan, spec
from planned_steps import assert_close, kept_at_random
from planned_steps import planned as planned_with
from stowax._errors import ArgumentError
from stowax._records._stages import Options
from stowax._step._trace import trace_step
from tiled_losses import by_index

TOKENS, WIDTH, VOCABULARY, LAYERS = 8192, 128, 16384, 4


def loss_of(weights, tokens):
    x = weights["embedding"][tokens]

    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, weights["layers"])
    return by_index(x[None], weights["embedding"].T, tokens[None], None)


def train_step(weights, tokens):
    loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def arguments(make, tokens, vocabulary, width=WIDTH):
    weights = {
        "embedding": make(vocabulary, width),
        "layers": make(LAYERS, width, width),
    }
    return weights, spec(tokens, dtype=jnp.int32)


@functools.cache
def planned(target, percent, **wishes):
    args = arguments(spec, TOKENS, VOCABULARY)
    whole = plan(train_step, *args, target=target)
    budget = whole.device_bytes * percent // 100
    return whole, plan(train_step, *args, target=target, budget=budget, **wishes)


@pytest.mark.parametrize(
    "target", ["h200", pytest.param("v5p-8", marks=pytest.mark.slow)]
)
def test_logits_are_not_in_the_peak(target):
    _, found = planned(target, 30)
    assert found.fits
    assert [s.count for s in found.program.stacks if s.tiles] == [8]
    args = arguments(spec, TOKENS, VOCABULARY)
    logits = 4 * TOKENS * VOCABULARY
    assert compiled_total(found, train_step, *args) < logits
    assert "8 blocks of tokens, one after the other" in " ".join(str(found).split())
    assert any("added up in another order" in note for note in found.proof.notes)
    assert "in 8 blocks of tokens" in found.as_code()


@pytest.mark.slow
def test_a_plan_in_blocks_is_kept_in_a_file_and_computes_the_same(tmp_path):
    _, found = planned("h200", 30)
    found.save(tmp_path / "plan.json")
    read = stowax.load_plan(tmp_path / "plan.json")
    assert read.program.options.tiles == 8
    weights = {
        "embedding": jax.random.normal(jax.random.key(0), (VOCABULARY, WIDTH)) / 8,
        "layers": jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)) / 16,
    }
    tokens = jax.random.randint(jax.random.key(2), (TOKENS,), 0, VOCABULARY)
    expected = jax.jit(train_step)(weights, tokens)
    assert_close(jax.jit(read.apply(train_step))(weights, tokens), expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [Options(tiles=8), Options(tiles=8, segments=True)])
def test_blocks_under_any_decisions(options):
    weights = {
        "embedding": jax.random.normal(jax.random.key(0), (512, 64)) / 8,
        "layers": jax.random.normal(jax.random.key(1), (LAYERS, 64, 64)) / 8,
    }
    args = weights, jax.random.randint(jax.random.key(2), (1024,), 0, 512)
    traced = trace_step(train_step, args, options)
    assert [t.stack.count for t in traced.stacks.values() if t.stack.tiles] == [8]
    expected = jax.jit(train_step)(*args)
    for seed in range(3):
        run = planned_with(train_step, args, kept_at_random(seed), options, traced)
        assert_close(jax.jit(run)(*args), expected)


@pytest.mark.slow
def test_blocks_can_be_asked_for_and_forbidden():
    args = arguments(spec, TOKENS, VOCABULARY)
    found = plan(train_step, *args, pin={"*in by_index": "tile"})
    (pin,) = (p for p in found.pins if p.decision == "tile")
    assert pin.matched > 0
    assert any(stack.tiles for stack in found.program.stacks)
    forbidden = planned("h200", 30, forbid=("tile",))[1]
    assert not any(stack.tiles for stack in forbidden.program.stacks)
    assert not forbidden.fits
    assert forbidden.search.forbid == ("tile",)


def test_blocks_that_there_are_not():
    def step(w, x):
        return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)

    def layer(x, w):
        return jnp.tanh(x @ w), None

    with pytest.raises(ArgumentError) as caught:
        plan(step, spec(4, 64, 64), spec(256, 64), pin={"*tanh*": "tile"})
    assert "got 'tile', which is impossible for tanh test_tile_plans.py:" in str(
        caught.value
    )
    assert str(caught.value).endswith(
        "float32[256,64]: no product there is far larger than what it reads, with a "
        "loss that works token by token. Pin it to 'keep' or 'recompute', or leave the "
        "pin out."
    )
    with pytest.raises(ArgumentError) as caught:
        plan(step, spec(4, 64, 64), spec(8, 64), pin={"*": "tile"}, forbid=("tile",))
    assert str(caught.value) == (
        "pin['*']: got 'tile', which is forbidden by 'tile'. Leave out one of the two."
    )
    with pytest.raises(ArgumentError, match="Write 'tile' alone"):
        plan(step, spec(4, 64, 64), spec(256, 64), forbid=("tile:*loss*",))
