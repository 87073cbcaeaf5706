"""A diffusion U-Net at the width of Stable Diffusion, on latents of 64 × 64.

Residual blocks under group norm, SiLU, a time embedding added in each, attention with a
feed-forward at two levels, and skips from every block of the way down to one of the way
up: what a block made lives until its partner has gone back. Unconditional: there is no
text to attend to.

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)

Sizes: Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models"
(2022), and its published configuration for 512 pixels (320 channels, times 1, 2, 4, 4).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import _conv, _layers
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Channels per level, which levels have attention, and the batch."""

    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    attended: tuple[int, ...] = (1, 2)
    per_level: int = 2
    heads: int = 8
    groups: int = 32
    pixels: int = 64
    latents: int = 4
    batch: int = 64
    compute: jax.typing.DTypeLike = jnp.bfloat16

    @property
    def embedded(self) -> int:
        """Width of the time embedding."""
        return 4 * self.channels[0]


_SMALLER = {"per_level": 1, "heads": 2, "groups": 4, "pixels": 8, "batch": 2}
SMALL = Config(channels=(8, 16), attended=(1,), compute=jnp.float32, **_SMALLER)
LARGE = Config()


@dataclasses.dataclass(frozen=True, slots=True)
class Noised:
    """The embedding of the time, and the latents with as much noise as it says."""

    config: Config

    def initial(self, keys: Keys) -> Weights:
        c = self.config
        first, wide = c.channels[0], c.embedded
        return {
            "time_in": _layers.normal(next(keys), (first, wide), first),
            "time_out": _layers.normal(next(keys), (wide, wide), wide),
            "input": _conv.weight(keys, 3, c.latents, first),
        }

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        latents, noise = carry["latents"], carry["noise"]
        half = self.config.channels[0] // 2
        frequency = jnp.exp(-math.log(1e4) * jnp.arange(half, dtype=jnp.float32) / half)
        angle = 1000.0 * carry["time"][:, None] * frequency[None, :]
        waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        inner = jax.nn.silu(waves @ weights["time_in"]) @ weights["time_out"]
        turn = 0.5 * math.pi * carry["time"].reshape(-1, 1, 1, 1)
        noised = jnp.cos(turn) * latents + jnp.sin(turn) * noise
        x = _conv.conv(noised.astype(self.config.compute), weights["input"])
        embedding = jax.nn.silu(inner).astype(x.dtype)
        return carry | {"x": x, "embedding": embedding, "skips": (x,)}


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """Two convolutions beside a shortcut, then attention, if there is any.

    On the way down its output becomes a skip; on the way up it takes the last one.
    """

    config: Config
    inputs: int
    outputs: int
    attended: bool
    way: str = "through"

    def initial(self, keys: Keys) -> Weights:
        c, wide = self.config.embedded, self.outputs
        weights = {
            "first": _conv.weight(keys, 3, self.inputs, wide),
            "time": _layers.normal(next(keys), (c, wide), c),
            "second": _conv.weight(keys, 3, wide, wide),
        }
        if self.inputs != wide:
            weights["shortcut"] = _conv.weight(keys, 1, self.inputs, wide)
        if self.attended:
            weights |= _conv.attending_weights(keys, wide)
        weights |= _conv.scale_and_bias("first_norm", self.inputs)
        return weights | _conv.scale_and_bias("second_norm", wide)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        norm = functools.partial(_conv.group_norm, weights, groups=self.config.groups)
        x, skips = carry["x"], carry["skips"]
        if self.way == "up":
            x, skips = jnp.concatenate([x, skips[-1]], axis=-1), skips[:-1]
        inner = _conv.conv(jax.nn.silu(norm("first_norm", x)), weights["first"])
        time = carry["embedding"] @ weights["time"].astype(x.dtype)
        inner = norm("second_norm", inner + time[:, None, None, :])
        inner = _conv.conv(jax.nn.silu(inner), weights["second"])
        x = inner + (_conv.conv(x, weights["shortcut"]) if "shortcut" in weights else x)
        if self.attended:
            x = _conv.attending(weights, x, self.config.heads, self.config.groups)
        return carry | {"x": x, "skips": (*skips, x) if self.way == "down" else skips}


@dataclasses.dataclass(frozen=True, slots=True)
class Resized:
    """Half the height and width, which becomes a skip, or twice."""

    channels: int
    way: str

    def initial(self, keys: Keys) -> Weights:
        return {"resize": _conv.weight(keys, 3, self.channels, self.channels)}

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        if self.way == "up":
            x = _conv.doubled(carry["x"])
            return carry | {"x": _conv.conv(x, weights["resize"])}
        x = _conv.conv(carry["x"], weights["resize"], stride=2)
        return carry | {"x": x, "skips": (*carry["skips"], x)}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The loss: how far the noise is from what is taken for it."""

    config: Config

    def initial(self, keys: Keys) -> Weights:
        first = self.config.channels[0]
        weights = {"output": _conv.weight(keys, 3, first, self.config.latents)}
        return weights | _conv.scale_and_bias("norm", first)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = _conv.group_norm(weights, "norm", carry["x"], self.config.groups)
        found = _conv.conv(jax.nn.silu(x), weights["output"]).astype(jnp.float32)
        return carry | {"loss": jnp.mean((found - carry["noise"]) ** 2)}


def blocks(config: Config) -> list[Block]:
    """The model: noise, the way down, the middle, the way up, head."""
    c = config
    found: list[Block] = [Noised(c)]
    x, skips, last = c.channels[0], [c.channels[0]], len(c.channels) - 1
    for level, wide in enumerate(c.channels):
        for _ in range(c.per_level):
            found.append(Residual(c, x, wide, level in c.attended, "down"))
            x = wide
            skips.append(x)
        if level < last:
            found.append(Resized(x, "down"))
            skips.append(x)
    found += [Residual(c, x, x, True), Residual(c, x, x, False)]
    for level, wide in reversed([*enumerate(c.channels)]):
        for _ in range(c.per_level + 1):
            inputs = x + skips.pop()
            found.append(Residual(c, inputs, wide, level in c.attended, "up"))
            x = wide
        if level:
            found.append(Resized(x, "up"))
    return [*found, Head(c)]


def random_batch(config: Config) -> Carry:
    """Latents of images, noise, and a time from 0 to 1 for each."""
    keys = iter(jax.random.split(jax.random.key(1), 3))
    shape = (config.batch, config.pixels, config.pixels, config.latents)
    return {
        "latents": jax.random.normal(next(keys), shape, jnp.float32),
        "noise": jax.random.normal(next(keys), shape, jnp.float32),
        "time": jax.random.uniform(next(keys), shape[:1], jnp.float32),
    }


def model(config: Config) -> Model:
    """The model with its optimizer: AdamW."""
    return Model(
        blocks=blocks(config),
        optimizer=optax.adamw(1e-4, weight_decay=0.01),
        batch=lambda: random_batch(config),
    )
