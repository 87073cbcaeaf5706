"""Decoder-only transformer in Flax NNX: modules in an `nnx.List`, called in a loop.

The idiomatic NNX form: `nnx.value_and_grad` of a loss that takes the model object, and
`nnx.Optimizer`. The step is the functional one: `nnx.split` has taken model and
optimizer apart, the static half (the graph definition) is closed over and the
`nnx.State` travels as an argument, so that the step can be given
`jax.ShapeDtypeStruct`s and be compiled for a chip that is not there.

>>> step, args = small()
>>> state, metrics = jax.jit(step)(*args)
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import stowax
from benchmarks.models import _layers, scan_transformer
from benchmarks.models.scan_transformer import MEDIUM, SMALL, Config, Step


class Attention(nnx.Module):
    """Rotary self-attention with grouped key/value heads."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        def into(heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                config.width,
                (heads, config.head_width),
                use_bias=False,
                dtype=config.compute,
                rngs=rngs,
            )

        self.query = into(config.heads)
        self.key = into(config.key_value_heads)
        self.value = into(config.key_value_heads)
        self.output = nnx.LinearGeneral(
            (config.heads, config.head_width),
            config.width,
            axis=(-2, -1),
            use_bias=False,
            dtype=config.compute,
            rngs=rngs,
        )

    def __call__(self, x: Array, table: tuple[Array, Array], mask: Array) -> Array:
        query = _layers.rotate(self.query(x), table)
        key = _layers.rotate(self.key(x), table)
        return self.output(_layers.attention(query, key, self.value(x), mask))


class FeedForward(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, use_bias=False, dtype=config.compute, rngs=rngs
            )

        self.gate = linear(config.width, config.feed_forward)
        self.up = linear(config.width, config.feed_forward)
        self.down = linear(config.feed_forward, config.width)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.compute, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(
            config.width, dtype=config.compute, rngs=rngs
        )
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x: Array, table: tuple[Array, Array], mask: Array) -> Array:
        x = x + self.attention(self.attention_norm(x), table, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nnx.Module):
    """Embedding, a list of blocks, norm and output head."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.head_width = config.head_width
        self.embedding = nnx.Embed(
            config.vocabulary, config.width, dtype=config.compute, rngs=rngs
        )
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.compute, rngs=rngs)
        self.head = nnx.Linear(
            config.width,
            config.vocabulary,
            use_bias=False,
            dtype=config.compute,
            rngs=rngs,
        )

    def __call__(self, inputs: Array) -> Array:
        table = _layers.rotary_table(inputs.shape[1], self.head_width)
        mask = _layers.causal_mask(inputs.shape[1])
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x, table, mask)
        return self.head(self.norm(x))


@stowax.stow
def loss_fn(model: Transformer, batch: dict[str, Array]) -> Array:
    """Mean cross entropy of the next token."""
    with _layers.implicit_promotion():
        logits = model(batch["inputs"])
    return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))


def create(config: Config) -> tuple[Transformer, nnx.Optimizer]:
    """Model and optimizer from a fixed seed."""
    model = Transformer(config, rngs=nnx.Rngs(0))
    transformation = optax.adamw(config.learning_rate, weight_decay=0.01)
    return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)


def make_step(definition: nnx.GraphDef) -> Step:
    """The training step `(state, batch) -> (state, metrics)`.

    `definition` and `state` are what `nnx.split((model, optimizer))` returns.
    """

    def train_step(state: nnx.State, batch: dict[str, Array]):
        model, optimizer = nnx.merge(definition, state)
        loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
        with _layers.implicit_promotion():
            optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), {"loss": loss}

    return train_step


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays, for numerics on a CPU."""
    definition, state = nnx.split(create(SMALL))
    return make_step(definition), (state, scan_transformer.random_batch(SMALL))


def sized(config: Config) -> tuple[Step, tuple[Any, ...]]:
    """Step and `jax.ShapeDtypeStruct`s of any size."""
    definition, state = nnx.split(nnx.eval_shape(lambda: create(config)))
    batch = jax.eval_shape(lambda: scan_transformer.random_batch(config))
    return make_step(definition), (state, batch)


def medium() -> tuple[Step, tuple[Any, ...]]:
    """The sizes of `scan_transformer.medium`."""
    return sized(MEDIUM)
