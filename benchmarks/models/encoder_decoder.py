"""Encoder and decoder in pure JAX: two different stacks in one step.

The encoder's block is self-attention and feed-forward; the decoder's has attention over
the encoder's output besides. The encoder's output enters every layer of the decoder, so
its gradient is summed over the layers; and all that the encoder kept lives until the
whole decoder has gone back. Padding is masked, and the loss has an auxiliary output.
`small` and `medium` scan both stacks, `unrolled_small` and `unrolled_medium` loop.

>>> step, args = small()
>>> state, metrics = jax.jit(step)(*args)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import stowax
from benchmarks.models import _layers

Step = Callable[..., Any]
Weights = dict[str, Array]

PADDING = 0
"""The token that fills a sequence up; it is not attended to and not predicted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of both stacks and of the batch; `compute` is the dtype of activations."""

    encoder_layers: int
    decoder_layers: int
    width: int
    heads: int
    feed_forward: int
    vocabulary: int
    source: int
    target: int
    batch: int
    compute: jax.typing.DTypeLike = jnp.bfloat16
    learning_rate: float = 1e-3
    unrolled: bool = False


SMALL = Config(
    encoder_layers=3,
    decoder_layers=4,
    width=32,
    heads=4,
    feed_forward=64,
    vocabulary=50,
    source=12,
    target=16,
    batch=4,
    compute=jnp.float32,
    learning_rate=1e-2,
)
MEDIUM = Config(
    encoder_layers=6,
    decoder_layers=6,
    width=1024,
    heads=8,
    feed_forward=2816,
    vocabulary=32_000,
    source=1024,
    target=512,
    batch=16,
)


def initial_parameters(config: Config, key: Array) -> dict[str, Any]:
    """Float32 parameters; those of each stack are stacked on a leading axis."""
    c = config
    keys = iter(jax.random.split(key, 20))
    head_width = c.width // c.heads

    def attention(layers: int) -> Weights:
        into, out = (c.width, c.heads, head_width), (c.heads, head_width, c.width)
        shapes = {"query": into, "key": into, "value": into, "output": out}
        return {
            name: _layers.normal(next(keys), (layers, *shape), c.width)
            for name, shape in shapes.items()
        } | {"norm": jnp.ones((layers, c.width), jnp.float32)}

    def feed_forward(layers: int) -> Weights:
        wide, back = (
            (layers, c.width, c.feed_forward),
            (layers, c.feed_forward, c.width),
        )
        return {
            "norm": jnp.ones((layers, c.width), jnp.float32),
            "gate": _layers.normal(next(keys), wide, c.width),
            "up": _layers.normal(next(keys), wide, c.width),
            "down": _layers.normal(next(keys), back, c.feed_forward),
        }

    parameters = {
        "embedding": _layers.normal(next(keys), (c.vocabulary, c.width), 1),
        "encoder": {
            "self": attention(c.encoder_layers),
            "feed_forward": feed_forward(c.encoder_layers),
        },
        "encoder_norm": jnp.ones((c.width,), jnp.float32),
        "decoder": {
            "self": attention(c.decoder_layers),
            "cross": attention(c.decoder_layers),
            "feed_forward": feed_forward(c.decoder_layers),
        },
        "decoder_norm": jnp.ones((c.width,), jnp.float32),
    }
    if c.unrolled:
        for name in ("encoder", "decoder"):
            parameters[name] = _unstacked(parameters[name])
    return parameters


def _unstacked(weights: dict[str, Weights]) -> list[dict[str, Weights]]:
    count = jax.tree.leaves(weights)[0].shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], weights) for i in range(count)]


def self_attention(
    weights: Weights, x: Array, table: tuple[Array, Array], mask: Array
) -> Array:
    """Residual rotary attention of `x` [b s d] to itself."""
    normed = _layers.rms_norm(x, weights["norm"])
    query = _layers.rotate(_layers.split_heads(normed, weights["query"]), table)
    key = _layers.rotate(_layers.split_heads(normed, weights["key"]), table)
    value = _layers.split_heads(normed, weights["value"])
    mixed = _layers.attention(query, key, value, mask)
    return x + _layers.join_heads(mixed, weights["output"])


def cross_attention(weights: Weights, x: Array, memory: Array, mask: Array) -> Array:
    """Residual attention of `x` [b s d] to the encoder's output `memory` [b k d]."""
    normed = _layers.rms_norm(x, weights["norm"])
    query = _layers.split_heads(normed, weights["query"])
    key = _layers.split_heads(memory, weights["key"])
    value = _layers.split_heads(memory, weights["value"])
    mixed = _layers.attention(query, key, value, mask)
    return x + _layers.join_heads(mixed, weights["output"])


def feed_forward(weights: Weights, x: Array) -> Array:
    """Residual gated feed-forward."""
    normed = _layers.rms_norm(x, weights["norm"])
    return x + _layers.swiglu(normed, weights["gate"], weights["up"], weights["down"])


