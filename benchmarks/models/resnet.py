"""ResNet-152: fifty bottlenecks of four widths, batch norm with running statistics.

Batch norm normalizes by the batch's own mean and variance. The running ones are state
that the step returns and does not differentiate. The optimizer is momentum.

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)

Sizes: He et al., "Deep Residual Learning" (2016), table 1; the stride is in the 3 × 3
convolution.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.models import _conv
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Bottlenecks per stage, their width, and the batch."""

    stages: tuple[int, ...] = (3, 8, 36, 3)
    width: int = 64
    pixels: int = 224
    classes: int = 1000
    batch: int = 512
    compute: jax.typing.DTypeLike = jnp.bfloat16


SMALL = Config(
    stages=(1, 2), width=4, pixels=16, classes=10, batch=4, compute=jnp.float32
)
LARGE = Config()

WIDER = 4
"""Channels of a bottleneck's output, over those of its inner convolution."""


def convolved(
    weights: Weights, name: str, carry: Carry, x: Array, stride: int = 1
) -> tuple[Carry, Array]:
    """A convolution of `x` under batch norm; its statistics are in the carry."""
    x = _conv.conv(x, weights[name], stride=stride)
    x, found = _conv.batch_norm(weights, name, x)
    return carry | {"statistics": (*carry["statistics"], found)}, x


@dataclasses.dataclass(frozen=True, slots=True)
class Stem:
    """Seven by seven pixels, and a pool: a quarter of the height and width."""

    width: int

    def initial(self, keys: Keys) -> Weights:
        weights = {"stem": _conv.weight(keys, 7, 3, self.width)}
        return weights | _conv.scale_and_bias("stem", self.width)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        carry, x = convolved(weights, "stem", carry, carry["x"], stride=2)
        return carry | {"x": _conv.max_pool(jax.nn.relu(x))}


@dataclasses.dataclass(frozen=True, slots=True)
class Bottleneck:
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut."""

    inputs: int
    width: int
    stride: int

    @property
    def outputs(self) -> int:
        """Channels that it returns."""
        return WIDER * self.width

    def initial(self, keys: Keys) -> Weights:
        shapes = {
            "reduce": (1, self.inputs, self.width),
            "middle": (3, self.width, self.width),
            "expand": (1, self.width, self.outputs),
        }
        if self.inputs != self.outputs:
            shapes["shortcut"] = (1, self.inputs, self.outputs)
        weights = {n: _conv.weight(keys, *shape) for n, shape in shapes.items()}
        for name, (_, _, outputs) in shapes.items():
            weights |= _conv.scale_and_bias(name, outputs)
        return weights

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        before = carry["x"]
        carry, x = convolved(weights, "reduce", carry, before)
        x = jax.nn.relu(x)
        carry, x = convolved(weights, "middle", carry, x, self.stride)
        carry, x = convolved(weights, "expand", carry, jax.nn.relu(x))
        if "shortcut" in weights:
            carry, before = convolved(weights, "shortcut", carry, before, self.stride)
        return carry | {"x": jax.nn.relu(before + x)}


def blocks(config: Config) -> list[Block]:
    """The model: stem, bottlenecks, head."""
    found: list[Block] = [Stem(config.width)]
    channels = config.width
    for stage, count in enumerate(config.stages):
        for i in range(count):
            stride = 2 if stage and not i else 1
            block = Bottleneck(channels, config.width * 2**stage, stride)
            channels = block.outputs
            found.append(block)
    return [*found, _conv.Head(channels, config.classes)]


def model(config: Config) -> Model:
    """The model with its optimizer: momentum."""
    c = config
    return _conv.classifier(blocks(c), c.batch, c.pixels, c.classes, c.compute)
