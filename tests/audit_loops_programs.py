"""Loops with planted faults in what is jitted, donated and kept; see `audit_loops`."""

import functools
import itertools
import queue
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import audit_loops
from audit_loops import STEPS, placed, step, weights

# --- compilation --------------------------------------------------------------------


def mean_step(w, x):
    return w - jnp.mean(x)


def growing_batch():
    compiled = jax.jit(mean_step)
    w = weights()
    for k in range(STEPS):
        w = compiled(w, jnp.ones((k + 1,), jnp.float32))  # here: recompilation


def growing_batch_clean():
    compiled = jax.jit(mean_step)
    w = weights()
    for x in jax.device_put([np.ones(3, np.float32)] * STEPS):
        w = compiled(w, x)


def changing_dtype():
    compiled = jax.jit(mean_step)
    w = weights()
    xs = [jnp.ones(3, jnp.float32), jnp.ones(3, jnp.bfloat16).astype(jnp.float16)]
    with jax.numpy_dtype_promotion("standard"):
        for k in range(STEPS):
            w = compiled(w, xs[k >= 3])  # here: recompilation


changing_dtype_clean = growing_batch_clean


def weak_start():
    compiled = jax.jit(lambda total, x: total + jnp.sum(x))
    total = jnp.asarray(0.0)
    for x in placed():
        total = compiled(total, x)  # here: recompilation


def weak_start_clean():
    compiled = jax.jit(lambda total, x: total + jnp.sum(x))
    total = jnp.float32(0)
    for x in placed():
        total = compiled(total, x)


def static_step():
    @functools.partial(jax.jit, static_argnames="k")
    def compiled(w, k):
        return w * jnp.float32(k)

    w = weights()
    for k in range(STEPS):
        w = compiled(w, k=k)  # here: recompilation


def static_step_clean():
    @functools.partial(jax.jit, static_argnames="k")
    def compiled(w, k):
        return w * jnp.float32(k)

    w = weights()
    for _ in range(STEPS):
        w = compiled(w, k=2)


def jitted_in_the_loop():
    w = weights()
    for _ in range(STEPS):
        w = jax.jit(lambda w: w * jnp.float32(2))(w)  # here: recompilation


def jitted_in_the_loop_clean():
    double = jax.jit(lambda w: w * jnp.float32(2))
    w = weights()
    for _ in range(STEPS):
        w = double(w)


def eager_optimizer():
    w = weights()
    for x in placed():
        w, _ = step(w, x)
        w = (w - jnp.mean(w)) / jnp.max(w)  # here: eager-dispatch


def eager_optimizer_clean():
    normalized = jax.jit(lambda w: (w - jnp.mean(w)) / jnp.max(w))
    w, total = weights(), jnp.float32(0)
    for x in placed():
        w, loss = step(w, x)
        w = normalized(w)
        total = total + loss  # one small operation is no fault


def no_jit_at_all():
    w = weights()
    for x in placed():
        w = jnp.sin(w) * jnp.cos(x)  # here: eager-dispatch


no_jit_at_all_clean = jitted_in_the_loop_clean


# --- updates ------------------------------------------------------------------------


def eager_update():
    w, history = weights(), jnp.zeros((STEPS, 16, 16), jnp.float32)
    for k, x in enumerate(placed()):
        w, _ = step(w, x)
        history = history.at[k].set(w)  # here: eager-update


@functools.partial(jax.jit, donate_argnums=0)
def written(history, w, k):
    return history.at[k].set(w), k + 1


def eager_update_clean():
    w, history = weights(), jnp.zeros((STEPS, 16, 16), jnp.float32)
    k = jnp.int32(0)
    for x in placed():
        w, _ = step(w, x)
        history, k = written(history, w, k)


def eager_slice_update():
    w, zero = weights(), jnp.int32(0)
    for x in placed():
        w, _ = step(w, x)
        w = jax.lax.dynamic_update_slice(w, x[:1], (zero, zero))  # here: eager-update


eager_slice_update_clean = eager_update_clean


@jax.jit
def written_to_a_copy(history, w, k):
    return history.at[k].set(w), k + 1  # here: copied-update, of copied_update


def copied_update():
    w, history = weights(), jnp.zeros((STEPS, 16, 16), jnp.float32)
    k = jnp.int32(0)
    for x in placed():
        w, _ = step(w, x)
        history, k = written_to_a_copy(history, w, k)


copied_update_clean = eager_update_clean


@functools.partial(jax.jit, donate_argnums=0)
def written_and_compared(history, w, k):
    new = history.at[k].set(w)  # here: copied-update, of update_of_what_is_needed
    return new, k + 1, jnp.max(new * history)


def update_of_what_is_needed():
    w, history = weights(), jnp.zeros((STEPS, 16, 16), jnp.float32)
    k = jnp.int32(0)
    for x in placed():
        w, _ = step(w, x)
        history, k, _ = written_and_compared(history, w, k)


@functools.partial(jax.jit, donate_argnums=0)
def compared_and_written(history, w, k):
    return history.at[k].set(w), k + 1, jnp.max(history)


