"""A shallow transformer with a vocabulary of 262,144, layers in a Python loop.

What Gemma's vocabulary does to a small model: the logits take more than all layers.
They may be soft-capped, as in Gemma 2. Embedding and head are not tied.

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)

The vocabulary is that of the Gemma 3 report (2025), table 1; the cap of the logits, 30,
that of the Gemma 2 report (2024), section 2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import _layers
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of the batch; logits have no cap if it is `None`."""

    layers: int = 4
    width: int = 1152
    heads: int = 8
    feed_forward: int = 6912
    vocabulary: int = 262_144
    sequence: int = 1024
    batch: int = 12
    cap: float | None = 30.0
    compute: jax.typing.DTypeLike = jnp.bfloat16


SMALL = Config(
    layers=3,
    width=16,
    heads=2,
    feed_forward=32,
    vocabulary=100,
    sequence=12,
    batch=2,
    compute=jnp.float32,
)
LARGE = Config()


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """Token numbers as vectors."""

    config: Config

    def initial(self, keys: Keys) -> Weights:
        shape = (self.config.vocabulary, self.config.width)
        return {"embedding": _layers.normal(next(keys), shape, 1)}

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = weights["embedding"][carry["inputs"]].astype(self.config.compute)
        return carry | {"x": x}


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Causal attention and a gated feed-forward, each after a norm."""

    config: Config

    def initial(self, keys: Keys) -> Weights:
        c = self.config
        heads = (c.heads, c.width // c.heads)
        shapes = {
            "query": (c.width, *heads),
            "key": (c.width, *heads),
            "value": (c.width, *heads),
            "output": (*heads, c.width),
            "gate": (c.width, c.feed_forward),
            "up": (c.width, c.feed_forward),
            "down": (c.feed_forward, c.width),
        }
        inputs = {"down": c.feed_forward}
        weights = {
            name: _layers.normal(next(keys), shape, inputs.get(name, c.width))
            for name, shape in shapes.items()
        }
        ones = jnp.ones((c.width,), jnp.float32)
        return weights | {"attention_norm": ones, "feed_forward_norm": ones}

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = carry["x"]
        table = _layers.rotary_table(x.shape[1], weights["query"].shape[2])
        inner = _layers.rms_norm(x, weights["attention_norm"])
        query, key = (
            _layers.rotate(_layers.split_heads(inner, weights[name]), table)
            for name in ("query", "key")
        )
        value = _layers.split_heads(inner, weights["value"])
        mask = _layers.causal_mask(x.shape[1])
        mixed = _layers.attention(query, key, value, mask)
        x = x + _layers.join_heads(mixed, weights["output"])
        inner = _layers.rms_norm(x, weights["feed_forward_norm"])
        products = (weights[name] for name in ("gate", "up", "down"))
        return carry | {"x": x + _layers.swiglu(inner, *products)}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The loss: every token's logits, capped, and their cross-entropy."""

    config: Config

    def initial(self, keys: Keys) -> Weights:
        c = self.config
        return {
            "norm": jnp.ones((c.width,), jnp.float32),
            "head": _layers.normal(next(keys), (c.width, c.vocabulary), c.width),
        }

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = _layers.rms_norm(carry["x"], weights["norm"])
        logits = x @ weights["head"].astype(x.dtype)
        if self.config.cap is not None:
            logits = _layers.soft_cap(logits, self.config.cap)
        losses = _layers.cross_entropy(logits, carry["labels"])
        return carry | {"loss": jnp.mean(losses)}


def blocks(config: Config) -> list[Block]:
    """The model: embedding, layers, head."""
    layers = [Layer(config)] * config.layers
    return [Embedding(config), *layers, Head(config)]


def random_batch(config: Config) -> Carry:
    """Random tokens, and each one's next."""
    shape = (config.batch, config.sequence + 1)
    drawn = _layers.tokens(jax.random.key(1), shape, config.vocabulary)
    return {"inputs": drawn[:, :-1], "labels": drawn[:, 1:]}


def model(config: Config) -> Model:
    """The model with its optimizer: AdamW."""
    return Model(
        blocks=blocks(config),
        optimizer=optax.adamw(1e-3, weight_decay=0.01),
        batch=lambda: random_batch(config),
    )
