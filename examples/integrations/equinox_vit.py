"""An Equinox vision transformer, trained plain and under a plan.

The one line is marked. Some leaves of the model are functions, its stem has state
(batch normalization), and dropout draws random numbers. Run it with

    python examples/integrations/equinox_vit.py --budget 60% --target h200
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import compare, options

import stowax

LAYERS, WIDTH, HEADS, SIZE, PATCH, CLASSES, BATCH = 4, 64, 4, 32, 4, 3, 16


class Stem(eqx.Module):
    """Patches, normalized over the batch."""

    patches: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, key: jax.Array):
        self.patches = eqx.nn.Conv2d(3, WIDTH, PATCH, stride=PATCH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch")

    def __call__(
        self, x: jax.Array, state: eqx.nn.State
    ) -> tuple[jax.Array, eqx.nn.State]:
        """One row a patch, and the new state."""
        x, state = self.norm(self.patches(x), state)
        return x.reshape(WIDTH, -1).T, state


class Block(eqx.Module):
    """Attention and a wide layer, each with a residual."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)
        self.activation = jax.nn.gelu

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """One layer's output."""
        keys = jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        x = x + self.dropout(self.attention(y, y, y), key=keys[0])
        y = self.activation(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + self.dropout(jax.vmap(self.down)(y), key=keys[1])


class VisionTransformer(eqx.Module):
    """Logits of an image's classes."""

    stem: Stem
    places: jax.Array
    blocks: list[Block]
    head: eqx.nn.Sequential
    classes: int = eqx.field(static=True)

    def __init__(self, classes: int, key: jax.Array):
        stem, places, head, *blocks = jax.random.split(key, 3 + LAYERS)
        self.stem = Stem(stem)
        self.places = 0.02 * jax.random.normal(places, ((SIZE // PATCH) ** 2, WIDTH))
        self.blocks = [Block(block) for block in blocks]
        linear = eqx.nn.Linear(WIDTH, classes, key=head)
        self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(WIDTH), linear])
        self.classes = classes

    def __call__(
        self, x: jax.Array, state: eqx.nn.State, key: jax.Array
    ) -> tuple[jax.Array, eqx.nn.State]:
        """Logits, and the new state."""
        x, state = self.stem(x, state)
        x = x + self.places
        for block, own in zip(self.blocks, jax.random.split(key, LAYERS), strict=True):
            x = block(x, own)
        return self.head(jnp.mean(x, 0)), state


optimizer = optax.adamw(1e-3)


def loss_fn(
    model: VisionTransformer, state: eqx.nn.State, batch: Any, key: jax.Array
) -> tuple[jax.Array, eqx.nn.State]:
    """Cross entropy, and the new state."""
    images, labels = batch
    each = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    logits, state = each(images, state, jax.random.split(key, len(images)))
    targets = jax.nn.one_hot(labels, model.classes)
    return jnp.mean(optax.softmax_cross_entropy(logits, targets)), state


def make_step(
    model: VisionTransformer, state: eqx.nn.State, opt: Any, batch: Any, key: jax.Array
) -> tuple[VisionTransformer, eqx.nn.State, Any, jax.Array]:
    """One step of AdamW."""
    differentiate = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, state), gradients = differentiate(model, state, batch, key)
    own = eqx.filter(model, eqx.is_inexact_array)
    updates, opt = optimizer.update(gradients, opt, own)
    return eqx.apply_updates(model, updates), state, opt, loss


def train(step: Callable[..., Any], steps: int) -> list[float]:
    """The losses of a run on noise of which one colour is brighter: the class."""
    draw = np.random.default_rng(0)
    make = eqx.nn.make_with_state(VisionTransformer)
    model, state = make(CLASSES, jax.random.key(0))
    opt = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for number in range(steps):
        images = draw.normal(size=(BATCH, 3, SIZE, SIZE)).astype(np.float32)
        labels = draw.integers(CLASSES, size=BATCH)
        images[np.arange(BATCH), labels] += 1.0
        batch = jnp.asarray(images), jnp.asarray(labels)
        key = jax.random.fold_in(jax.random.key(1), number)
        model, state, opt, loss = step(model, state, opt, batch, key)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Train twice and compare."""
    asked = options()
    plain = train(eqx.filter_jit(make_step), asked.steps)

    step = stowax.jit(  # the one line: was eqx.filter_jit
        make_step, budget=asked.budget, target=asked.target
    )
    planned = train(step, asked.steps)
    compare([step.plan], plain, planned)


if __name__ == "__main__":
    main()
