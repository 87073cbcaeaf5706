"""Layers with wide products as people write them, for tests of blocks within layers."""

import jax
import jax.numpy as jnp

LAYERS, B, T, H, D = 3, 2, 128, 4, 64
LENGTH = D // H


def weights(dtype=jnp.float32, layers=LAYERS):
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(*shape):
        return jax.random.normal(next(keys), (layers, *shape), dtype) / shape[0] ** 0.5

    return {
        "qkv": draw(D, 3, H, LENGTH),
        "out": draw(H, LENGTH, D) / H**0.5,
        "up": draw(D, 4 * D),
        "gate": draw(D, 4 * D),
        "down": draw(4 * D, D),
        "bias": draw(H, T, T),
        "scale": jnp.ones((layers, D), dtype),
    }


def tokens(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (B, T, D), dtype)


def normed(x, w):
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return (scaled * w["scale"]).astype(x.dtype)


def heads(x, w):
    qkv = jnp.einsum("btd,dchl->cbthl", normed(x, w), w["qkv"])
    return qkv[0] / LENGTH**0.5, qkv[1], qkv[2]


CAUSAL = jnp.tril(jnp.ones((T, T), bool))


def attention(x, w):
    """With a causal mask; then a feed-forward block."""
    q, k, v = heads(x, w)
    scores = jnp.einsum("bqhl,bkhl->bhqk", q, k)
    shares = jax.nn.softmax(jnp.where(CAUSAL, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bhqk,bkhl,hld->bqd", shares, v, w["out"])
    return x + jax.nn.gelu(normed(x, w) @ w["up"]) @ w["down"]


def gated(x, w):
    """What feeds forward, gated: two products of one array."""
    inner = normed(x, w)
    return x + (jax.nn.silu(inner @ w["gate"]) * (inner @ w["up"])) @ w["down"]


def grouped(x, w):
    """Two heads of keys for four of queries, repeated; a soft cap, as Gemma's."""
    q, k, v = heads(x, w)
    k, v = (jnp.repeat(a[:, :, :2], 2, axis=2) for a in (k, v))
    scores = 5 * jnp.tanh(jnp.einsum("bqhl,bkhl->bhqk", q, k) / 5)
    window = CAUSAL & ~jnp.tril(CAUSAL, -32)
    scores = jnp.where(window, scores.astype(jnp.float32), -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return x + jnp.einsum("bhqk,bkhl,hld->bqd", shares, v, w["out"])


def biased(x, w):
    """With a learned bias per head and place, as T5's."""
    q, k, v = heads(x, w)
    scores = jnp.einsum("bqhl,bkhl->bhqk", q, k) + w["bias"]
    shares = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return x + jnp.einsum("bhqk,bkhl,hld->bqd", shares, v, w["out"])


def with_dropout(x, w):
    """Shares of attention dropped at random."""
    q, k, v = heads(x, w)
    shares = jax.nn.softmax(jnp.einsum("bqhl,bkhl->bhqk", q, k), axis=-1)
    kept = jax.random.bernoulli(jax.random.key(7), 0.9, shares.shape)
    shares = jnp.where(kept, shares / 0.9, 0)
    return x + jnp.einsum("bhqk,bkhl,hld->bqd", shares, v, w["out"])


def over_batch(x, w):
    """One example at a time, as Equinox's models are written."""
    return jax.vmap(lambda one: attention(one[None], w)[0])(x)


def normed_over_tokens(x, w):
    """A norm over all tokens of what is wide: no blocks of tokens, but of features."""
    wide = normed(x, w) @ w["up"]
    wide = (wide - wide.mean((0, 1))) / (wide.std((0, 1)) + 1e-3)
    return x + jnp.tanh(wide) @ w["down"]


def with_scores(x, w):
    """What is wide comes out of the layer: nothing runs in blocks."""
    scores = jnp.einsum("btd,bsd->bts", x, normed(x, w))
    return x + jnp.tanh(scores) @ x, scores
