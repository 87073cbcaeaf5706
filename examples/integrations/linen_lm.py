"""A Flax Linen language model, trained plain and under a plan.

The one line is marked. Blocks are scanned, the step passes on a `TrainState`, and a
mutable collection says how large activations are. Run it with

    python examples/integrations/linen_lm.py --budget 60% --target h200
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import compare, options
from flax.training import train_state

import stowax

LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH = 4, 64, 4, 64, 64, 16


class Block(nn.Module):
    """Attention and a wide layer, each with a residual."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        """One layer's output, as `nn.scan` wants it."""
        y = nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dropout(0.1, deterministic=False)(y)
        y = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        self.sow("intermediates", "size", jnp.mean(jnp.abs(y)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(y)), None


class GPT(nn.Module):
    """Logits of the next token."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits for every place."""
        mask = nn.make_causal_mask(tokens)
        place = self.param("place", nn.initializers.normal(0.02), (SEQUENCE, WIDTH))
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + place
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = blocks(name="blocks")(x, mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


class TrainState(train_state.TrainState):
    """Flax's, and the key that dropout's are made of."""

    key: jax.Array


def train_step(
    state: TrainState, tokens: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step of AdamW."""
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        logits, changed = state.apply_fn(
            {"params": params}, tokens, rngs={"dropout": key}, mutable="intermediates"
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return jnp.mean(losses), changed["intermediates"]

    (loss, seen), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    metrics = {"loss": loss, "size": jnp.max(seen["blocks"]["size"][0])}
    return state.apply_gradients(grads=gradients), metrics


def train(step: Callable[..., Any], steps: int) -> tuple[list[float], list[float]]:
    """The losses of a run, and the activations' sizes."""
    draw = np.random.default_rng(0)
    start = draw.integers(VOCABULARY, size=(steps, BATCH, 1))
    batches = (start + np.arange(SEQUENCE)) % VOCABULARY  # a sequence that counts
    model = GPT()
    names = ("params", "dropout")
    keys = dict(zip(names, jax.random.split(jax.random.key(0)), strict=True))
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(keys, jnp.asarray(batches[0]))["params"],
        tx=optax.adamw(1e-3),
        key=jax.random.key(1),
    )
    losses, sizes = [], []
    for tokens in batches:
        state, metrics = step(state, jnp.asarray(tokens))
        losses.append(float(metrics["loss"]))
        sizes.append(float(metrics["size"]))
    return losses, sizes


def main() -> None:
    """Train twice and compare."""
    asked = options()
    plain, sizes = train(jax.jit(train_step, donate_argnums=0), asked.steps)

    step = stowax.jit(  # the one line: was jax.jit
        train_step, donate_argnums=0, budget=asked.budget, target=asked.target
    )
    planned, again = train(step, asked.steps)
    np.testing.assert_allclose(again, sizes, rtol=1e-4)
    compare([step.plan], plain, planned)


if __name__ == "__main__":
    main()
