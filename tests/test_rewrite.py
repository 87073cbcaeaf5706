"""What users write into steps and layers keeps its meaning under any decisions.

Each test is one habit: a step that has it, the stacks that must be found in it, and
loss and gradients under several decisions beside those of the plain step
(`planned_steps.check`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from planned_steps import assert_same_bits, at_random, check, planned, unfused
from stowax._mark import stow
from stowax._rewrite import Options
from stowax._trace import store_all

WIDTH, ROWS, LAYERS = 4, 3, 3


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


WEIGHTS = {"w": draw(1, LAYERS, WIDTH, WIDTH), "b": draw(2, LAYERS, WIDTH)}
X = draw(3, ROWS, WIDTH)


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"][None, :])


def one_layer(weights, k):
    return jax.tree.map(lambda w: w[k], weights)


def run_layers(body, x, weights, *, unrolled=False):
    if unrolled:
        for k in range(LAYERS):
            x = body(x, one_layer(weights, k))
        return x
    return lax.scan(lambda x, p: (body(x, p), None), x, weights)[0]


def gradient_step(loss):
    """The step that returns loss and gradients of a marked `loss(weights, x)`."""
    return lambda *args: jax.value_and_grad(stow(loss))(*args)


@pytest.fixture(params=[False, True], ids=["scan", "loop"])
def unrolled(request):
    return request.param


def check_layers(body, unrolled, weights=WEIGHTS, x=X, **how):
    def loss(weights, x):
        return jnp.mean(jnp.square(run_layers(body, x, weights, unrolled=unrolled)))

    return check(gradient_step(loss), (weights, x), [LAYERS], **how)


# --- the step around the marked function --------------------------------------------


def test_aux_outputs_of_any_kind():
    def loss(weights, x):
        y = run_layers(layer, x, weights)
        aux = {"none": None, "number": 3, "name": "text", "y": y}
        aux["flag"] = jnp.any(y > 0)
        return jnp.mean(y), aux

    def step(weights, x):
        (value, aux), grads = jax.value_and_grad(stow(loss), has_aux=True)(weights, x)
        assert (aux["none"], aux["number"], aux["name"]) == (None, 3, "text")
        return value, aux["y"], aux["flag"], grads

    check(step, (WEIGHTS, X), [LAYERS])


def test_python_scalars_and_keywords_are_passed_on():
    def loss(weights, x, *, scale, squared):
        y = run_layers(layer, x, weights) * scale
        return jnp.mean(y * y) if squared else jnp.mean(y)

    def step(weights, x):
        return jax.value_and_grad(stow(loss))(weights, x, scale=2.0, squared=True)

    check(step, (WEIGHTS, X), [LAYERS])


def test_two_losses_in_one_step():
    def first(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def second(weights, x):
        return jnp.mean(jnp.sin(run_layers(layer, 2 * x, weights)))

    def step(weights, x):
        one = jax.value_and_grad(stow(first))(weights, x)
        other = jax.value_and_grad(stow(second))(weights, x)
        return one, other

    traced = check(step, (WEIGHTS, X), [LAYERS, LAYERS])
    assert len({name.split(".")[0] for name in traced.stacks}) == 2


def test_one_loss_differentiated_twice_is_one_stack():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        one = jax.value_and_grad(loss)(weights, x)
        other = jax.value_and_grad(loss)(weights, x + 1)
        return one, other

    check(step, (WEIGHTS, X), [LAYERS])


def test_one_loss_differentiated_in_two_ways():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        return (
            jax.grad(loss, argnums=0)(weights, x),
            jax.grad(loss, argnums=1)(weights, x),
        )

    check(step, (WEIGHTS, X), [LAYERS, LAYERS])


def test_a_marked_function_that_is_also_evaluated():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return value, loss(moved, x), grads

    check(step, (WEIGHTS, X), [LAYERS])


def test_gradient_accumulation_under_scan():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, batches):
        def one(total, x):
            value, grads = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(jnp.add, total, grads), value

        return lax.scan(one, jax.tree.map(jnp.zeros_like, weights), batches)

    check(step, (WEIGHTS, jnp.stack([X, 2 * X])), [LAYERS])


def test_jit_around_the_gradient(unrolled):
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights, unrolled=unrolled))

    @jax.jit
    def inner(weights, x):
        return jax.value_and_grad(loss)(weights, x)

    def step(weights, x):
        return inner(weights, x)

    check(step, (WEIGHTS, X), [LAYERS])


def test_a_marked_function_under_vmap():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, xs):
        return jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(weights, xs)

    check(step, (WEIGHTS, jnp.stack([X, 2 * X])), [LAYERS])


def test_the_gradient_of_a_vmapped_marked_function():
    @stow
    def one(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, xs):
        def total(weights):
            return jnp.mean(jax.vmap(one, in_axes=(None, 0))(weights, xs))

        return jax.value_and_grad(total)(weights)

    check(step, (WEIGHTS, jnp.stack([X, 2 * X])), [LAYERS])


def test_a_marked_function_in_a_marked_function():
    @stow
    def forward(weights, x):
        return run_layers(layer, x, weights)

    @stow
    def loss(weights, x):
        return jnp.mean(forward(weights, run_layers(layer, x, weights)))

    check(lambda *args: jax.value_and_grad(loss)(*args), (WEIGHTS, X), [LAYERS] * 2)


def test_a_batch_of_examples_makes_one_gradient_of_the_weights():
    @stow
    def one(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, xs):
        def total(weights):
            return jnp.mean(jax.vmap(one, in_axes=(None, 0))(weights, xs))

        return jax.grad(total)(weights)

    examples = 11
    args = (WEIGHTS, jnp.stack([X] * examples))
    program = str(jax.make_jaxpr(planned(step, args, store_all))(*args))
    assert f"[{examples},{WIDTH},{WIDTH}]" not in program
    assert f"[{examples},{ROWS},{WIDTH}]" in program


def test_a_gradient_of_a_gradient():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        def penalty(weights, x):
            return jnp.sum(jnp.square(jax.grad(loss, argnums=1)(weights, x)))

        return jax.value_and_grad(penalty)(weights, x)

    # The outer gradient is that of our backward pass, which adds in its own order.
    kept = ("store all", "recompute all")
    check(step, (WEIGHTS, X), [LAYERS], choices=kept, seeds=(), exact=None)


def test_a_marked_part_of_the_loss():
    @stow
    def forward(weights, x):
        return run_layers(layer, x, weights)

    def step(weights, x):
        return jax.value_and_grad(lambda w: jnp.mean(jnp.sin(forward(w, x))))(weights)

    check(step, (WEIGHTS, X), [LAYERS])


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


def test_custom_vjp_attention(unrolled):
    def body(x, p):
        h = x @ p["w"]
        return x + attention(h, x, 0.5) @ h + p["b"][None, :]

    check_layers(body, unrolled, seeds=(0, 1))


@pytest.mark.parametrize("keep", [False, True], ids=["dissolved", "kept"])
def test_checkpoint_in_the_model_with_a_policy(unrolled, keep):
    policy = jax.checkpoint_policies.dots_saveable
    body = jax.checkpoint(layer, policy=policy)
    options = Options(keep_checkpoint=keep)
    check_layers(body, unrolled, options=options)


def test_checkpoint_around_the_whole_model():
    @jax.checkpoint
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS])


def test_cond_in_a_layer(unrolled):
    def body(x, p):
        h = x @ p["w"]
        return lax.cond(jnp.sum(h) > 0, lambda h: x + jnp.sin(h), lambda h: x - h, h)

    check_layers(body, unrolled)


def test_while_in_a_layer(unrolled):
    def body(x, p):
        def halve(state):
            n, y = state
            return n + 1, y * 0.5

        size = lax.stop_gradient(jnp.abs(x @ p["w"]))
        _, y = lax.while_loop(lambda s: jnp.max(s[1]) > 1, halve, (0, size))
        return jnp.tanh(x @ p["w"] + y) + p["b"][None, :]

    check_layers(body, unrolled)


def test_fori_loop_in_a_layer(unrolled):
    def body(x, p):
        return lax.fori_loop(0, 2, lambda _, x: layer(x, p), x)

    check_layers(body, unrolled)


def test_nested_scan(unrolled):
    def body(x, p):
        def inner(x, row):
            return jnp.sin(x * row[None, :]) + x, jnp.sum(x)

        x, sums = lax.scan(inner, x, p["w"])
        return x * jnp.mean(sums) + p["b"][None, :]

    check_layers(body, unrolled, seeds=(0, 1))


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


def test_outputs_per_layer_of_a_loop():
    def loss(weights, x):
        sums = []
        for k in range(LAYERS):
            x = layer(x, one_layer(weights, k))
            sums.append(jnp.sum(x, axis=0))
        return jnp.mean(x) + jnp.sum(jnp.cos(jnp.stack(sums)))

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS], seeds=(0, 1))


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


def test_the_layers_input_is_read_again_after_them(unrolled):
    def loss(weights, x):
        x = jnp.sin(x @ weights["into"])
        return jnp.mean(x * run_layers(layer, x, weights["layers"], unrolled=unrolled))

    weights = {"into": WEIGHTS["w"][0], "layers": WEIGHTS}
    # The stack hands out one cotangent of its input; plain JAX adds its parts singly.
    check(gradient_step(loss), (weights, X), [LAYERS], exact=False)


def test_integers_per_layer():
    def loss(weights, x):
        def body(x, given):
            p, n = given
            x = jnp.where(n % 2 == 0, layer(x, p), x)
            return x + p["b"][None, :].at[:, n].multiply(2.0), None

        x, _ = lax.scan(body, x, (weights, jnp.arange(LAYERS)))
        return jnp.mean(x)

    check(gradient_step(loss), (WEIGHTS, X), [LAYERS])


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

    check(gradient_step(loss), (WEIGHTS, X), [])
