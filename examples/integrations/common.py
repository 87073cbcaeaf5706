"""What the scripts have in common: small layers, options, and the comparison."""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, WIDTH, ROWS = 4, 256, 64


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """How far the layers are from the identity."""

    def layer(y: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ weights["up"]) @ weights["down"], None

    y, _ = jax.lax.scan(layer, x, params)
    return jnp.mean((y - x) ** 2)


def parameters() -> Any:
    """Weights of the layers."""
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": 0.05 * jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)),
        "down": 0.05 * jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)),
    }


def options(
    budget: str = "60%", target: str | None = None, steps: int = 10
) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default=budget)
    parser.add_argument("--target", default=target)
    parser.add_argument("--steps", type=int, default=steps)
    return parser.parse_args()


def compare(plans: Sequence[Any], plain: list[float], planned: list[float]) -> None:
    """Prints the plans and both runs' losses, which have to be equal."""
    for plan in plans:
        print(plan)
    print("plain  ", *(f"{loss:.6f}" for loss in plain))
    print("planned", *(f"{loss:.6f}" for loss in planned))
    np.testing.assert_allclose(planned, plain, rtol=1e-4)
