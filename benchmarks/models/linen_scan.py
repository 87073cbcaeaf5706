"""Decoder-only transformer in Flax Linen, its blocks under `nn.scan`.

`nn.scan` lifts `jax.lax.scan` over a module: the parameters of the block get a leading
layer axis. The state is Flax's own `TrainState`, a pytree whose functions are static.

>>> step, args = small()
>>> state, metrics = jax.jit(step)(*args)
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax import Array

import stowax
from benchmarks.models import _layers, scan_transformer
from benchmarks.models.scan_transformer import MEDIUM, SMALL, Config, Step


class Block(nn.Module):
    """Pre-norm transformer block as `nn.scan` wants it: carry in, carry out."""

    config: Config

    @nn.compact
    def __call__(self, x: Array, table: tuple[Array, Array], mask: Array):
        c = self.config

        def into(heads: int, name: str) -> nn.DenseGeneral:
            return nn.DenseGeneral(
                (heads, c.head_width), use_bias=False, dtype=c.compute, name=name
            )

        def dense(outputs: int, name: str) -> nn.Dense:
            return nn.Dense(outputs, use_bias=False, dtype=c.compute, name=name)

        normed = nn.RMSNorm(dtype=c.compute, name="attention_norm")(x)
        query = _layers.rotate(into(c.heads, "query")(normed), table)
        key = _layers.rotate(into(c.key_value_heads, "key")(normed), table)
        value = into(c.key_value_heads, "value")(normed)
        mixed = _layers.attention(query, key, value, mask)
        x = x + nn.DenseGeneral(
            c.width, axis=(-2, -1), use_bias=False, dtype=c.compute, name="output"
        )(mixed)
        normed = nn.RMSNorm(dtype=c.compute, name="feed_forward_norm")(x)
        gated = nn.silu(dense(c.feed_forward, "gate")(normed))
        gated = gated * dense(c.feed_forward, "up")(normed)
        return x + dense(c.width, "down")(gated), None


class Transformer(nn.Module):
    """Embedding, scanned blocks, norm and output head."""

    config: Config

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        c = self.config
        table = _layers.rotary_table(inputs.shape[1], c.head_width)
        mask = _layers.causal_mask(inputs.shape[1])
        x = nn.Embed(c.vocabulary, c.width, dtype=c.compute, name="embedding")(inputs)
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=c.layers,
        )
        x, _ = blocks(c, name="layers")(x, table, mask)
        x = nn.RMSNorm(dtype=c.compute, name="norm")(x)
        return nn.Dense(c.vocabulary, use_bias=False, dtype=c.compute, name="head")(x)


def make_step(config: Config) -> Step:
    """The training step: `(state, batch) -> (state, metrics)`."""
    model = Transformer(config)

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        with _layers.implicit_promotion():
            logits = model.apply({"params": parameters}, batch["inputs"])
        return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))

    def train_step(state: TrainState, batch: dict[str, Array]):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, batch)
        with _layers.implicit_promotion():
            return state.apply_gradients(grads=gradients), {"loss": loss}

    return train_step


def initial_state(config: Config) -> TrainState:
    """Parameters and optimizer state from a fixed seed."""
    model = Transformer(config)
    inputs = jnp.zeros((1, config.sequence), jnp.int32)
    with _layers.implicit_promotion():
        variables = model.init(jax.random.key(0), inputs)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.adamw(config.learning_rate, weight_decay=0.01),
    ).replace(step=jnp.zeros((), jnp.int32))


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays, for numerics on a CPU."""
    batch = scan_transformer.random_batch(SMALL)
    return make_step(SMALL), (initial_state(SMALL), batch)


def sized(config: Config) -> tuple[Step, tuple[Any, ...]]:
    """Step and `jax.ShapeDtypeStruct`s of any size."""
    state = jax.eval_shape(lambda: initial_state(config))
    batch = jax.eval_shape(lambda: scan_transformer.random_batch(config))
    return make_step(config), (state, batch)


def medium() -> tuple[Step, tuple[Any, ...]]:
    """The sizes of `scan_transformer.medium`."""
    return sized(MEDIUM)
