"""Blocks of ConvNeXt: Liu et al., "A ConvNet for the 2020s" (2022).

The last block of a stage may be read by others: its output is added to the "scales".
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.models import _conv, _layers
from benchmarks.models._blocks import Carry, Keys, Weights


def layer_norm(weights: Weights, name: str, x: Array) -> Array:
    """`x` [b h w c] normed over its channels."""
    places = x.reshape(x.shape[0], -1, x.shape[3])
    scale, bias = weights[f"{name}_scale"], weights[f"{name}_bias"]
    return _layers.layer_norm(places, scale, bias).reshape(x.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Smaller:
    """A norm and a convolution as large as its stride; the image has no norm."""

    inputs: int
    outputs: int
    stride: int

    def initial(self, keys: Keys) -> Weights:
        weights = {
            "smaller": _conv.weight(keys, self.stride, self.inputs, self.outputs)
        }
        return weights | _conv.scale_and_bias("norm", self.inputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = carry["x"] if self.inputs == 3 else layer_norm(weights, "norm", carry["x"])
        return carry | {"x": _conv.conv(x, weights["smaller"], stride=self.stride)}


@dataclasses.dataclass(frozen=True, slots=True)
class Mixed:
    """Depthwise 7 × 7, a norm, and a feed-forward per place; a stage's last is read."""

    channels: int
    is_read: bool

    def initial(self, keys: Keys) -> Weights:
        c = self.channels
        weights = {
            "depthwise": _conv.weight(keys, 7, c, c, groups=c),
            "up": _layers.normal(next(keys), (c, 4 * c), c),
            "down": _layers.normal(next(keys), (4 * c, c), 4 * c),
            "layer_scale": jnp.full((c,), 0.1, jnp.float32),
        }
        return weights | _conv.scale_and_bias("norm", c)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = carry["x"]
        inner = _conv.conv(x, weights["depthwise"], groups=self.channels)
        inner = layer_norm(weights, "norm", inner) @ weights["up"].astype(x.dtype)
        inner = jax.nn.gelu(inner) @ weights["down"].astype(x.dtype)
        x = x + inner * _conv.per_channel(weights["layer_scale"], x)
        scales = (*carry["scales"], x) if self.is_read else carry["scales"]
        return carry | {"x": x, "scales": scales}
