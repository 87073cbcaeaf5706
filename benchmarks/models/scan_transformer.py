"""Decoder-only transformer in pure JAX, its layers under `jax.lax.scan`.

The usual shape of a large language model: one set of weights per kind with the layer
number as leading axis, pre-norm blocks (RMSNorm, rotary attention with grouped
key/value heads, SwiGLU), untied output head, AdamW with float32 moments.
`loop_transformer` is the same mathematics as a Python loop, `llama` the same model
sharded over a mesh.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of its batch; `compute` is the dtype of activations."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    batch: int
    compute: jax.typing.DTypeLike = jnp.bfloat16
    learning_rate: float = 1e-3

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


SMALL = Config(
    layers=4,
    width=32,
    heads=4,
    key_value_heads=2,
    feed_forward=64,
    vocabulary=50,
    sequence=16,
    batch=4,
    compute=jnp.float32,
    learning_rate=1e-2,
)
MEDIUM = Config(
    layers=8,
    width=1024,
    heads=8,
    key_value_heads=4,
    feed_forward=2816,
    vocabulary=32_000,
    sequence=1024,
    batch=16,
)


def initial_parameters(config: Config, key: Array) -> dict[str, Any]:
    """Float32 parameters; those of the layers are stacked on a leading axis."""
    c = config
    keys = iter(jax.random.split(key, 9))
    stack, ones = (c.layers,), jnp.ones((c.layers, c.width), jnp.float32)
    into_heads = (c.width, c.heads, c.head_width)
    into_groups = (c.width, c.key_value_heads, c.head_width)

    def stacked(shape: tuple[int, ...], inputs: int) -> Array:
        return _layers.normal(next(keys), stack + shape, inputs)

    return {
        "embedding": _layers.normal(next(keys), (c.vocabulary, c.width), 1),
        "layers": {
            "attention_norm": ones,
            "query": stacked(into_heads, c.width),
            "key": stacked(into_groups, c.width),
            "value": stacked(into_groups, c.width),
            "output": stacked((c.heads, c.head_width, c.width), c.width),
            "feed_forward_norm": ones,
            "gate": stacked((c.width, c.feed_forward), c.width),
            "up": stacked((c.width, c.feed_forward), c.width),
            "down": stacked((c.feed_forward, c.width), c.feed_forward),
        },
        "norm": jnp.ones((c.width,), jnp.float32),
        "head": _layers.normal(next(keys), (c.width, c.vocabulary), c.width),
    }


def layer(
    weights: dict[str, Array], x: Array, table: tuple[Array, Array], mask: Array
) -> Array:
    """One transformer block on `x` [b s d]."""
    normed = _layers.rms_norm(x, weights["attention_norm"])
    query = _layers.rotate(_layers.split_heads(normed, weights["query"]), table)
    key = _layers.rotate(_layers.split_heads(normed, weights["key"]), table)
    value = _layers.split_heads(normed, weights["value"])
    mixed = _layers.attention(query, key, value, mask)
    x = x + _layers.join_heads(mixed, weights["output"])
    normed = _layers.rms_norm(x, weights["feed_forward_norm"])
    return x + _layers.swiglu(normed, weights["gate"], weights["up"], weights["down"])


def forward(
    config: Config,
    parameters: dict[str, Any],
    inputs: Array,
    constrain: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """Logits [b s v] of token numbers `inputs` [b s].

    `constrain` is applied to the activations between layers: a sharded model says there
    how they lie on the mesh.
    """
    length = inputs.shape[1]
    table = _layers.rotary_table(length, config.head_width)
    mask = _layers.causal_mask(length)
    x = constrain(parameters["embedding"][inputs].astype(config.compute))

    def body(x: Array, weights: dict[str, Array]) -> tuple[Array, None]:
        return constrain(layer(weights, x, table, mask)), None

    x, _ = jax.lax.scan(body, x, parameters["layers"])
    x = _layers.rms_norm(x, parameters["norm"])
    return x @ parameters["head"].astype(x.dtype)


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


def random_batch(config: Config) -> dict[str, Array]:
    """One batch of random tokens, each to be followed by the next."""
    drawn = _layers.tokens(
        jax.random.key(1), (config.batch, config.sequence + 1), config.vocabulary
    )
    return {"inputs": drawn[:, :-1], "labels": drawn[:, 1:]}


def make_step(config: Config) -> Step:
    """The training step: `(state, batch) -> (state, metrics)`."""

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        logits = forward(config, parameters, batch["inputs"])
        return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))

    def train_step(state: dict[str, Any], batch: dict[str, Array]):
        parameters = state["parameters"]
        loss, gradients = jax.value_and_grad(loss_fn)(parameters, batch)
        parameters, moments = _layers.updated(
            optimizer(config), parameters, state["optimizer"], gradients
        )
        return {"parameters": parameters, "optimizer": moments}, {"loss": loss}

    return train_step


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays, for numerics on a CPU."""
    return make_step(SMALL), (initial_state(SMALL), random_batch(SMALL))


def sized(config: Config) -> tuple[Step, tuple[Any, ...]]:
    """Step and `jax.ShapeDtypeStruct`s of any size."""
    state = jax.eval_shape(lambda: initial_state(config))
    batch = jax.eval_shape(lambda: random_batch(config))
    return make_step(config), (state, batch)


def medium() -> tuple[Step, tuple[Any, ...]]:
    """A size worth planning on one chip: 0.3 billion parameters, 16,384 tokens."""
    return sized(MEDIUM)
