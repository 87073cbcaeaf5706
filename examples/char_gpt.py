"""A character-level GPT, trained with Adam on English text, under a stowax plan.

An ordinary training script: the text is what `help()` shows for Python's own topics,
the model a small decoder-only transformer with its layers under `jax.lax.scan`. One
line puts it under a plan; look for "stowax, the line".

Run it: ``python examples/char_gpt.py --budget 1GiB``
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import stowax

Tree = dict[str, Any]
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of its batch; `compute` is the dtype of activations."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    sequence: int = 64
    batch: int = 16
    vocabulary: int = 128
    learning_rate: float = 3e-3
    compute: jax.typing.DTypeLike = jnp.float32


LARGE = Config(
    layers=24,
    width=2048,
    heads=16,
    sequence=1024,
    batch=16,
    learning_rate=2e-4,
    compute=jnp.bfloat16,
)
"""A size worth planning: 1.2 billion parameters, 16,384 characters per step."""


def read_text() -> np.ndarray:
    """The text as character numbers, int32 [length]; all above ASCII become '?'."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def batches(config: Config, text: np.ndarray, seed: int = 0) -> Iterator[Tree]:
    """Random pieces of the text, each character to be followed by the next."""
    random = np.random.default_rng(seed)
    while True:
        start = random.integers(0, len(text) - config.sequence - 1, config.batch)
        piece = text[start[:, None] + np.arange(config.sequence + 1)[None, :]]
        yield {"inputs": piece[:, :-1], "labels": piece[:, 1:]}


def initial_state(config: Config, seed: int = 0) -> Tree:
    """Float32 parameters, those of the layers stacked, and Adam's moments."""
    c = config
    keys = iter(jax.random.split(jax.random.key(seed), 7))

    def weights(*shape: int, inputs: int) -> Array:
        drawn = jax.random.normal(next(keys), shape, jnp.float32)
        return drawn * (1.0 / math.sqrt(inputs))

    head = c.width // c.heads
    parameters = {
        "characters": weights(c.vocabulary, c.width, inputs=c.width),
        "positions": weights(c.sequence, c.width, inputs=c.width),
        "layers": {
            "attention_norm": jnp.ones((c.layers, c.width), jnp.float32),
            "attention_in": weights(
                c.layers, 3, c.width, c.heads, head, inputs=c.width
            ),
            "attention_out": weights(c.layers, c.heads, head, c.width, inputs=c.width),
            "wide_norm": jnp.ones((c.layers, c.width), jnp.float32),
            "wide_in": weights(c.layers, c.width, 4 * c.width, inputs=c.width),
            "wide_out": weights(c.layers, 4 * c.width, c.width, inputs=4 * c.width),
        },
        "norm": jnp.ones((c.width,), jnp.float32),
        "head": weights(c.width, c.vocabulary, inputs=c.width),
    }
    return {
        "parameters": parameters,
        "adam": optax.adam(config.learning_rate).init(parameters),
    }


def layer_norm(x: Array, scale: Array) -> Array:
    """Norm over the last axis of `x` [b s d], in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + 1e-5)
    return (normed * scale[None, None, :].astype(jnp.float32)).astype(x.dtype)


def layer(x: Array, weights: Tree) -> Array:
    """One block on `x` [b s d]: causal attention, then two products around a GELU."""
    weights = jax.tree.map(lambda leaf: leaf.astype(x.dtype), weights)
    normed = layer_norm(x, weights["attention_norm"])
    heads = jnp.einsum("bsd,ndhe->nbhse", normed, weights["attention_in"])
    query, key, value = heads[0], heads[1], heads[2]
    scores = jnp.einsum("bhqe,bhke->bhqk", query, key).astype(jnp.float32)
    scores = scores * (1.0 / math.sqrt(query.shape[-1]))
    place = jnp.arange(x.shape[1], dtype=jnp.int32)
    seen = place[:, None] >= place[None, :]
    scores = jnp.where(seen[None, None, :, :], scores, -1e30)
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bhke->bqhe", shares, value)
    x = x + jnp.einsum("bqhe,hed->bqd", mixed, weights["attention_out"])
    normed = layer_norm(x, weights["wide_norm"])
    return x + jax.nn.gelu(normed @ weights["wide_in"]) @ weights["wide_out"]


def forward(config: Config, parameters: Tree, inputs: Array) -> Array:
    """Float32 logits [b s v] of the next character after each of `inputs` [b s]."""
    x = parameters["characters"][inputs] + parameters["positions"][None, :, :]
    x, _ = jax.lax.scan(
        lambda x, weights: (layer(x, weights), None),
        x.astype(config.compute),
        parameters["layers"],
    )
    x = layer_norm(x, parameters["norm"])
    return (x @ parameters["head"].astype(x.dtype)).astype(jnp.float32)


def make_train_step(config: Config) -> Step:
    """The training step: `(state, batch) -> (state, metrics)`."""

    def loss_fn(parameters: Tree, batch: Tree) -> Array:
        logits = forward(config, parameters, batch["inputs"])
        chosen = jnp.take_along_axis(logits, batch["labels"][:, :, None], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen[:, :, 0])

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        parameters, adam = state["parameters"], state["adam"]
        loss, gradients = jax.value_and_grad(loss_fn)(parameters, batch)
        # Optax raises a float to an integer power: allow it under strict dtypes.
        with jax.numpy_dtype_promotion("standard"):
            updates, adam = optax.adam(config.learning_rate).update(gradients, adam)
        parameters = optax.apply_updates(parameters, updates)
        return {"parameters": parameters, "adam": adam}, {"loss": loss}

    return train_step


def train(
    step: Step,
    state: Tree,
    source: Iterator[Tree],
    steps: int,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """The losses of `steps` steps; `report(step, loss)` is called after each."""
    losses = []
    for number in range(steps):
        state, metrics = step(state, next(source))
        losses.append(float(metrics["loss"]))
        report(number, losses[-1])
    return losses


def large() -> tuple[Step, tuple[Tree, Tree]]:
    """Step and shapes of `LARGE`, to be planned where no accelerator is."""
    state = jax.eval_shape(lambda: initial_state(LARGE))
    shape = (LARGE.batch, LARGE.sequence)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    return make_train_step(LARGE), (state, {"inputs": tokens, "labels": tokens})


def main() -> None:
    """Train on the attached device, within a budget of its memory."""
    parser = argparse.ArgumentParser(description="Train a character-level GPT.")
    for name in ("layers", "width", "heads", "sequence", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config(), name))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", default=None, help="such as 16GiB")
    options = vars(parser.parse_args())
    steps, budget = options.pop("steps"), options.pop("budget")
    config = Config(**options)

    source = batches(config, read_text())
    state = initial_state(config)
    train_step = make_train_step(config)

    step = stowax.jit(train_step, budget=budget)  # stowax, the line: it was jax.jit

    def report(number: int, loss: float) -> None:
        if number == 0:
            print(step.plan)
        if number % 50 == 0 or number == steps - 1:
            print(f"step {number:4d}   loss {loss:.3f}", flush=True)

    train(step, state, source, steps, report)


if __name__ == "__main__":
    main()