def update_of_what_is_needed_clean():
    w, history = weights(), jnp.zeros((STEPS, 16, 16), jnp.float32)
    k = jnp.int32(0)
    for x in placed():
        w, _ = step(w, x)
        history, k, _ = compared_and_written(history, w, k)


# --- donation -----------------------------------------------------------------------


def large():
    return jnp.ones((64, 64), jnp.float32)


def not_donated():
    train = jax.jit(lambda w: w * jnp.float32(2))
    w = large()
    for _ in range(STEPS):
        w = train(w)  # here: not-donated


def not_donated_clean():
    """Donated, and beside it a gradient: its argument is needed by the update."""
    train = jax.jit(lambda w, g: w - g, donate_argnums=(0,))
    gradient = jax.jit(lambda w: w * jnp.float32(0.1))
    w = large()
    for _ in range(STEPS):
        w = train(w, gradient(w))


def unusable_donation():
    w = large()
    train = jax.jit(lambda w: jnp.sum(w), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(STEPS):
            train(w.copy())  # here: unusable-donation


unusable_donation_clean = not_donated_clean


def donated_reuse():
    train = jax.jit(lambda w: w * jnp.float32(2), donate_argnums=0)
    w = large()
    for _ in range(STEPS):
        new = train(w)  # here: donated-reuse
    return new


donated_reuse.raises = (RuntimeError, ValueError)
donated_reuse_clean = not_donated_clean


# --- memory, input, plans -----------------------------------------------------------


def kept_results():
    w, kept = weights(), []
    big = jax.jit(lambda w: jnp.tile(w, (8, 8)))
    for x in placed():
        w, _ = step(w, x)
        kept.append(big(w))  # here: growing-memory
    return kept


def kept_results_clean():
    w, kept = weights(), []
    big = jax.jit(lambda w: jnp.sum(jnp.tile(w, (8, 8))))
    for x in placed():
        w, loss = step(w, x)
        kept = [*kept, loss]
        big(w)
    return kept


# Beyond what an allocator serves from memory that was given back earlier (32 MiB).
LARGE = 9 << 20


def kept_host_arrays():
    w, kept = weights(), []
    for x in placed():
        w, _ = step(w, x)
        kept.append(np.ones(LARGE, np.float32))  # here: growing-memory
    return kept


# Pages that are touched for the first time: a busy machine lets the device wait.
kept_host_arrays.also = ("starved-device",)


def kept_host_arrays_clean():
    w, sums = weights(), np.zeros(STEPS)
    for k, x in enumerate(placed()):
        w, _ = step(w, x)
        sums[k] = np.ones(1 << 20, np.float32).sum()
    return sums


def slow_loader():
    def loader():
        for x in placed():
            time.sleep(0.05)
            yield x

    w = weights()
    for x in loader():  # here: starved-device
        w, _ = step(w, x)


slow_loader_clean = audit_loops.waits_clean


def slow_loader_in_a_thread():
    def loop():
        w = weights()
        for x in placed():
            time.sleep(0.05)  # here: starved-device
            w, _ = step(w, x)

    _in_a_thread(loop)


def slow_loader_in_a_thread_clean():
    _in_a_thread(audit_loops.waits_clean)


def _in_a_thread(loop):
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


def fed_by_a_slow_thread():
    ready = queue.SimpleQueue()

    def load():
        for x in placed():
            time.sleep(0.05)
            ready.put(x)

    threading.Thread(target=load).start()
    w = weights()
    for _ in range(STEPS):
        x = ready.get()  # here: starved-device
        w, _ = step(w, x)


fed_by_a_slow_thread_clean = audit_loops.waits_clean


def layers(w, x):
    @jax.checkpoint
    def body(x, w):
        return jnp.tanh(x @ w), None  # here: recomputation, of full_recomputation

    return jnp.sum(jax.lax.scan(body, x, w)[0])


def full_recomputation():
    train = jax.jit(lambda w, x: w - jax.grad(layers)(w, x), donate_argnums=0)
    w = jnp.ones((3, 16, 16), jnp.float32)
    for x in placed():
        w = train(w, x)


def plain_layers(w, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(body, x, w)[0])  # here: kept-activations, of deep


def deep(rows=1 << 14):
    """Three layers of 16 numbers a row, at least: more than 1024 times 4096 bytes."""
    train = jax.jit(lambda w, x: w - jax.grad(plain_layers)(w, x), donate_argnums=0)
    w, x = jnp.ones((3, 16, 16), jnp.float32), jnp.ones((rows, 16), jnp.float32)
    for _ in range(STEPS):
        w = train(w, x)


def deep_clean():
    deep(rows=64)


def full_recomputation_clean():
    def plain(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    train = jax.jit(lambda w, x: w - jax.grad(plain)(w, x), donate_argnums=0)
    w = jnp.ones((3, 16, 16), jnp.float32)
    for x in itertools.islice(placed(), STEPS):
        w = train(w, x)
