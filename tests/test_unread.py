"""What a differentiated function returns beside its loss, read by the step or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._jax import open_jaxpr
from stowax._step._recording import record_step

ROWS, WIDTH, VOCABULARY = 4096, 64, 4096


def loss_of(params, x, labels):
    """A loss over many classes, and what people return beside it."""
    hidden = jnp.tanh(x @ params["hidden"])
    logits = hidden @ params["head"]
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    loss = jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen)
    right = jnp.mean(jnp.argmax(logits, 1) == labels)
    return loss, {"logits": logits, "accuracy": right, "hidden": hidden}


def step_that_reads(*names):
    def step(params, x, labels):
        take = jax.value_and_grad(loss_of, has_aux=True)
        (loss, more), grads = take(params, x, labels)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, (loss, [more[name] for name in names])

    return step


def arguments(rows=ROWS, vocabulary=VOCABULARY):
    draw = np.random.default_rng(0)
    params = {
        "hidden": draw.normal(size=(WIDTH, WIDTH)) / 8,
        "head": draw.normal(size=(WIDTH, vocabulary)) / 8,
    }
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    x = jnp.asarray(draw.normal(size=(rows, WIDTH)), jnp.float32)
    return params, x, jnp.asarray(draw.integers(vocabulary, size=rows), jnp.int32)


def planned(step, **options):
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())
    return stowax.plan(step, *specs, target="h200", progress=False, **options)


def test_logits_that_nobody_reads_do_not_come_out_whole():
    logits = 4 * ROWS * VOCABULARY
    alone, beside = (
        planned(step_that_reads(*names), budget=logits) for names in ((), ("hidden",))
    )
    assert alone.fits
    assert beside.fits
    assert alone.program.stacks  # the loss in blocks
    assert "blocks of tokens" in str(alone)
    assert beside.device_bytes < logits


@pytest.mark.slow
def test_logits_that_are_read_do():
    found = planned(step_that_reads("logits"), budget=4 * ROWS * VOCABULARY)
    assert not found.fits


@pytest.mark.parametrize(
    "names", [(), ("accuracy",), ("logits", "hidden"), ("accuracy", "logits")]
)
def test_what_is_read_is_what_it_was(names):
    step, args = step_that_reads(*names), arguments(256, 512)
    found = stowax.plan(step, *args, target="cpu", progress=False)
    expected, computed = jax.jit(step)(*args), jax.jit(found.apply(step))(*args)
    assert jax.tree.structure(expected) == jax.tree.structure(computed)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        expected,
        computed,
    )


def test_a_loop_over_batches_hands_out_what_it_reads():
    def epoch(params, xs, labels):
        def step(params, batch):
            take = jax.value_and_grad(loss_of, has_aux=True)
            (loss, more), grads = take(params, *batch)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return params, (loss, more)

        params, (losses, more) = jax.lax.scan(step, params, (xs, labels))
        return params, losses, more["accuracy"]

    params, x, labels = arguments(256, 512)
    args = params, x.reshape(4, 64, WIDTH), labels.reshape(4, 64)
    leaves, structure = jax.tree.flatten(args)
    (call,) = record_step(epoch, leaves, structure).calls
    results = open_jaxpr(call.jaxpr).outvars
    assert [str(v.aval) for v in results].count("float32[64,512]") == 0
    found = stowax.plan(epoch, *args, target="cpu", progress=False)
    expected, computed = jax.jit(epoch)(*args), jax.jit(found.apply(epoch))(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(computed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
