"""Decoder-only transformer in Equinox: modules written for one sequence, `vmap`ped.

The idiomatic Equinox form: the model is a pytree with arrays and other things in it,
`eqx.partition` takes the arrays out for the optimizer and for the step's arguments, and
`eqx.filter_value_and_grad` differentiates the loss of the whole model. Layers are
called in a Python loop, so the traced step is unrolled.

>>> step, args = small()
>>> state, metrics = jax.jit(step)(*args)
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import stowax
from benchmarks.models import _layers, scan_transformer
from benchmarks.models.scan_transformer import MEDIUM, SMALL, Config, Step


class Linear(eqx.Module):
    """Product over the last axis, in the dtype of its input."""

    weight: Array

    def __init__(self, inputs: int, outputs: int, *, key: Array):
        self.weight = _layers.normal(key, (inputs, outputs), inputs)

    def __call__(self, x: Array) -> Array:
        return x @ self.weight.astype(x.dtype)


class Attention(eqx.Module):
    """Rotary self-attention of one sequence, with grouped key/value heads."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    head_width: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Array):
        keys = jax.random.split(key, 4)
        groups = config.key_value_heads * config.head_width
        self.query = Linear(config.width, config.width, key=keys[0])
        self.key = Linear(config.width, groups, key=keys[1])
        self.value = Linear(config.width, groups, key=keys[2])
        self.output = Linear(config.width, config.width, key=keys[3])
        self.head_width = config.head_width

    def __call__(self, x: Array, table: tuple[Array, Array], mask: Array) -> Array:
        query, key, value = (
            project(x).reshape(1, x.shape[0], -1, self.head_width)
            for project in (self.query, self.key, self.value)
        )
        query, key = _layers.rotate(query, table), _layers.rotate(key, table)
        return self.output(_layers.attention(query, key, value, mask).reshape(x.shape))


class FeedForward(eqx.Module):
    """Gated feed-forward; the activation is a leaf of the pytree, and no array."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable[[Array], Array]

    def __init__(self, config: Config, *, key: Array):
        keys = jax.random.split(key, 3)
        self.gate = Linear(config.width, config.feed_forward, key=keys[0])
        self.up = Linear(config.width, config.feed_forward, key=keys[1])
        self.down = Linear(config.feed_forward, config.width, key=keys[2])
        self.activation = jax.nn.silu

    def __call__(self, x: Array) -> Array:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(eqx.Module):
    """Pre-norm transformer block on one sequence [s d]."""

    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    feed_forward_norm: eqx.nn.RMSNorm
    feed_forward: FeedForward

    def __init__(self, config: Config, *, key: Array):
        first, second = jax.random.split(key)
        self.attention_norm = eqx.nn.RMSNorm(config.width, use_bias=False)
        self.attention = Attention(config, key=first)
        self.feed_forward_norm = eqx.nn.RMSNorm(config.width, use_bias=False)
        self.feed_forward = FeedForward(config, key=second)

    def __call__(self, x: Array, table: tuple[Array, Array], mask: Array) -> Array:
        x = x + self.attention(jax.vmap(self.attention_norm)(x), table, mask)
        return x + self.feed_forward(jax.vmap(self.feed_forward_norm)(x))


class Transformer(eqx.Module):
    """Logits [s v] of one sequence of token numbers [s]."""

    embedding: Array
    layers: list[Block]
    norm: eqx.nn.RMSNorm
    head: Linear
    head_width: int = eqx.field(static=True)
    compute: Any = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Array):
        first, second, *keys = jax.random.split(key, 2 + config.layers)
        self.embedding = _layers.normal(first, (config.vocabulary, config.width), 1)
        self.layers = [Block(config, key=k) for k in keys]
        self.norm = eqx.nn.RMSNorm(config.width, use_bias=False)
        self.head = Linear(config.width, config.vocabulary, key=second)
        self.head_width = config.head_width
        self.compute = config.compute

    def __call__(self, inputs: Array) -> Array:
        table = _layers.rotary_table(inputs.shape[0], self.head_width)
        mask = _layers.causal_mask(inputs.shape[0])
        x = self.embedding[inputs].astype(self.compute)
        for layer in self.layers:
            x = layer(x, table, mask)
        return self.head(jax.vmap(self.norm)(x))


@stowax.stow
def loss_fn(model: Transformer, batch: dict[str, Array]) -> Array:
    """Mean cross entropy of the next token over a batch of sequences."""
    with _layers.implicit_promotion():
        logits = jax.vmap(model)(batch["inputs"])
    return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))


def create(config: Config) -> Transformer:
    """The model from a fixed seed."""
    return Transformer(config, key=jax.random.key(0))


def make_step(config: Config, static: Transformer) -> Step:
    """The training step `(state, batch) -> (state, metrics)`.

    `static` is the half without arrays of `eqx.partition(model, eqx.is_inexact_array)`.
    """
    optimizer = scan_transformer.optimizer(config)

    def train_step(state: dict[str, Any], batch: dict[str, Array]):
        parameters = state["parameters"]
        model = eqx.combine(parameters, static)
        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, batch)
        parameters, moments = _layers.updated(
            optimizer, parameters, state["optimizer"], gradients
        )
        return {"parameters": parameters, "optimizer": moments}, {"loss": loss}

    return train_step


def initial_state(config: Config) -> dict[str, Any]:
    """Parameters and optimizer state from a fixed seed."""
    parameters = eqx.filter(create(config), eqx.is_inexact_array)
    moments = scan_transformer.optimizer(config).init(parameters)
    return {"parameters": parameters, "optimizer": moments}


def static_half(config: Config) -> Transformer:
    """The model without its arrays, made without computing them."""
    model = eqx.filter_eval_shape(lambda: create(config))
    return eqx.filter(
        model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True
    )


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays, for numerics on a CPU."""
    step = make_step(SMALL, static_half(SMALL))
    return step, (initial_state(SMALL), scan_transformer.random_batch(SMALL))


def sized(config: Config) -> tuple[Step, tuple[Any, ...]]:
    """Step and `jax.ShapeDtypeStruct`s of any size."""
    state = eqx.filter_eval_shape(lambda: initial_state(config))
    batch = jax.eval_shape(lambda: scan_transformer.random_batch(config))
    return make_step(config, static_half(config)), (state, batch)


def medium() -> tuple[Step, tuple[Any, ...]]:
    """The sizes of `scan_transformer.medium`."""
    return sized(MEDIUM)
