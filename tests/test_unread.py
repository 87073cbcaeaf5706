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


def same_when_planned(step, *args, budget):
    """The plan of a step, whose program on a CPU gives the same numbers."""
    found = stowax.plan(step, *args, target="cpu", budget=budget, progress=False)
    assert found.fits
    assert found.program.stacks
    expected, computed = jax.jit(step)(*args), jax.jit(found.apply(step))(*args)
    assert jax.tree.structure(expected) == jax.tree.structure(computed)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(computed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    return found


@pytest.mark.parametrize("names", [(), ("hidden",)])
def test_what_is_read_is_what_it_was(names):
    same_when_planned(step_that_reads(*names), *arguments(2048, 2048), budget="70%")


def scanned_loss_of(params, x, labels):
    """As `loss_of`, of layers in a loop."""
    x, _ = jax.lax.scan(
        lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) @ w), None), x, params["layers"]
    )
    loss, more = loss_of(params, x, labels)
    return loss, more | {"last": x}


@pytest.mark.quick("logits-True", "accuracy-False")
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", ["logits", "last", "accuracy"])
def test_a_loop_beside_what_is_read_is_planned(name, dropped):
    """What is read for nothing counts as read, and what is computed of it is right."""

    def step(params, x, labels):
        take = jax.value_and_grad(scanned_loss_of, has_aux=True)
        (loss, more), grads = take(params, x, labels)
        read = more[name]
        if dropped:
            jnp.max(read) - loss
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, loss if dropped else (loss, read)

    params, x, labels = arguments(2048, 64)
    params["layers"] = jnp.full((6, WIDTH, WIDTH), 0.01)
    same_when_planned(step, params, x, labels, budget="80%")


def test_a_loop_over_batches_hands_out_what_it_reads():
    def epoch(params, xs, labels):
        def step(params, batch):
            take = jax.value_and_grad(loss_of, has_aux=True)
            (loss, more), grads = take(params, *batch)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return params, (loss, more["accuracy"])

        return jax.lax.scan(step, params, (xs, labels))

    params, x, labels = arguments(4096, 2048)
    args = params, x.reshape(2, 2048, WIDTH), labels.reshape(2, 2048)
    leaves, structure = jax.tree.flatten(args)
    (call,) = record_step(epoch, leaves, structure).calls
    results = [str(v.aval) for v in open_jaxpr(call.jaxpr).outvars]
    assert results == ["float32[]", "float32[]", "float32[]", "float32[]"]
    same_when_planned(epoch, *args, budget="80%")
