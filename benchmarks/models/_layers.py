"""The mathematics that the transformers of this folder share, in plain JAX.

Nothing here knows of stowax: these are the functions of an ordinary training script.
Every dtype and every broadcast is written out, so that all of it runs under
``jax_numpy_dtype_promotion="strict"`` and ``jax_numpy_rank_promotion="raise"``. Weights
are kept in float32 and cast where they are used, to the dtype of the activations;
norms, softmax and the loss are computed in float32.

Axes in comments: b batch, s sequence (q of the queries, k of the keys), d width,
h heads, g query heads per key/value head, e head width, f feed-forward width,
v vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array


def rms_norm(x: Array, scale: Array) -> Array:
    """Root-mean-square norm over the last axis of `x` [b s d], times `scale` [d]."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + 1e-5)
    return (normed * scale.astype(jnp.float32)[None, None, :]).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """Norm of mean and variance over the last axis of `x` [b s d]."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + 1e-6)
    scale, bias = (w.astype(jnp.float32)[None, None, :] for w in (scale, bias))
    return (normed * scale + bias).astype(x.dtype)


def rotary_table(length: int, head_width: int) -> tuple[Array, Array]:
    """Sine and cosine of the rotary angles, float32 [s e/2] each."""
    exponent = jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width
    frequency = jnp.exp(-math.log(10_000.0) * exponent)
    position = jnp.arange(length, dtype=jnp.float32)
    angle = position[:, None] * frequency[None, :]
    return jnp.sin(angle), jnp.cos(angle)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
    """Rotary position embedding of `x` [b s h e]; the halves of e are the two axes."""
    sine, cosine = (t[None, :, None, :].astype(x.dtype) for t in table)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def causal_mask(length: int) -> Array:
    """Boolean [1 s s]: a query sees itself and what stands before it."""
    position = jnp.arange(length, dtype=jnp.int32)
    return (position[:, None] >= position[None, :])[None, :, :]


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Array:
    """Plain attention: the whole [q k] matrix of every head is written to memory.

    `query` [b q h e]; `key` and `value` [b k h/g e], each shared by g query heads;
    `mask` boolean [b q k], or [1 q k] for every batch entry the same. Scores are
    multiplied by `scale`, one over the root of e by default, and kept within `cap` by a
    hyperbolic tangent, if there is one. Returns [b q h e].
    """
    batch, length, heads, head_width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, head_width)
    scores = jnp.einsum("bqhge,bkhe->bhgqk", grouped, key).astype(jnp.float32)
    scores = scores * (1.0 / math.sqrt(head_width) if scale is None else scale)
    if cap is not None:
        scores = soft_cap(scores, cap)
    scores = jnp.where(mask[:, None, None, :, :], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bhgqk,bkhe->bqhge", weights, value)
    return mixed.reshape(batch, length, heads, head_width)


def soft_cap(x: Array, cap: float) -> Array:
    """`x` bent to stay between -`cap` and `cap`."""
    return cap * jnp.tanh(x / cap)


def split_heads(x: Array, weight: Array) -> Array:
    """`x` [b s d] times `weight` [d h e]: [b s h e]."""
    return jnp.einsum("bsd,dhe->bshe", x, weight.astype(x.dtype))


def join_heads(x: Array, weight: Array) -> Array:
    """`x` [b s h e] times `weight` [h e d]: [b s d]."""
    return jnp.einsum("bshe,hed->bsd", x, weight.astype(x.dtype))


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Gated feed-forward of `x` [b s d]; `gate` and `up` [d f], `down` [f d]."""
    gated = jax.nn.silu(x @ gate.astype(x.dtype))
    return (gated * (x @ up.astype(x.dtype))) @ down.astype(x.dtype)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Negative log-likelihood [b s] of `labels` [b s] under `logits` [b s v]."""
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, labels[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(wide, axis=-1) - chosen


def normal(key: Array, shape: tuple[int, ...], inputs: int) -> Array:
    """Initial float32 weights of a product that sums over `inputs` terms."""
    return jax.random.normal(key, shape, jnp.float32) * (1.0 / math.sqrt(inputs))


def tokens(key: Array, shape: tuple[int, ...], vocabulary: int) -> Array:
    """Random int32 token numbers below `vocabulary`."""
    return jax.random.randint(key, shape, 0, vocabulary, jnp.int32)


def implicit_promotion() -> Any:
    """Context for the code of others that mixes dtypes, under strict promotion too.

    Optax raises a Python float to an integer power, and the norms of Flax and Equinox
    widen bfloat16 implicitly.
    """
    return jax.numpy_dtype_promotion("standard")


def updated(
    optimizer: optax.GradientTransformation,
    parameters: Any,
    moments: Any,
    gradients: Any,
) -> tuple[Any, Any]:
    """Parameters and optimizer state after one update."""
    with implicit_promotion():
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments
