"""EfficientNet-B4: inverted bottlenecks with depthwise convolutions and gates.

The wide inner values of a block take far more memory than its few products take time:
what is cheap to recompute is most of what is kept. Without drop path.

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)

Sizes: Tan and Le, "EfficientNet" (2019), table 1, scaled 1.4 in width and 1.8 in depth,
380 pixels: B4 of its published code.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.models import _conv, _layers
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights

STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
"""Of B0, per stage: wider inside by, channels, blocks, stride, size of convolutions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How much wider and deeper than B0, and the batch."""

    wider: float = 1.4
    deeper: float = 1.8
    stages: tuple[tuple[int, ...], ...] = STAGES
    stem: int = 32
    last: int = 1280
    pixels: int = 380
    classes: int = 1000
    batch: int = 128
    compute: jax.typing.DTypeLike = jnp.bfloat16

    def channels(self, count: int) -> int:
        """Channels of B0, wider: a multiple of eight, at most a tenth less."""
        wide = self.wider * count
        near = max(8, int(wide + 4) // 8 * 8)
        return near + 8 if near < 0.9 * wide else near


SMALL = Config(
    wider=0.25,
    deeper=1.0,
    stages=((1, 16, 1, 1, 3), (2, 32, 2, 2, 5)),
    last=16,
    pixels=16,
    classes=10,
    batch=4,
    compute=jnp.float32,
)
LARGE = Config()


def normed(weights: Weights, name: str, carry: Carry, x: Array) -> tuple[Carry, Array]:
    """`x` under batch norm, whose statistics are in the carry."""
    x, found = _conv.batch_norm(weights, name, x)
    return carry | {"statistics": (*carry["statistics"], found)}, x


@dataclasses.dataclass(frozen=True, slots=True)
class Convolved:
    """A convolution, batch norm and SiLU: how the model begins, and ends."""

    size: int
    inputs: int
    outputs: int
    stride: int

    def initial(self, keys: Keys) -> Weights:
        weights = {"conv": _conv.weight(keys, self.size, self.inputs, self.outputs)}
        return weights | _conv.scale_and_bias("norm", self.outputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = _conv.conv(carry["x"], weights["conv"], stride=self.stride)
        carry, x = normed(weights, "norm", carry, x)
        return carry | {"x": jax.nn.silu(x)}


@dataclasses.dataclass(frozen=True, slots=True)
class Inverted:
    """Wide inside: expand, a depthwise convolution, a gate per channel, project."""

    inputs: int
    outputs: int
    wider: int
    size: int
    stride: int

    def initial(self, keys: Keys) -> Weights:
        inner, few = self.wider * self.inputs, max(1, self.inputs // 4)
        weights = {
            "depthwise": _conv.weight(keys, self.size, inner, inner, groups=inner),
            "squeeze": _layers.normal(next(keys), (inner, few), inner),
            "squeeze_bias": jnp.zeros((few,), jnp.float32),
            "excite": _layers.normal(next(keys), (few, inner), few),
            "excite_bias": jnp.zeros((inner,), jnp.float32),
            "project": _conv.weight(keys, 1, inner, self.outputs),
        }
        if self.wider > 1:
            weights["expand"] = _conv.weight(keys, 1, self.inputs, inner)
            weights |= _conv.scale_and_bias("expand_norm", inner)
        weights |= _conv.scale_and_bias("depthwise_norm", inner)
        return weights | _conv.scale_and_bias("project_norm", self.outputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        before = x = carry["x"]
        if self.wider > 1:
            x = _conv.conv(x, weights["expand"])
            carry, x = normed(weights, "expand_norm", carry, x)
            x = jax.nn.silu(x)
        depthwise, channels = weights["depthwise"], x.shape[3]
        x = _conv.conv(x, depthwise, stride=self.stride, groups=channels)
        carry, x = normed(weights, "depthwise_norm", carry, x)
        x = jax.nn.silu(x)
        x = x * gate(weights, x).astype(x.dtype)
        carry, x = normed(
            *(weights, "project_norm", carry, _conv.conv(x, weights["project"]))
        )
        same = self.stride == 1 and self.inputs == self.outputs
        return carry | {"x": before + x if same else x}


def gate(weights: Weights, x: Array) -> Array:
    """Between 0 and 1 per channel of an image `x` [b h w c]: float32 [b 1 1 c]."""
    pooled = jnp.mean(x.astype(jnp.float32), axis=(1, 2), keepdims=True)
    few = _conv.bias(pooled @ weights["squeeze"], weights["squeeze_bias"])
    many = _conv.bias(jax.nn.silu(few) @ weights["excite"], weights["excite_bias"])
    return jax.nn.sigmoid(many)


def blocks(config: Config) -> list[Block]:
    """The model: stem, inverted bottlenecks, a last convolution, head."""
    c = config
    channels, last = c.channels(c.stem), c.channels(c.last)
    found: list[Block] = [Convolved(3, 3, channels, 2)]
    for wider, wide, count, stride, size in c.stages:
        outputs = c.channels(wide)
        for i in range(math.ceil(c.deeper * count)):
            step = 1 if i else stride
            found.append(Inverted(channels, outputs, wider, size, step))
            channels = outputs
    return [*found, Convolved(1, channels, last, 1), _conv.Head(last, c.classes)]


def model(config: Config) -> Model:
    """The model with its optimizer: momentum."""
    c = config
    return _conv.classifier(blocks(c), c.batch, c.pixels, c.classes, c.compute)
