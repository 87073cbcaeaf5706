"""Optax's `MultiSteps`: gradients of several microbatches, then one update.

The accumulated gradients are optimizer state: one more array for each parameter. A plan
treats them as such. The one line is marked.

    python examples/integrations/multisteps.py --budget 60% --target h200
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stowax

LAYERS, WIDTH, ROWS, EVERY = 4, 256, 64, 4

optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=EVERY)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """How far the layers are from the identity."""

    def layer(y: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ weights["up"]) @ weights["down"], None

    y, _ = jax.lax.scan(layer, x, params)
    return jnp.mean((y - x) ** 2)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """One microbatch; every fourth of them updates the parameters."""
    params, opt_state = state
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def initial_state() -> Any:
    """Parameters, and the optimizer's state."""
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": 0.05 * jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)),
        "down": 0.05 * jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)),
    }
    return params, optimizer.init(params)


def train(step: Callable[..., Any], steps: int) -> tuple[list[float], Any]:
    """The losses of a run, and what it ends with."""
    state, draw, losses = initial_state(), np.random.default_rng(0), []
    for _ in range(steps):
        x = jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32)
        state, loss = step(state, x)
        losses.append(float(loss))
    return losses, state


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--steps", type=int, default=3 * EVERY)
    options = parser.parse_args()

    plain, _ = train(jax.jit(train_step, donate_argnums=0), options.steps)

    step = stowax.jit(  # the one line: was jax.jit
        train_step, donate_argnums=0, budget=options.budget, target=options.target
    )
    planned, state = train(step, options.steps)

    print(step.plan)
    where = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
    print("in host memory", where.count("pinned_host"), "of", len(where), "arrays")
    print("plain  ", *(f"{loss:.6f}" for loss in plain))
    print("planned", *(f"{loss:.6f}" for loss in planned))
    np.testing.assert_allclose(planned, plain, rtol=1e-4)


if __name__ == "__main__":
    main()
