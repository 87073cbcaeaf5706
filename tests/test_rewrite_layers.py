"""What users write into layers keeps its meaning under any decisions.

Each test is one habit: a step that has it, the stacks that must be found in it, and
loss and gradients under several decisions beside those of the plain step
(`planned_steps.check`).
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from layered import (
    LAYERS,
    WEIGHTS,
    WIDTH,
    X,
    check_layers,
    draw,
    gradient_step,
    layer,
    one_layer,
    run_layers,
)
from planned_steps import assert_same_bits, at_random, check, planned, unfused
from stowax._mark import stow
from stowax._records._stages import Options


@pytest.fixture(params=[False, True], ids=["scan", "loop"])
def unrolled(request):
    return request.param


# --- what layers hold ---------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def attention(q, k, scale):
    return jax.nn.softmax(q @ k.T * scale, axis=-1)


def _attention_forward(q, k, scale):
    out = attention(q, k, scale)
    return out, (q, k, out)


def _attention_backward(scale, kept, ct):
    q, k, out = kept
    scores = out * (ct - jnp.sum(ct * out, -1, keepdims=True)) * scale
    return scores @ k, scores.T @ q


attention.defvjp(_attention_forward, _attention_backward)


@pytest.mark.slow
def test_custom_vjp_attention(unrolled):
    def body(x, p):
        h = x @ p["w"]
        return x + attention(h, x, 0.5) @ h + p["b"][None, :]

    check_layers(body, unrolled, seeds=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True], ids=["dissolved", "kept"])
def test_checkpoint_in_the_model_with_a_policy(unrolled, keep):
    policy = jax.checkpoint_policies.dots_saveable
    body = jax.checkpoint(layer, policy=policy)
    options = Options(keep_checkpoint=keep)
    check_layers(body, unrolled, options=options)


@pytest.mark.slow
def test_checkpoint_around_the_whole_model():
    @jax.checkpoint
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS])


@pytest.mark.slow
def test_cond_in_a_layer(unrolled):
    def body(x, p):
        h = x @ p["w"]
        return lax.cond(jnp.sum(h) > 0, lambda h: x + jnp.sin(h), lambda h: x - h, h)

    check_layers(body, unrolled)


@pytest.mark.slow
def test_while_in_a_layer(unrolled):
    def body(x, p):
        def halve(state):
            n, y = state
            return n + 1, y * 0.5

        size = lax.stop_gradient(jnp.abs(x @ p["w"]))
        _, y = lax.while_loop(lambda s: jnp.max(s[1]) > 1, halve, (0, size))
        return jnp.tanh(x @ p["w"] + y) + p["b"][None, :]

    check_layers(body, unrolled)


@pytest.mark.quick("loop")
def test_fori_loop_in_a_layer(unrolled):
    def body(x, p):
        return lax.fori_loop(0, 2, lambda _, x: layer(x, p), x)

    check_layers(body, unrolled)


@pytest.mark.slow
def test_nested_scan(unrolled):
    def body(x, p):
        def inner(x, row):
            return jnp.sin(x * row[None, :]) + x, jnp.sum(x)

        x, sums = lax.scan(inner, x, p["w"])
        return x * jnp.mean(sums) + p["b"][None, :]

    check_layers(body, unrolled, seeds=(0, 1))


@pytest.mark.quick("True")
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_outputs_per_layer(reverse):
    def loss(weights, x):
        def body(x, p):
            x = layer(x, p)
            return x, {"sum": jnp.sum(x, axis=0), "positive": x > 0}

        x, ys = lax.scan(body, x, weights, reverse=reverse)
        return jnp.mean(x) + jnp.sum(jnp.cos(ys["sum"])), ys["positive"]

    def step(weights, x):
        return jax.value_and_grad(stow(loss), has_aux=True)(weights, x)

    check(step, (WEIGHTS, X), [LAYERS], seeds=(0, 1))


def test_a_carry_and_an_output_that_are_numbers():
    def loss(weights, x):
        def body(state, p):
            x, before = state
            return (layer(x, p) + before, 1.0), (before, 2.0)

        (x, last), ys = lax.scan(body, (x, 3.0), weights)
        return jnp.mean(x) + last + sum(map(jnp.sum, ys))

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS], seeds=(0, 1))


@pytest.mark.slow
def test_outputs_per_layer_of_a_loop():
    def loss(weights, x):
        sums = []
        for k in range(LAYERS):
            x = layer(x, one_layer(weights, k))
            sums.append(jnp.sum(x, axis=0))
        return jnp.mean(x) + jnp.sum(jnp.cos(jnp.stack(sums)))

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS], seeds=(0, 1))


@pytest.mark.slow
def test_a_counter_is_carried(unrolled):
    def body(state, p):
        x, n = state
        return x + jnp.tanh(x @ p["w"]) / (n + 1).astype(x.dtype), n + 1

    def loss(weights, x):
        x, n = run_layers(body, (x, jnp.int32(0)), weights, unrolled=unrolled)
        return jnp.mean(x), n

    def step(weights, x):
        return jax.value_and_grad(stow(loss), has_aux=True)(weights, x)

    check(step, (WEIGHTS, X), [LAYERS])


@pytest.mark.slow
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_dropout_with_a_carried_key(unrolled, make_key):
    def body(state, p):
        x, key = state
        key, mine = jax.random.split(key)
        kept = jax.random.bernoulli(mine, 0.5, x.shape)
        return jnp.where(kept, layer(x, p), 0.0), key

    def loss(weights, x, key):
        x, key = run_layers(body, (x, key), weights, unrolled=unrolled)
        return jnp.mean(jnp.square(x)), key

    def step(weights, x, key):
        return jax.value_and_grad(stow(loss), has_aux=True)(weights, x, key)

    check(step, (WEIGHTS, X, make_key(0)), [LAYERS], seeds=(0, 1))


def test_dropout_with_a_key_per_layer():
    def loss(weights, x, key):
        def body(x, given):
            p, key = given
            kept = jax.random.bernoulli(key, 0.5, x.shape)
            return jnp.where(kept, layer(x, p), 0.0), None

        x, _ = lax.scan(body, x, (weights, jax.random.split(key, LAYERS)))
        return jnp.mean(jnp.square(x))

    check(gradient_step(loss), (WEIGHTS, X, jax.random.key(0)), [LAYERS])


@pytest.mark.quick("loop")
def test_weights_shared_by_all_layers_and_read_twice(unrolled):
    def loss(weights, x):
        shared = weights["shared"]

        def body(x, p):
            return x + jnp.tanh(x @ shared + p["b"][None, :]) @ shared

        x = run_layers(body, x, weights["layers"], unrolled=unrolled)
        # ... and read again after the layers, like a condition in a diffusion model
        return jnp.mean(x @ shared)

    weights = {"shared": WEIGHTS["w"][0], "layers": {"b": WEIGHTS["b"]}}
    check(gradient_step(loss), (weights, X), [LAYERS], seeds=(0, 1))


@pytest.mark.slow
def test_tied_embeddings_and_integer_inputs(unrolled):
    def loss(weights, tokens):
        x = run_layers(
            layer, weights["embedding"][tokens], weights["layers"], unrolled=unrolled
        )
        logits = x @ weights["embedding"].T
        right = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    weights = {"embedding": draw(5, 7, WIDTH), "layers": WEIGHTS}
    tokens = jnp.asarray([1, 5, 2], jnp.int32)
    check(gradient_step(loss), (weights, tokens), [LAYERS])


@pytest.mark.slow
def test_the_layers_input_is_read_again_after_them(unrolled):
    def loss(weights, x):
        x = jnp.sin(x @ weights["into"])
        return jnp.mean(x * run_layers(layer, x, weights["layers"], unrolled=unrolled))

    weights = {"into": WEIGHTS["w"][0], "layers": WEIGHTS}
    # The stack hands out one cotangent of its input; plain JAX adds its parts singly.
    check(gradient_step(loss), (weights, X), [LAYERS], exact=False)


@pytest.mark.slow
def test_integers_per_layer():
    def loss(weights, x):
        def body(x, given):
            p, n = given
            x = jnp.where(n % 2 == 0, layer(x, p), x)
            return x + p["b"][None, :].at[:, n].multiply(2.0), None

        x, _ = lax.scan(body, x, (weights, jnp.arange(LAYERS)))
        return jnp.mean(x)

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS])


@pytest.mark.slow
def test_half_precision_layers_with_single_precision_weights(unrolled):
    def body(x, p):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return layer(x, p)

    def loss(weights, x):
        x = run_layers(body, x.astype(jnp.bfloat16), weights, unrolled=unrolled)
        return jnp.mean(x.astype(jnp.float32))

    # Compiled, XLA may leave out roundings to half precision: only the bits compare.
    step = gradient_step(loss)
    with unfused():
        expected = step(WEIGHTS, X)
        got = planned(step, (WEIGHTS, X), at_random(0))(WEIGHTS, X)
    assert_same_bits(got, expected)


@pytest.mark.slow
def test_layers_that_end_in_nothing_differentiable():
    def loss(weights, x):
        y = run_layers(layer, lax.stop_gradient(x @ WEIGHTS["w"][0]), weights)
        counted = run_layers(layer, x, lax.stop_gradient(weights))
        return jnp.mean(y) + jnp.sum(counted > 0).astype(jnp.float32)

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS])


def test_printing_in_a_layer_runs_once(capfd):
    def body(x, p):
        jax.debug.print("layer")
        return layer(x, p)

    def loss(weights, x):
        return jnp.mean(run_layers(body, x, weights))

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS])
