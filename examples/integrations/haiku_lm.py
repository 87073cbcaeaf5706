"""A Haiku language model, trained plain and under a plan.

The one line is marked. The model has state (running statistics) and draws random
numbers (dropout), so both pass through the plan. Run it with

    python examples/integrations/haiku_lm.py --budget 60% --target h200
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import compare, options

import stowax

LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH = 4, 64, 4, 64, 64, 16


class Block(hk.Module):
    """Attention and a gated layer, each with a residual."""

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """One layer's output."""
        start = hk.initializers.VarianceScaling(1.0)
        attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=start)
        norm = lambda: hk.LayerNorm(-1, create_scale=True, create_offset=True)
        y = norm()(x)
        x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(y, y, y, mask=mask))
        y = hk.Linear(4 * WIDTH)(norm()(x))
        # State: how large the activations have been, averaged over the steps.
        hk.ExponentialMovingAverage(0.9, name="size")(jnp.mean(jnp.abs(y)))
        return x + hk.Linear(WIDTH)(jax.nn.gelu(y))


@hk.transform_with_state
def model(tokens: jax.Array) -> jax.Array:
    """Logits of the next token."""
    x = hk.Embed(VOCABULARY, WIDTH)(tokens)
    mask = jnp.tril(jnp.ones((1, 1, SEQUENCE, SEQUENCE), bool))
    for _ in range(LAYERS):
        x = Block()(x, mask)
    return hk.Linear(VOCABULARY)(x)


class TrainState(NamedTuple):
    """All that a step changes."""

    params: hk.Params
    state: hk.State
    optimizer: optax.OptState


optimizer = optax.adamw(1e-3)


def loss_fn(
    params: hk.Params, state: hk.State, key: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, hk.State]:
    """Cross entropy, and the new state."""
    logits, state = model.apply(params, state, key, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], tokens[:, 1:]
    )
    return jnp.mean(losses), state


def train_step(
    train: TrainState, key: jax.Array, tokens: jax.Array
) -> tuple[TrainState, jax.Array]:
    """One step of AdamW."""
    differentiate = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, state), gradients = differentiate(train.params, train.state, key, tokens)
    updates, opt = optimizer.update(gradients, train.optimizer, train.params)
    return TrainState(optax.apply_updates(train.params, updates), state, opt), loss


def train(step: Callable[..., Any], steps: int) -> tuple[list[float], TrainState]:
    """The losses of a run, and what it ends with."""
    draw = np.random.default_rng(0)
    start = draw.integers(VOCABULARY, size=(steps, BATCH, 1))
    batches = (start + np.arange(SEQUENCE)) % VOCABULARY  # a sequence that counts
    params, state = model.init(jax.random.key(0), jnp.asarray(batches[0]))
    own = TrainState(params, state, optimizer.init(params))
    losses = []
    for number, tokens in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(1), number)
        own, loss = step(own, key, jnp.asarray(tokens))
        losses.append(float(loss))
    return losses, own


def main() -> None:
    """Train twice and compare."""
    asked = options()
    plain, _ = train(jax.jit(train_step, donate_argnums=0), asked.steps)

    step = stowax.jit(  # the one line: was jax.jit
        train_step, donate_argnums=0, budget=asked.budget, target=asked.target
    )
    planned, _ = train(step, asked.steps)
    compare([step.plan], plain, planned)


if __name__ == "__main__":
    main()
