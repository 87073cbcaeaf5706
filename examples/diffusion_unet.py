"""A diffusion U-Net in Flax NNX with averaged weights, plain and under a plan.

    python examples/diffusion_unet.py               # tiny, on this machine
    stowax plan examples/diffusion_unet.py:real --target h200 --budget 60GiB

Nothing repeats: every level has its own width, and what the way down makes is read by
the way up. A plan decides on what each block keeps and what is computed again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from integrations.common import compare, options

import stowax


@dataclasses.dataclass(frozen=True)
class Config:
    """Channels per level (the last two have attention), and sizes of the batch."""

    channels: tuple[int, ...] = (16, 32)
    blocks: int = 1
    heads: int = 2
    pixels: int = 16
    batch: int = 4
    dtype: Any = jnp.float32


TINY = Config()
REAL = Config((320, 640, 1280, 1280), 2, 8, 64, 256, jnp.bfloat16)
LATENTS, GROUPS = 4, 8


class Block(nnx.Module):
    """Two convolutions with a residual, the time added in between; then attention."""

    def __init__(self, inputs: int, outputs: int, attends: bool, c: Config, rngs: Any):
        kernel = {"kernel_size": (3, 3), "dtype": c.dtype, "rngs": rngs}
        self.norm1 = nnx.GroupNorm(inputs, GROUPS, dtype=c.dtype, rngs=rngs)
        self.conv1 = nnx.Conv(inputs, outputs, **kernel)
        self.time = nnx.Linear(4 * c.channels[0], outputs, dtype=c.dtype, rngs=rngs)
        self.norm2 = nnx.GroupNorm(outputs, GROUPS, dtype=c.dtype, rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, **kernel)
        self.skip = nnx.Linear(inputs, outputs, dtype=c.dtype, rngs=rngs)
        self.norm3 = nnx.GroupNorm(outputs, GROUPS, dtype=c.dtype, rngs=rngs)
        self.attention = (
            nnx.MultiHeadAttention(
                c.heads, outputs, dtype=c.dtype, decode=False, rngs=rngs
            )
            if attends
            else None
        )

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Images of (batch, rows, columns, channels) to others of as many rows."""
        y = self.conv1(nnx.silu(self.norm1(x)))
        y = y + self.time(time)[:, None, None]
        x = self.skip(x) + self.conv2(nnx.silu(self.norm2(y)))
        if self.attention is None:
            return x
        flat = self.norm3(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + self.attention(flat).reshape(x.shape)


class UNet(nnx.Module):
    """The noise in noisy latents, given how noisy they are."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.config, last = c, len(c.channels) - 1
        wide = 4 * c.channels[0]
        self.time1 = nnx.Linear(c.channels[0], wide, dtype=c.dtype, rngs=rngs)
        self.time2 = nnx.Linear(wide, wide, dtype=c.dtype, rngs=rngs)
        self.first = nnx.Conv(LATENTS, c.channels[0], (3, 3), dtype=c.dtype, rngs=rngs)
        down, up, skips, x = [], [], [c.channels[0]], c.channels[0]
        for level, width in enumerate(c.channels):
            for _ in range(c.blocks):
                down.append(Block(x, width, level >= last - 1, c, rngs))
                skips.append(x := width)
        self.middle = Block(x, x, True, c, rngs)
        for level, width in reversed([*enumerate(c.channels)]):
            for _ in range(c.blocks):
                up.append(Block(x + skips.pop(), width, level >= last - 1, c, rngs))
                x = width
        self.down, self.up = nnx.List(down), nnx.List(up)
        self.norm = nnx.GroupNorm(x, GROUPS, dtype=c.dtype, rngs=rngs)
        self.last = nnx.Conv(x, LATENTS, (3, 3), dtype=c.dtype, rngs=rngs)

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Latents of (batch, rows, columns, 4) and a time from 0 to 1 for each."""
        c = self.config
        rates = 1000.0 * 1e4 ** -jnp.linspace(0, 1, c.channels[0] // 2)
        angles = time[:, None] * rates
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        t = nnx.silu(self.time2(nnx.silu(self.time1(waves.astype(c.dtype)))))
        x = self.first(x.astype(c.dtype))
        skips = []
        for number, block in enumerate(self.down):
            if number and number % c.blocks == 0:
                x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
            skips.append(x := block(x, t))
        x = self.middle(x, t)
        for number, block in enumerate(self.up):
            if number and number % c.blocks == 0:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = block(jnp.concatenate([x, skips.pop()], axis=-1), t)
        return self.last(nnx.silu(self.norm(x)))


def loss_fn(model: UNet, latents: jax.Array, key: jax.Array) -> jax.Array:
    """Mean square error of the noise."""
    one, other = jax.random.split(key)
    time = jax.random.uniform(one, latents.shape[:1])
    noise = jax.random.normal(other, latents.shape)
    turn = 0.5 * jnp.pi * time[:, None, None, None]
    noisy = jnp.cos(turn) * latents + jnp.sin(turn) * noise
    return jnp.mean((model(noisy, time).astype(jnp.float32) - noise) ** 2)


def train_step(
    model: UNet,
    optimizer: nnx.Optimizer,
    average: Any,
    latents: jax.Array,
    key: jax.Array,
) -> tuple[Any, jax.Array]:
    """One step of AdamW, in place, and the weights' running average."""
    loss, gradients = nnx.value_and_grad(loss_fn)(model, latents, key)
    optimizer.update(model, gradients)
    now = nnx.state(model, nnx.Param)
    average = jax.tree.map(lambda a, w: 0.999 * a + 0.001 * w, average, now)
    return average, loss


def made(config: Config) -> tuple[UNet, nnx.Optimizer, Any]:
    """A model, its optimizer, and the average of its weights."""
    model = UNet(config, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    return model, optimizer, jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))


def real() -> tuple[Any, Any]:
    """The channels of Stable Diffusion on 256 latents of 64 × 64, for `stowax plan`."""
    shape = (REAL.batch, REAL.pixels, REAL.pixels, LATENTS)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = nnx.eval_shape(lambda: made(REAL))
    step = nnx.jit(train_step, donate_argnums=(0, 1, 2))
    return step, (*state, jax.ShapeDtypeStruct(shape, jnp.float32), key)


def main() -> None:
    """Trains the tiny model twice."""
    asked = options()
    planned = stowax.jit(
        train_step, budget=asked.budget, target=asked.target, donate_argnums=(0, 1, 2)
    )

    def train(step: Any) -> list[float]:
        model, optimizer, average = made(TINY)
        draw = np.random.default_rng(0)
        shape = (TINY.batch, TINY.pixels, TINY.pixels, LATENTS)
        losses = []
        for key in jax.random.split(jax.random.key(1), asked.steps):
            latents = jnp.asarray(draw.standard_normal(shape, np.float32))
            average, loss = step(model, optimizer, average, latents, key)
            losses.append(float(loss))
        return losses

    plain, other = train(nnx.jit(train_step)), train(planned)
    compare([planned.plan], plain, other)


if __name__ == "__main__":
    main()
