"""What a layer computes: plain operations. `layer_control` has the others.

An operation reads `x` (…, rows, width), its own arrays `p`, what all layers share `c`
(tokens, mask, order, key) and the layer's number `i`; it returns an array of x's shape.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """`arrays` gives the shapes of the operation's own weights for (width, rows).

    `added` says whether its result is added to x, or stands in its place.
    """

    run: Callable[..., Any]
    arrays: Callable[[int, int], dict[str, tuple[int, ...]]] = lambda w, r: {}
    added: bool = False


OPS: dict[str, Op] = {}


def op(name, added=False, **arrays):
    """Registers an operation; sizes of its weights are functions of (width, rows)."""

    def register(run):
        shapes = lambda w, r: {k: shape(w, r) for k, shape in arrays.items()}
        OPS[name] = Op(run=run, arrays=shapes, added=added)
        return run

    return register


def square(w, r):
    return (w, w)


def row(w, r):
    return (w,)


def elementwise(name, function):
    op(name)(lambda p, c, x, i: function(x))


elementwise("tanh", jnp.tanh)
elementwise("sin", jnp.sin)
elementwise("relu", jax.nn.relu)
elementwise("gelu", jax.nn.gelu)
elementwise("silu", jax.nn.silu)
elementwise("softmax", lambda x: jax.nn.softmax(x, axis=-1))
elementwise("logsumexp", lambda x: x - jax.nn.logsumexp(x, axis=-1, keepdims=True))
elementwise("cumsum", lambda x: 0.3 * jnp.cumsum(x, axis=-1))
elementwise("reverse cumsum", lambda x: 0.3 * lax.cumsum(x, x.ndim - 2, reverse=True))
elementwise("cumlogsumexp", lambda x: 0.3 * lax.cumlogsumexp(x, x.ndim - 1))
elementwise("associative scan", lambda x: lax.associative_scan(jnp.maximum, x, axis=-2))
elementwise("sort", lambda x: jnp.sort(x, axis=-1))
elementwise("clip", lambda x: jnp.clip(x, -1.5, 1.5))
elementwise("round", lambda x: x + lax.stop_gradient(jnp.round(4 * x) / 4 - x))
elementwise("sign", lambda x: x * lax.stop_gradient(jnp.sign(x)))
elementwise("bfloat16", lambda x: x.astype(jnp.bfloat16).astype(x.dtype))
elementwise("float16", lambda x: x.astype(jnp.float16).astype(x.dtype))
elementwise(
    "float8",
    lambda x: jnp.clip(x, -240, 240).astype(jnp.float8_e4m3fn).astype(x.dtype),
)
elementwise("flip", lambda x: jnp.flip(x, axis=-2))
elementwise("roll", lambda x: jnp.roll(x, 1, axis=-1))
elementwise("barrier", lambda x: lax.optimization_barrier(jnp.sin(x)))
elementwise("jit", lambda x: jax.jit(lambda y: jnp.cos(y) * y)(x))
elementwise("named scope", lambda x: jax.named_scope("block")(jnp.tanh)(x))
elementwise("erf", lambda x: lax.erf(x.astype(jnp.float32)).astype(x.dtype))


@op("matmul", added=True, w=square)
def _matmul(p, c, x, i):
    return x @ p["w"]


@op("mlp", added=True, up=lambda w, r: (w, 2 * w), down=lambda w, r: (2 * w, w))
def _mlp(p, c, x, i):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


@op("gated", added=True, gate=square, up=square, down=square)
def _gated(p, c, x, i):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


@op("bias", b=row)
def _bias(p, c, x, i):
    return x + p["b"]


@op("layer norm", scale=row, shift=row)
def _layer_norm(p, c, x, i):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    spread = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(spread + 0.1) * (1 + p["scale"]) + p["shift"]


@op("rms norm", scale=row)
def _rms_norm(p, c, x, i):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 0.1) * (1 + p["scale"])


@op("attention", added=True, q=square, k=square, v=square)
def _attention(p, c, x, i):
    scores = (x @ p["q"]) @ jnp.swapaxes(x @ p["k"], -1, -2) / math.sqrt(x.shape[-1])
    return jax.nn.softmax(scores, axis=-1) @ (x @ p["v"])


@op("causal attention", added=True, q=square, k=square, v=square)
def _causal_attention(p, c, x, i):
    scores = (x @ p["q"]) @ jnp.swapaxes(x @ p["k"], -1, -2) / math.sqrt(x.shape[-1])
    mask = jnp.tril(jnp.ones((x.shape[-2],) * 2, bool))
    scores = jnp.where(mask, scores, jnp.asarray(-1e4, scores.dtype))
    return jax.nn.softmax(scores, axis=-1) @ (x @ p["v"])


@op("attention heads", added=True, qkv=lambda w, r: (w, 3, 2, w // 2), out=square)
def _attention_heads(p, c, x, i):
    q, k, v = jnp.moveaxis(jnp.einsum("...rw,wthd->...rthd", x, p["qkv"]), -3, 0)
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / math.sqrt(q.shape[-1])
    mixed = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(x.shape) @ p["out"]


@op("dropout")
def _dropout(p, c, x, i):
    kept = jax.random.bernoulli(jax.random.fold_in(c["key"], i), 0.75, x.shape)
    return jnp.where(kept, x / 0.75, 0).astype(x.dtype)


@op("noise")
def _noise(p, c, x, i):
    first, _ = jax.random.split(jax.random.fold_in(c["key"], i))
    return x + 0.1 * jax.random.normal(first, x.shape, jnp.float32).astype(x.dtype)


@op("one hot", added=True, table=square)
def _one_hot(p, c, x, i):
    return (
        jax.nn.one_hot(c["tokens"] % x.shape[-1], x.shape[-1], dtype=x.dtype)
        @ (p["table"])
    )


@op("embedding", added=True, table=lambda w, r: (11, w))
def _embedding(p, c, x, i):
    return p["table"][c["tokens"] % 11]


@op("take along axis")
def _take_along_axis(p, c, x, i):
    places = jnp.broadcast_to((c["tokens"] % x.shape[-1])[..., None], x.shape)
    return x + 0.5 * jnp.take_along_axis(x, places, axis=-1)


@op("gather")
def _gather(p, c, x, i):
    return x[..., c["order"]]


@op("where mask")
def _where_mask(p, c, x, i):
    return jnp.where(c["mask"], x, 0.5)


@op("tril", added=True)
def _tril(p, c, x, i):
    near = jnp.tril(x @ jnp.swapaxes(x, -1, -2)) / x.shape[-1]
    return jnp.tanh(near) @ x


@op("argsort")
def _argsort(p, c, x, i):
    return jnp.take_along_axis(x, jnp.argsort(x, axis=-1), axis=-1)


@op("top k", added=True)
def _top_k(p, c, x, i):
    largest, places = lax.top_k(x, 2)
    return jnp.sum(largest, -1, keepdims=True) * 0.2 + 0.01 * places[..., :1].astype(
        x.dtype
    )


@op("argmax", added=True, table=square)
def _argmax(p, c, x, i):
    return p["table"][jnp.argmax(x, axis=-1)]


@op("searchsorted")
def _searchsorted(p, c, x, i):
    edges = jnp.asarray([-1.0, 0.0, 1.0], x.dtype)
    return x + 0.1 * jnp.searchsorted(edges, x).astype(x.dtype)


@op("scatter add")
def _scatter_add(p, c, x, i):
    return x.at[..., c["order"][:2]].add(0.5 * x[..., :2])


@op("dynamic slice")
def _dynamic_slice(p, c, x, i):
    part = lax.dynamic_slice_in_dim(x, i % x.shape[-1], 1, axis=x.ndim - 1)
    return x + 0.5 * part


@op("dynamic update")
def _dynamic_update(p, c, x, i):
    part = jnp.tanh(x[..., :1])
    return lax.dynamic_update_slice_in_dim(x, part, i % x.shape[-1], axis=x.ndim - 1)


@op(
    "experts",
    added=True,
    router=lambda w, r: (w, 3),
    up=lambda w, r: (3, w, w),
)
def _experts(p, c, x, i):
    gates, chosen = lax.top_k(jax.nn.softmax(x @ p["router"], axis=-1), 2)
    spread = jax.nn.one_hot(chosen, 3, dtype=x.dtype) * gates[..., None]
    each = jnp.tanh(jnp.einsum("...rw,ewv->...erv", x, p["up"]))
    return jnp.einsum("...erv,...rke->...rv", each, spread)


@op("conv", added=True, kernel=lambda w, r: (3, w, w))
def _conv(p, c, x, i):
    flat = x.reshape(-1, *x.shape[-2:])
    out = lax.conv_general_dilated(
        flat, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return out.reshape(x.shape)


@op("solve", added=True, a=square)
def _solve(p, c, x, i):
    a = p["a"].astype(jnp.float32)
    system = 3 * jnp.eye(a.shape[-1], dtype=a.dtype) + jnp.tanh(a)
    right = jnp.swapaxes(x.astype(jnp.float32), -1, -2)
    system = jnp.broadcast_to(system, (*right.shape[:-2], *system.shape))
    return jnp.swapaxes(jnp.linalg.solve(system, right), -1, -2).astype(x.dtype)


@op("complex")
def _complex(p, c, x, i):
    wide = x.astype(jnp.float32)
    turned = lax.complex(wide, 0.5 * wide) * jnp.exp(lax.complex(wide * 0, wide))
    return (jnp.real(turned) + 0.1 * jnp.abs(turned + 1)).astype(x.dtype)


@op("fft")
def _fft(p, c, x, i):
    spectrum = jnp.fft.rfft(x.astype(jnp.float32), axis=-1)
    return jnp.fft.irfft(0.9 * spectrum, x.shape[-1], axis=-1).astype(x.dtype)


@op("int8", added=True, w=square)
def _int8(p, c, x, i):
    scale = lax.stop_gradient(jnp.max(jnp.abs(p["w"])) / 127 + 1e-6)
    whole = jnp.clip(jnp.round(p["w"] / scale), -127, 127).astype(jnp.int8)
    rounded = whole.astype(x.dtype) * scale
    return x @ (p["w"] + lax.stop_gradient(rounded - p["w"]))


@op("shared product", added=True)
def _shared_product(p, c, x, i):
    return x @ c["shared"].astype(x.dtype)


@op("layer number")
def _layer_number(p, c, x, i):
    return x * (1 + 0.1 * jnp.asarray(i, jnp.float32)).astype(x.dtype)


@op("batch norm", scale=row)
def _batch_norm(p, c, x, i):
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axis=axes, keepdims=True)
    spread = jnp.var(x, axis=axes, keepdims=True)
    return (x - mean) * lax.rsqrt(spread + 0.1) * (1 + p["scale"])


@op("rotary")
def _rotary(p, c, x, i):
    first, second = jnp.split(x, 2, axis=-1)
    angle = jnp.arange(x.shape[-2], dtype=jnp.float32)[:, None] * 0.1
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1)


@op("pad")
def _pad(p, c, x, i):
    wide = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 1)])
    return 0.5 * (wide[..., 2:] + wide[..., :-2])


@op("cholesky", added=True, a=square)
def _cholesky(p, c, x, i):
    a = p["a"].astype(jnp.float32)
    root = jnp.linalg.cholesky(a @ a.T + jnp.eye(a.shape[-1], dtype=a.dtype))
    return x @ root.astype(x.dtype)


@op("segment sum")
def _segment_sum(p, c, x, i):
    rows = jnp.moveaxis(x, -1, 0)
    sums = jax.ops.segment_sum(rows, c["order"] % 3, num_segments=3)
    return x + 0.3 * jnp.moveaxis(sums[c["order"] % 3], 0, -1)


@op("integers")
def _integers(p, c, x, i):
    mixed = (c["tokens"].astype(jnp.uint32) * jnp.uint32(2654435761)) >> 28
    return x * (1 + 0.01 * mixed.astype(x.dtype))[..., None]
