"""Optax's `MultiSteps`: gradients of several microbatches, then one update.

The accumulated gradients are optimizer state: one more array for each parameter. A plan
treats them as such. The one line is marked.

    python examples/integrations/multisteps.py --budget 60% --target h200
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import ROWS, WIDTH, compare, loss_fn, options, parameters

import stowax

EVERY = 4

optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=EVERY)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """One microbatch; every fourth of them updates the parameters."""
    params, opt_state = state
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def initial_state() -> Any:
    """Parameters, and the optimizer's state."""
    params = parameters()
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
    asked = options("70%", "h200", 3 * EVERY)
    plain, _ = train(jax.jit(train_step, donate_argnums=0), asked.steps)

    step = stowax.jit(  # the one line: was jax.jit
        train_step, donate_argnums=0, budget=asked.budget, target=asked.target
    )
    planned, state = train(step, asked.steps)

    where = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
    compare([step.plan], plain, planned)
    print("in host memory", where.count("pinned_host"), "of", len(where), "arrays")


if __name__ == "__main__":
    main()