def run_stack(
    body: Callable[[Any, Array], Array], weights: Any, x: Array, *, unrolled: bool
) -> Array:
    """`body(weights of a layer, x)` layer after layer, as a loop or as a scan."""
    if unrolled:
        for layer in weights:
            x = body(layer, x)
        return x
    x, _ = jax.lax.scan(lambda x, layer: (body(layer, x), None), x, weights)
    return x


def forward(config: Config, parameters: dict[str, Any], batch: Weights) -> Array:
    """Logits [b s v] of the target sequence."""
    source, target = batch["source"], batch["target"]
    head_width = config.width // config.heads
    embedding = parameters["embedding"]
    not_padding = (source != PADDING)[:, None, :]

    table = _layers.rotary_table(source.shape[1], head_width)

    def encoder_layer(weights: dict[str, Weights], x: Array) -> Array:
        x = self_attention(weights["self"], x, table, not_padding)
        return feed_forward(weights["feed_forward"], x)

    x = embedding[source].astype(config.compute)
    x = run_stack(encoder_layer, parameters["encoder"], x, unrolled=config.unrolled)
    memory = _layers.rms_norm(x, parameters["encoder_norm"])

    target_table = _layers.rotary_table(target.shape[1], head_width)
    causal = _layers.causal_mask(target.shape[1])

    def decoder_layer(weights: dict[str, Weights], x: Array) -> Array:
        x = self_attention(weights["self"], x, target_table, causal)
        x = cross_attention(weights["cross"], x, memory, not_padding)
        return feed_forward(weights["feed_forward"], x)

    x = embedding[target].astype(config.compute)
    x = run_stack(decoder_layer, parameters["decoder"], x, unrolled=config.unrolled)
    x = _layers.rms_norm(x, parameters["decoder_norm"])
    # The output head is the embedding, scaled so that the logits start near one.
    return jnp.einsum("bsd,vd->bsv", x, embedding.astype(x.dtype)) * config.width**-0.5


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW, moments in float32 like the parameters."""
    return optax.adamw(config.learning_rate, weight_decay=0.01)


def initial_state(config: Config) -> dict[str, Any]:
    """Parameters and optimizer state from a fixed seed."""
    parameters = initial_parameters(config, jax.random.key(0))
    return {
        "parameters": parameters,
        "optimizer": optimizer(config).init(parameters),
    }


def random_batch(config: Config) -> Weights:
    """Random tokens; the last quarter of every second sequence is padding."""
    source_key, target_key = jax.random.split(jax.random.key(1))

    def padded(key: Array, length: int) -> Array:
        shape = (config.batch, length)
        drawn = 1 + _layers.tokens(key, shape, config.vocabulary - 1)
        row = jnp.arange(config.batch, dtype=jnp.int32)[:, None]
        column = jnp.arange(length, dtype=jnp.int32)[None, :]
        filled = (row % 2 == 1) & (column >= length - length // 4)
        return jnp.where(filled, PADDING, drawn)

    target = padded(target_key, config.target + 1)
    return {
        "source": padded(source_key, config.source),
        "target": target[:, :-1],
        "labels": target[:, 1:],
    }


def make_step(config: Config) -> Step:
    """The training step: `(state, batch) -> (state, metrics)`."""

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: Weights):
        labels = batch["labels"]
        logits = forward(config, parameters, batch)
        counted = (labels != PADDING).astype(jnp.float32)
        total = jnp.sum(counted)
        loss = jnp.sum(_layers.cross_entropy(logits, labels) * counted) / total
        right = jnp.argmax(logits, axis=-1).astype(jnp.int32) == labels
        return loss, {"accuracy": jnp.sum(jnp.where(right, counted, 0.0)) / total}

    def train_step(state: dict[str, Any], batch: Weights):
        parameters = state["parameters"]
        (loss, metrics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            parameters, batch
        )
        parameters, moments = _layers.updated(
            optimizer(config), parameters, state["optimizer"], gradients
        )
        state = {"parameters": parameters, "optimizer": moments}
        return state, metrics | {"loss": loss}

    return train_step


def real(config: Config) -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays."""
    return make_step(config), (initial_state(config), random_batch(config))


def sized(config: Config) -> tuple[Step, tuple[Any, ...]]:
    """Step and `jax.ShapeDtypeStruct`s of any size."""
    state = jax.eval_shape(lambda: initial_state(config))
    batch = jax.eval_shape(lambda: random_batch(config))
    return make_step(config), (state, batch)


def small() -> tuple[Step, tuple[Any, ...]]:
    """Both stacks under scan, with real arrays for numerics on a CPU."""
    return real(SMALL)


def unrolled_small() -> tuple[Step, tuple[Any, ...]]:
    """`small` as two Python loops, with the same initial values."""
    return real(dataclasses.replace(SMALL, unrolled=True))


def medium() -> tuple[Step, tuple[Any, ...]]:
    """A size worth planning on one chip, both stacks under scan."""
    return sized(MEDIUM)


def unrolled_medium() -> tuple[Step, tuple[Any, ...]]:
    """`medium` as two Python loops."""
    return sized(dataclasses.replace(MEDIUM, unrolled=True))
