"""The mathematics that the convolutional models of this folder share, in plain JAX.

As in `_layers` every dtype and every broadcast is written out; weights are float32 and
cast where they are used, norms are computed in float32.

Axes in comments: b batch, h height, w width, c channels. Weights are [h w c/groups c].
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.models import _layers
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights


def weight(keys: Keys, size: int, inputs: int, outputs: int, groups: int = 1) -> Array:
    """Initial weights of a square convolution."""
    per_group = inputs // groups
    shape = (size, size, per_group, outputs)
    return _layers.normal(next(keys), shape, size * size * per_group) * math.sqrt(2.0)


def conv(x: Array, weight: Array, *, stride: int = 1, groups: int = 1) -> Array:
    """Convolution of `x` [b h w c]; the edges are padded so that a stride divides."""
    return jax.lax.conv_general_dilated(
        *(x, weight.astype(x.dtype), (stride, stride), "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def per_channel(vector: Array, x: Array) -> Array:
    """`vector` [c] with the axes of `x`, in its dtype."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + vector.shape)


def bias(x: Array, vector: Array) -> Array:
    """`x` plus `vector` [c] everywhere."""
    return x + per_channel(vector, x)


def scale_and_bias(name: str, channels: int) -> Weights:
    """Initial weights of a norm."""
    return {
        f"{name}_scale": jnp.ones((channels,), jnp.float32),
        f"{name}_bias": jnp.zeros((channels,), jnp.float32),
    }


def _affine(weights: Weights, name: str, x: Array) -> Array:
    scale, shift = weights[f"{name}_scale"], weights[f"{name}_bias"]
    return x * per_channel(scale, x) + per_channel(shift, x)


def batch_norm(weights: Weights, name: str, x: Array) -> tuple[Array, Weights]:
    """`x` [b h w c] normed over all but its channels, and the statistics of that."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    square = jnp.mean(wide * wide, axis=(0, 1, 2))
    variance = jnp.maximum(square - mean * mean, 0.0)
    centred = wide - per_channel(mean, wide)
    normed = centred * per_channel(jax.lax.rsqrt(variance + 1e-5), wide)
    found = {"mean": mean, "variance": variance}
    return _affine(weights, name, normed).astype(x.dtype), found


def group_norm(weights: Weights, name: str, x: Array, groups: int) -> Array:
    """`x` [b h w c] normed over each of `groups` groups of channels of an image."""
    b, h, w, c = x.shape
    wide = x.astype(jnp.float32).reshape(b, h * w, groups, c // groups)
    centred = wide - jnp.mean(wide, axis=(1, 3), keepdims=True)
    variance = jnp.mean(centred * centred, axis=(1, 3), keepdims=True)
    normed = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(b, h, w, c)
    return _affine(weights, name, normed).astype(x.dtype)


def max_pool(x: Array, size: int = 3, stride: int = 2) -> Array:
    """The largest of every `size` × `size` values of `x` [b h w c]."""
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")


def halved(x: Array) -> Array:
    """`x` [b h w c] at half the size: means of 2 × 2 values."""
    b, h, w, c = x.shape
    return jnp.mean(x.reshape(b, h // 2, 2, w // 2, 2, c), axis=(2, 4))


def doubled(x: Array) -> Array:
    """`x` [b h w c] at twice the size: every value four times."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def attending_weights(keys: Keys, channels: int) -> Weights:
    """Initial weights of `attending`."""
    shapes = {
        "qkv": (channels, 3 * channels),
        "output": (channels, channels),
        "gated": (channels, 8 * channels),
        "down": (4 * channels, channels),
    }
    weights = {n: _layers.normal(next(keys), s, s[0]) for n, s in shapes.items()}
    for name in ("attention_norm", "feed_forward_norm"):
        weights |= scale_and_bias(name, channels)
    return weights


def attending(weights: Weights, x: Array, heads: int, groups: int) -> Array:
    """`x` [b h w c] after each pixel attended to all of its image, and a feed-forward.

    A transformer's layer, but for its group norms.
    """
    tokens = group_norm(weights, "attention_norm", x, groups)
    tokens = tokens.reshape(x.shape[0], -1, x.shape[3])
    shape = (*tokens.shape[:2], heads, x.shape[3] // heads)
    products = jnp.split(tokens @ weights["qkv"].astype(x.dtype), 3, axis=-1)
    everything = jnp.ones((1, shape[1], shape[1]), jnp.bool_)
    mixed = _layers.attention(*(p.reshape(shape) for p in products), everything)
    x = x + mixed.reshape(x.shape) @ weights["output"].astype(x.dtype)
    inner = group_norm(weights, "feed_forward_norm", x, groups)
    up, gate = jnp.split(inner @ weights["gated"].astype(x.dtype), 2, axis=-1)
    return x + (up * jax.nn.gelu(gate)) @ weights["down"].astype(x.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """A classifier's loss: the mean over the image, a product, cross-entropy."""

    inputs: int
    classes: int

    def initial(self, keys: Keys) -> Weights:
        shape = self.inputs, self.classes
        return {
            "head": _layers.normal(next(keys), shape, self.inputs),
            "head_bias": jnp.zeros((self.classes,), jnp.float32),
        }

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        pooled = jnp.mean(carry["x"].astype(jnp.float32), axis=(1, 2))[:, None, :]
        logits = bias(pooled @ weights["head"], weights["head_bias"])
        losses = _layers.cross_entropy(logits, carry["labels"][:, None])
        return carry | {"loss": jnp.mean(losses)}


def classifier(
    blocks: Sequence[Block],
    batch: int,
    pixels: int,
    classes: int,
    compute: jax.typing.DTypeLike,
) -> Model:
    """A classifier of images with its optimizer, momentum, and random batches.

    The statistics of a batch are yet to be found.
    """

    def images_and_labels() -> Carry:
        key = jax.random.key(1)
        shape = (batch, pixels, pixels, 3)
        return {
            "x": jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0).astype(compute),
            "labels": _layers.tokens(key, (batch,), classes),
            "statistics": (),
        }

    optimizer = optax.sgd(0.1, momentum=0.9)
    return Model(blocks=blocks, optimizer=optimizer, batch=images_and_labels)
