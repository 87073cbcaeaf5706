"""Models of a few MiB: what is worth a copy depends on how much there is in all."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from planned_models import compiled_total, plan, spec, tanh_loss
from stowax._errors import CompileError
from stowax._records._stages import least_bytes
from stowax._search import _loop
from stowax._update._blocks import BlockSize

LAYERS, ROWS, WIDTH = 10, 256, 256
MIB = 2**20
MATRIX = WIDTH * 4 * WIDTH * 4  # one layer's, of two
X = ROWS * WIDTH * 4
HIDDEN = ROWS * 4 * WIDTH * 4


@stowax.stow
def loss(weights, x):
    """The layers of JAX's tutorial."""

    def two_layers(x, weights):
        w1, w2 = weights
        return x @ w1 @ w2, None

    return jnp.sum(jax.lax.scan(two_layers, x, weights)[0])


def descent(weights, x):
    value, grads = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads), value


@pytest.mark.slow
def test_the_tutorials_layers_within_a_few_mebibytes():
    shapes = spec(LAYERS, WIDTH, 4 * WIDTH), spec(LAYERS, 4 * WIDTH, WIDTH)
    args = shapes, spec(ROWS, WIDTH)
    found = plan(descent, *args, target="v5p-8", budget=8 * MIB)
    assert found.fits
    decisions = {d.name: d.decision for d in found.decisions if d.role == "activation"}
    assert X < MIB  # under what is worth a copy in a larger model
    assert decisions["layer input 0"] == "offload"
    # Nothing but x is there from the start. At once, one layer's weights and gradients,
    # what is between the two products and its cotangent; x, its cotangent, blocks.
    at_once = 4 * MATRIX + 2 * HIDDEN
    assert found.device_bytes <= X + at_once + 3 * X
    assert found.host_bytes >= 2 * 2 * LAYERS * MATRIX + LAYERS * X
    # The plan knows how small its blocks are.
    assert compiled_total(found, descent, *args) == found.device_bytes


def test_a_small_models_state_streams_in_few_blocks():
    """Each turn of the loop takes its time, however little it moves."""
    small, usual = BlockSize.least(4096), BlockSize.least(MIB)
    assert small.target(256 * 1024) == 16 * 1024
    assert small.target(64 * MIB) == MIB
    for leaf in (4, 16, 64):
        assert usual.target(leaf * MIB) == MIB
    assert usual.target(512 * MIB) == 8 * MIB


def test_what_is_worth_a_copy():
    assert least_bytes(2**40, 2**30) == MIB
    # A small budget for a large model, or much memory for a small one, change nothing.
    assert least_bytes(2 * MIB, 2**30) == MIB
    assert least_bytes(2**30, 2 * MIB) == MIB
    assert least_bytes(8 * MIB, 32 * MIB) == 32 * MIB // 256


@pytest.mark.slow
def test_small_arrays_go_where_nothing_else_fits(usual_promotion):
    """Of many small layers none has an array worth a copy; all of them together do."""
    count, width = 24, 64
    optimizer = optax.adam(1e-3)

    def step(weights, moments, x):
        value, grads = jax.value_and_grad(tanh_loss)(weights, x)
        updates, moments = optimizer.update(grads, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    weights = [spec(width, width)] * count
    moments = jax.eval_shape(optimizer.init, weights)
    lines = []
    found = stowax.plan(
        jax.jit(step, donate_argnums=(0, 1)),
        weights,
        moments,
        spec(16, width),
        target="h200",
        budget="60%",
        progress=lines.append,
    )
    assert any("smaller arrays may be offloaded" in line for line in lines)
    assert found.fits
    each = width * width * 4
    taken = sum(math.prod(w.shape) * 4 for w in jax.tree.leaves((weights, moments)))
    assert each < 4 * least_bytes(found.budget_bytes, taken)
    assert found.host_bytes >= count * each
    assert compiled_total(found, step, weights, moments, spec(16, width)) == (
        found.device_bytes
    )


def test_a_refusal_says_why_the_state_stays():
    """Nothing leaves a CPU: it has no other memory."""

    def step(w, m, x):
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * m, 0.9 * m + grads, value

    args = spec(512, 512), spec(512, 512), spec(8, 512)
    found = stowax.plan(step, *args, budget="1MiB", target="cpu", progress=False)
    largest, *_ = found.proof.in_the_way
    assert largest.endswith("stays: the target has no host memory of its own")


@pytest.mark.slow
def test_what_was_found_stays_where_smaller_arrays_do_not_compile(monkeypatch):
    def step(weights, moments, x):
        value, grads = jax.value_and_grad(tanh_loss)(weights, x)
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        new = [w - 0.1 * m for w, m in zip(weights, moments, strict=True)]
        return new, moments, value

    compiled, taken, lines = _loop.compile_and_read, _loop.Search.run, []
    usual = []

    def searched(search):
        usual.append(search.rolled.survey.least_bytes)
        return taken(search)

    def refusing(survey, *args, **options):
        if usual and survey.least_bytes < usual[0]:
            raise CompileError("no program of that")
        return compiled(survey, *args, **options)

    monkeypatch.setattr(_loop.Search, "run", searched)
    monkeypatch.setattr(_loop, "compile_and_read", refusing)
    layers = [spec(32, 32)] * 40
    found = stowax.plan(
        step,
        layers,
        layers,
        spec(8, 32),
        target="h200",
        budget="35%",
        donate=True,
        progress=lines.append,
    )
    assert any("(no program of that)" in line for line in lines)
    assert not found.fits
    assert found.smallest_budget > found.budget_bytes
    assert not any("planning less" in line for line in lines)


def test_numpys_own_integers_are_planned_in_silence():
    """As `jax.jit` makes them 32 bits wide; JAX 0.12 warns of a spec of 64."""

    def step(w, rows):
        value, grads = jax.value_and_grad(lambda w: jnp.mean(w[rows] ** 2))(w)
        return w - 0.1 * grads, value

    rows = np.arange(8)
    assert rows.dtype == np.int64
    found = stowax.plan(step, spec(64, 64), rows, target="h200", progress=False)
    assert found.fits
    assert found.program.arguments[1].dtype == "int32"
