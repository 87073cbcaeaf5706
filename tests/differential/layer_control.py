"""What a layer computes: control flow, derivatives by hand, calls of the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .layer_ops import elementwise, op, row, square


@jax.custom_vjp
def _bounded(x):
    return jnp.tanh(x)


_bounded.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _powered(x, power, bend):
    return bend(x) ** power


_powered.defvjp(
    lambda x, power, bend: (bend(x) ** power, (x, bend(x))),
    lambda power, bend, kept, g: (
        jax.vjp(bend, kept[0])[1](g * power * kept[1] ** (power - 1))[0],
    ),
)


@jax.custom_jvp
def _softened(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


@_softened.defjvp
def _softened_jvp(values, tangents):
    return _softened(values[0]), jax.nn.sigmoid(values[0]) * tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _applied(function, x):
    return function(x)


@_applied.defjvp
def _applied_jvp(function, values, tangents):
    return jax.jvp(function, values, tangents)


@jax.custom_vjp
def _attend(q, k, v):
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2), axis=-1) @ v


def _attend_forward(q, k, v):
    scores = q @ jnp.swapaxes(k, -1, -2)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - total) @ v, (q, k, v, total)


def _attend_backward(kept, g):
    q, k, v, total = kept
    mixed = jnp.exp(q @ jnp.swapaxes(k, -1, -2) - total)
    inner = g @ jnp.swapaxes(v, -1, -2)
    inner = mixed * (inner - jnp.sum(mixed * inner, axis=-1, keepdims=True))
    turned = jnp.swapaxes(mixed, -1, -2)
    return inner @ k, jnp.swapaxes(inner, -1, -2) @ q, turned @ g


_attend.defvjp(_attend_forward, _attend_backward)

elementwise("custom vjp", _bounded)
elementwise("custom vjp nondiff", lambda x: 0.5 * _powered(x, 2, jnp.sin))
elementwise("custom jvp", _softened)
elementwise("custom jvp nondiff", lambda x: _applied(jnp.sin, x))
elementwise("checkpoint", lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(x))
elementwise("stop gradient", lambda x: 0.5 * x + lax.stop_gradient(jnp.sin(x)))


@op("custom vjp attention", added=True, q=square, k=square, v=square)
def _custom_attention(p, c, x, i):
    return _attend(x @ p["q"] * 0.3, x @ p["k"], x @ p["v"])


@op("checkpoint policy", added=True, w=square)
def _checkpoint_policy(p, c, x, i):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x) @ w), policy=policy)(
        x, p["w"]
    )


@op("checkpoint name", added=True, w=square)
def _checkpoint_name(p, c, x, i):
    return jnp.sin(jax.ad_checkpoint.checkpoint_name(x @ p["w"], "product"))


@op("inner scan", added=True, w=square)
def _inner_scan(p, c, x, i):
    def cell(h, row):
        h = jnp.tanh(row + h @ p["w"])
        return h, h

    rows = jnp.moveaxis(x, -2, 0)
    return jnp.moveaxis(lax.scan(cell, jnp.zeros_like(rows[0]), rows)[1], 0, -2)


@op("inner scan reversed", added=True, w=square)
def _inner_scan_reversed(p, c, x, i):
    def cell(h, row):
        h = jax.nn.silu(row + 0.5 * h @ p["w"])
        return h, 0.5 * h

    rows = jnp.moveaxis(x, -2, 0)
    out = lax.scan(cell, jnp.zeros_like(rows[0]), rows, reverse=True)[1]
    return jnp.moveaxis(out, 0, -2)


@op("inner scan twice", added=True, w=square)
def _inner_scan_twice(p, c, x, i):
    def inner(h, _):
        return jax.nn.gelu(h @ p["w"]), None

    def outer(h, k):
        return lax.scan(inner, h * k, None, length=2)[0], jnp.sum(h)

    steps = jnp.asarray([0.5, 0.7], x.dtype)
    return lax.scan(outer, x, steps)[0]


@op("inner scan unused", added=True, w=square)
def _inner_scan_unused(p, c, x, i):
    def cell(h, read):
        _, k = read
        return jnp.tanh(h @ p["w"]) + 0.1 * k, None

    unused = jnp.zeros((2, 3), x.dtype)
    return lax.scan(cell, x, (unused, jnp.asarray([1, 2], x.dtype)))[0]


@op("inner scan mixed carry")
def _inner_scan_mixed_carry(p, c, x, i):
    def cell(carry, _):
        h, key, count, flag = carry
        key, one = jax.random.split(key)
        noise = jax.random.uniform(one, h.shape, jnp.float32).astype(h.dtype)
        h = jnp.where(flag, jnp.sin(h + 0.1 * noise), jnp.tanh(h))
        return (h, key, count + 1, ~flag), count

    start = (x, jax.random.fold_in(c["key"], i), jnp.int32(0), jnp.bool_(True))
    (h, _, count, _), counts = lax.scan(cell, start, None, length=2)
    return h + 0.01 * (count + jnp.sum(counts)).astype(h.dtype)


@op("cond")
def _cond(p, c, x, i):
    return lax.cond(jnp.asarray(i) % 2 == 0, jnp.sin, lambda y: 0.5 * y, x)


@op("cond on data", b=row)
def _cond_on_data(p, c, x, i):
    large = jnp.sum(x.astype(jnp.float32)) > 0
    return lax.cond(large, lambda y: y + p["b"], lambda y: y * jnp.cos(y), x)


@op("switch")
def _switch(p, c, x, i):
    branches = [jnp.tanh, jnp.sin, lambda y: 0.5 * y]
    return lax.switch(jnp.asarray(i, jnp.int32) % 3, branches, x)


@op("while")
def _while(p, c, x, i):
    # JAX does not differentiate a while backward: what it finds is a constant.
    def smaller(state):
        return state[0] * 0.5, state[1] + 1

    largest = lax.stop_gradient(jnp.max(jnp.abs(x.astype(jnp.float32))))
    start = (largest, jnp.int32(0))
    _, count = lax.while_loop(lambda s: (s[0] > 1) & (s[1] < 5), smaller, start)
    return x / (1 + count).astype(x.dtype)


@op("inner fori")
def _inner_fori(p, c, x, i):
    return lax.fori_loop(0, 2, lambda k, h: jnp.sin(h) + 0.1 * k, x)


@op("debug print")
def _debug_print(p, c, x, i):
    jax.debug.print("layer {i}: {mean}", i=i, mean=jnp.mean(x))
    return jnp.sin(x)


@op("debug callback")
def _debug_callback(p, c, x, i):
    jax.debug.callback(lambda value: None, jnp.max(x))
    return jnp.sin(x)


def _on_host(function, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    host = lambda a: np.asarray(function(np.asarray(a, np.float32)), x.dtype)
    return jax.pure_callback(host, shape, x, vmap_method="sequential")


@op("pure callback")
def _pure_callback(p, c, x, i):
    return x + 0.1 * _on_host(np.sin, lax.stop_gradient(x))


@op("io callback")
def _io_callback(p, c, x, i):
    from jax.experimental import io_callback

    seen = io_callback(
        lambda value: np.float32(0), jax.ShapeDtypeStruct((), "float32"), i
    )
    return jnp.sin(x) + lax.stop_gradient(seen).astype(x.dtype)


@op("inner gradient")
def _inner_gradient(p, c, x, i):
    energy = lambda y: jnp.sum(jnp.sin(y.astype(jnp.float32)) * jnp.cos(0.5 * y))
    return x - 0.3 * jax.grad(energy)(x).astype(x.dtype)


@op("inner vmap", added=True, w=square)
def _inner_vmap(p, c, x, i):
    return jax.vmap(lambda one: jnp.tanh(one @ p["w"]), in_axes=-2, out_axes=-2)(x)


@op("inner map")
def _inner_map(p, c, x, i):
    rows = lax.map(lambda one: jax.nn.softmax(one, axis=-1), jnp.moveaxis(x, -2, 0))
    return x - jnp.moveaxis(rows, 0, -2)
