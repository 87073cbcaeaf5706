"""An object detector: ConvNeXt-T, a feature pyramid, and two heads on five scales.

Every place of every scale says which class is there (focal loss) and how far the four
edges of its box are (the logarithm of the overlap). The heads share their weights over
the scales. The backbone is a chain; the pyramid reads three places of it, so these live
until the heads have gone back.

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)

Sizes: Lin et al., "Feature Pyramid Networks" (2017) and "Focal Loss" (2017); Tian et
al., "FCOS" (2019), for boxes; the backbone's are in `_convnext`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.models import _conv, _layers
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights
from benchmarks.models._convnext import Mixed, Smaller


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Blocks and channels per stage, sizes of pyramid and heads, and the batch."""

    stages: tuple[int, ...] = (3, 3, 9, 3)
    channels: tuple[int, ...] = (96, 192, 384, 768)
    pyramid: int = 256
    tower: int = 4
    groups: int = 32
    pixels: int = 640
    classes: int = 80
    batch: int = 48
    compute: jax.typing.DTypeLike = jnp.bfloat16

    @property
    def sides(self) -> list[int]:
        """Places along an edge, per scale: the last three stages, and two more."""
        return [self.pixels // 2**i for i in (3, 4, 5, 6, 7)]


SMALL = Config(
    stages=(1, 1, 1, 1),
    channels=(4, 8, 8, 12),
    pyramid=8,
    tower=1,
    groups=2,
    pixels=128,
    classes=3,
    batch=1,
    compute=jnp.float32,
)
LARGE = Config()


@dataclasses.dataclass(frozen=True, slots=True)
class Pyramid:
    """All scales with as many channels: each hears of the one above it."""

    inputs: tuple[int, ...]
    outputs: int

    def initial(self, keys: Keys) -> Weights:
        weights, wide = {}, self.outputs
        for i, inputs in enumerate(self.inputs):
            weights[f"lateral{i}"] = _conv.weight(keys, 1, inputs, wide)
            weights[f"smooth{i}"] = _conv.weight(keys, 3, wide, wide)
        for name in ("above", "top"):
            weights[name] = _conv.weight(keys, 3, wide, wide)
        return weights

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        above, scales = None, []
        for i, x in reversed([*enumerate(carry["scales"])]):
            x = _conv.conv(x, weights[f"lateral{i}"])
            above = x if above is None else x + _conv.doubled(above)
            scales.insert(0, _conv.conv(above, weights[f"smooth{i}"]))
        scales.append(_conv.conv(scales[-1], weights["above"], stride=2))
        top = _conv.conv(jax.nn.relu(scales[-1]), weights["top"], stride=2)
        return carry | {"scales": (*scales, top)}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """Convolutions over every scale; of `classes`, or of boxes where there are none."""

    config: Config
    classes: int

    def initial(self, keys: Keys) -> Weights:
        c, weights = self.config, {}
        for i in range(c.tower):
            weights[f"tower{i}"] = _conv.weight(keys, 3, c.pyramid, c.pyramid)
            weights |= _conv.scale_and_bias(f"tower{i}", c.pyramid)
        outputs = self.classes or 4
        first = jnp.full((outputs,), -4.6 if self.classes else 0.0, jnp.float32)
        found = {"found": 0.1 * _conv.weight(keys, 3, c.pyramid, outputs)}
        return weights | found | {"found_bias": first}

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        found = []
        for x in carry["scales"]:
            for i in range(self.config.tower):
                x = _conv.conv(x, weights[f"tower{i}"])
                x = _conv.group_norm(weights, f"tower{i}", x, self.config.groups)
                x = jax.nn.relu(x)
            x = _conv.bias(_conv.conv(x, weights["found"]), weights["found_bias"])
            found.append(x.reshape(x.shape[0], -1, x.shape[3]).astype(jnp.float32))
        places, labels = jnp.concatenate(found, axis=1), carry["labels"]
        loss = box_loss(places, carry) if not self.classes else focal(places, labels)
        return carry | {"loss": carry.get("loss", jnp.float32(0.0)) + loss}


def focal(logits: Array, labels: Array) -> Array:
    """Focal loss per object of `logits` [b n classes]; label 0 is no object."""
    hot = jax.nn.one_hot(labels - 1, logits.shape[2], dtype=jnp.float32)
    right = jnp.where(hot > 0, logits, -logits)
    weight = jnp.where(hot > 0, 0.25, 0.75) * jax.nn.sigmoid(-right) ** 2
    return -jnp.sum(weight * jax.nn.log_sigmoid(right)) / objects(labels)


def objects(labels: Array) -> Array:
    """How many places are of an object, at least one."""
    return jnp.maximum(jnp.sum((labels > 0).astype(jnp.float32)), 1.0)


def box_loss(places: Array, carry: Carry) -> Array:
    """Minus the logarithm of the overlap of boxes, where there is an object."""
    found, right = jnp.exp(places), carry["boxes"]  # left, top, right, bottom
    both = jnp.minimum(found, right)

    def area(box: Array) -> Array:
        return (box[:, :, 0] + box[:, :, 2]) * (box[:, :, 1] + box[:, :, 3])

    shared = area(both)
    overlap = (shared + 1e-6) / (area(found) + area(right) - shared + 1e-6)
    there = (carry["labels"] > 0).astype(jnp.float32)
    return -jnp.sum(there * jnp.log(overlap)) / objects(carry["labels"])


def blocks(config: Config) -> list[Block]:
    """The model: backbone, pyramid, two heads."""
    found: list[Block] = []
    channels = 3
    for stage, (count, wide) in enumerate(
        zip(config.stages, config.channels, strict=True)
    ):
        found.append(Smaller(channels, wide, 2 if stage else 4))
        found += [Mixed(wide, stage > 0 and i == count - 1) for i in range(count)]
        channels = wide
    pyramid = Pyramid(config.channels[1:], config.pyramid)
    return [*found, pyramid, Head(config, config.classes), Head(config, 0)]


def random_batch(config: Config) -> Carry:
    """Images, and per place of all scales a class (mostly none) and a box."""
    c, keys = config, iter(jax.random.split(jax.random.key(1), 3))
    image, places = (c.batch, c.pixels, c.pixels, 3), sum(s * s for s in c.sides)
    drawn = _layers.tokens(next(keys), (c.batch, places), 20 * c.classes)
    boxes = jax.random.uniform(next(keys), (c.batch, places, 4), jnp.float32, 0.5, 2.0)
    return {
        "x": jax.random.uniform(next(keys), image, jnp.float32).astype(c.compute),
        "labels": jnp.where(drawn <= c.classes, drawn, 0),
        "boxes": boxes,
        "scales": (),
    }


def model(config: Config) -> Model:
    """The model with its optimizer: AdamW."""
    return Model(
        blocks=blocks(config),
        optimizer=optax.adamw(1e-4, weight_decay=0.05),
        batch=lambda: random_batch(config),
    )
