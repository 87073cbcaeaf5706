"""DenseNet-121: every layer reads what all layers before it in its stage have made.

Written plainly, each layer joins the growing list anew, so what is kept grows with the
square of the depth; recomputing the join and the norm after it makes it linear (Pleiss
et al., "Memory-Efficient Implementation of DenseNets", 2017).

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)

Sizes: Huang et al., "Densely Connected Convolutional Networks" (2017), table 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.models import _conv
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Layers per stage, channels that each adds, and the batch."""

    stages: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    pixels: int = 224
    classes: int = 1000
    batch: int = 512
    compute: jax.typing.DTypeLike = jnp.bfloat16


SMALL = Config(
    stages=(2, 2), growth=4, pixels=16, classes=10, batch=4, compute=jnp.float32
)
LARGE = Config()
DENSENET_201 = Config(stages=(6, 12, 48, 32), batch=256)
"""Takes four times as long to compile."""

NARROW = 4
"""Channels of a layer's inner convolution, over those that it adds."""


def activated(
    weights: Weights, name: str, carry: Carry, x: Array
) -> tuple[Carry, Array]:
    """`x` under batch norm, whose statistics are in the carry, and a ReLU."""
    x, found = _conv.batch_norm(weights, name, x)
    return carry | {"statistics": (*carry["statistics"], found)}, jax.nn.relu(x)


@dataclasses.dataclass(frozen=True, slots=True)
class Stem:
    """Seven by seven pixels, and a pool: a quarter of the height and width."""

    outputs: int

    def initial(self, keys: Keys) -> Weights:
        weights = {"stem": _conv.weight(keys, 7, 3, self.outputs)}
        return weights | _conv.scale_and_bias("stem", self.outputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = _conv.conv(carry["x"], weights["stem"], stride=2)
        carry, x = activated(weights, "stem", carry, x)
        return carry | {"x": (_conv.max_pool(x),)}


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
    """Joins what there is, and adds the outcome of 1 × 1 and 3 × 3 convolutions."""

    inputs: int
    growth: int

    def initial(self, keys: Keys) -> Weights:
        inner = NARROW * self.growth
        weights = {
            "reduce": _conv.weight(keys, 1, self.inputs, inner),
            "grow": _conv.weight(keys, 3, inner, self.growth),
        }
        weights |= _conv.scale_and_bias("reduce_norm", self.inputs)
        return weights | _conv.scale_and_bias("grow_norm", inner)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        joined = jnp.concatenate(carry["x"], axis=-1)
        carry, x = activated(weights, "reduce_norm", carry, joined)
        x = _conv.conv(x, weights["reduce"])
        carry, x = activated(weights, "grow_norm", carry, x)
        return carry | {"x": (*carry["x"], _conv.conv(x, weights["grow"]))}


@dataclasses.dataclass(frozen=True, slots=True)
class Transition:
    """Half the channels, height and width."""

    inputs: int

    def initial(self, keys: Keys) -> Weights:
        weights = {"halve": _conv.weight(keys, 1, self.inputs, self.inputs // 2)}
        return weights | _conv.scale_and_bias("halve_norm", self.inputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        joined = jnp.concatenate(carry["x"], axis=-1)
        carry, x = activated(weights, "halve_norm", carry, joined)
        return carry | {"x": (_conv.halved(_conv.conv(x, weights["halve"])),)}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The last norm, and the loss."""

    inputs: int
    classes: int

    def initial(self, keys: Keys) -> Weights:
        weights = _conv.Head(self.inputs, self.classes).initial(keys)
        return weights | _conv.scale_and_bias("norm", self.inputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        joined = jnp.concatenate(carry["x"], axis=-1)
        carry, x = activated(weights, "norm", carry, joined)
        return _conv.Head(self.inputs, self.classes)(weights, carry | {"x": x})


def blocks(config: Config) -> list[Block]:
    """The model: stem, dense layers with transitions between stages, head."""
    channels = 2 * config.growth
    found: list[Block] = [Stem(channels)]
    for stage, count in enumerate(config.stages):
        if stage:
            found.append(Transition(channels))
            channels //= 2
        for _ in range(count):
            found.append(Dense(channels, config.growth))
            channels += config.growth
    return [*found, Head(channels, config.classes)]


def model(config: Config) -> Model:
    """The model with its optimizer: momentum."""
    c = config
    return _conv.classifier(blocks(c), c.batch, c.pixels, c.classes, c.compute)
