"""A Llama-shaped model trained on long sequences, plain and under a plan.

    python examples/long_llama.py                   # tiny, on this machine
    stowax plan examples/long_llama.py:real --target v5p-8 --budget 48GiB

Attention runs over one block of queries at a time, so that no array has the square of
the sequence's length: the long axis is what fills memory, in every layer alike.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from integrations.common import compare, options

import stowax


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model and of its batch."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 192
    vocabulary: int = 128
    tokens: int = 128
    batch: int = 2
    block: int = 32
    dtype: Any = jnp.float32


TINY = Config()
REAL = Config(32, 4096, 32, 8, 14336, 128_256, 32_768, 1, 1024, jnp.bfloat16)


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS normalization."""
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions for an array of (batch, tokens, heads, head's width)."""
    half = x.shape[-1] // 2
    rates = 500_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    sine, cosine = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [one * cosine - other * sine, other * cosine + one * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    """Causal attention, one block of queries at a time."""
    batch, tokens, heads, width = q.shape

    @jax.checkpoint
    def rows(number: jax.Array) -> jax.Array:
        mine = jax.lax.dynamic_slice_in_dim(q, number * block, block, axis=1)
        seen = number * block + jnp.arange(block)[:, None] >= jnp.arange(tokens)
        return jax.nn.dot_product_attention(mine, k, v, mask=seen[None, None])

    blocks = jax.lax.map(rows, jnp.arange(tokens // block))
    return jnp.moveaxis(blocks, 0, 1).reshape(batch, tokens, heads * width)


def loss_fn(params: Any, tokens: jax.Array, config: Config) -> jax.Array:
    """Cross entropy of the next token."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        y = normalize(x, w["before"])
        q, k, v = (
            (y @ w[name]).reshape(*y.shape[:2], -1, config.width // config.heads)
            for name in ("query", "key", "value")
        )
        x = x + attend(rotate(q), rotate(k), v, config.block) @ w["out"]
        y = normalize(x, w["after"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    x = params["embedding"][tokens].astype(config.dtype)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = normalize(x, params["norm"]) @ params["embedding"].T.astype(config.dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
    )
    return jnp.mean(losses)


def parameters(key: jax.Array, config: Config) -> Any:
    """Weights; those of the layers have the layer as their first axis."""
    width, per_head = config.width, config.width // config.heads
    shapes = {
        "query": (width, width),
        "key": (width, config.kv_heads * per_head),
        "value": (width, config.kv_heads * per_head),
        "out": (width, width),
        "gate": (width, config.hidden),
        "up": (width, config.hidden),
        "down": (config.hidden, width),
    }
    keys = jax.random.split(key, len(shapes) + 1)
    layers = {
        name: jax.random.normal(k, (config.layers, *shape), config.dtype)
        * jnp.asarray(shape[0] ** -0.5, config.dtype)
        for k, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    ones = jnp.ones((config.layers, width), config.dtype)
    table = jax.random.normal(keys[0], (config.vocabulary, width), config.dtype)
    return {
        "embedding": table * jnp.asarray(0.02, config.dtype),
        "layers": {**layers, "before": ones, "after": ones},
        "norm": jnp.ones(width, config.dtype),
    }


def make(config: Config) -> tuple[Any, Any]:
    """The training step, and a function that makes its state."""
    optimizer = optax.adamw(3e-4)

    def train_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens, config)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def init() -> Any:
        params = parameters(jax.random.key(0), config)
        return params, optimizer.init(params)

    return train_step, init


def real() -> tuple[Any, Any]:
    """Llama-3-8B's sizes on sequences of 32,768 tokens, for `stowax plan`."""
    step, init = make(REAL)
    tokens = jax.ShapeDtypeStruct((REAL.batch, REAL.tokens), jnp.int32)
    return step, (*jax.eval_shape(init), tokens)


def main() -> None:
    """Trains the tiny model twice."""
    asked = options()
    step, init = make(TINY)
    planned = stowax.jit(
        step, budget=asked.budget, target=asked.target, donate_argnums=(0, 1)
    )

    def train(step: Any) -> list[float]:
        (params, state), losses = init(), []
        draw = np.random.default_rng(0)
        start = draw.integers(TINY.vocabulary, size=(asked.steps, TINY.batch, 1))
        for tokens in (start + np.arange(TINY.tokens)) % TINY.vocabulary:
            params, state, loss = step(params, state, jnp.asarray(tokens))
            losses.append(float(loss))
        return losses

    plain, other = train(jax.jit(step)), train(planned)
    compare([planned.plan], plain, other)


if __name__ == "__main__":
    main()
