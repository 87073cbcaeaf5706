"""A Flax NNX language model, trained plain and under a plan.

The one line is marked. The step changes the model, its optimizer and its metrics in
place, and draws random numbers (dropout). Run it with

    python examples/integrations/nnx_lm.py --budget 60% --target h200
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import compare, options
from flax import nnx

import stowax

LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH = 4, 64, 4, 64, 64, 16


class Block(nnx.Module):
    """Attention and a wide layer, each with a residual."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """One layer's output."""
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class GPT(nnx.Module):
    """Logits of the next token."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(SEQUENCE, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits for every place."""
        mask = nnx.make_causal_mask(tokens)
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    """Cross entropy."""
    logits = model(tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], tokens[:, 1:]
    )
    return jnp.mean(losses)


def train_step(
    model: GPT, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, tokens: jax.Array
) -> jax.Array:
    """One step of AdamW, in place."""
    loss, gradients = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, gradients)
    metrics.update(loss=loss)
    return loss


def train(step: Callable[..., Any], steps: int) -> tuple[list[float], float]:
    """The losses of a run, and their average as the metric has it."""
    draw = np.random.default_rng(0)
    start = draw.integers(VOCABULARY, size=(steps, BATCH, 1))
    batches = (start + np.arange(SEQUENCE)) % VOCABULARY  # a sequence that counts
    model = GPT(rngs=nnx.Rngs(params=0, dropout=1))
    model.train()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    losses = [
        float(step(model, optimizer, metrics, jnp.asarray(tokens)))
        for tokens in batches
    ]
    return losses, float(metrics.compute()["loss"])


def main() -> None:
    """Train twice and compare."""
    asked = options()
    plain, average = train(nnx.jit(train_step), asked.steps)

    step = stowax.jit(  # the one line: was nnx.jit
        train_step, budget=asked.budget, target=asked.target
    )
    planned, again = train(step, asked.steps)
    compare([step.plan], [*plain, average], [*planned, again])


if __name__ == "__main__":
    main()
