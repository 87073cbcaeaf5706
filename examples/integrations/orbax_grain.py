"""Grain feeds the step, Orbax saves and restores it, state in host memory included.

A run is stopped in the middle and taken up again from the checkpoint. The losses have
to be those of a run that was never stopped, and the state has to lie where the plan
wants it.

    python examples/integrations/orbax_grain.py
"""

import argparse
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import stowax

LAYERS, WIDTH, ROWS = 4, 256, 64

optimizer = optax.adamw(1e-3)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """How far the layers are from the identity."""

    def layer(y: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return y + jax.numpy.tanh(y @ weights["up"]) @ weights["down"], None

    y, _ = jax.lax.scan(layer, x, params)
    return jax.numpy.mean((y - x) ** 2)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """One step of AdamW."""
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


class Rows:
    """A data source of Grain's: any object with a length and items."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).normal(size=WIDTH).astype(np.float32)


def batches() -> Any:
    """Grain's own iterator, whose place can be saved."""
    dataset = grain.MapDataset.source(Rows()).seed(0).shuffle().repeat()
    return iter(dataset.to_iter_dataset().batch(ROWS))


def steps(
    step: Callable[..., Any], state: Any, source: Any, count: int
) -> tuple[Any, list[float]]:
    """A few steps from `state`."""
    losses = []
    for _ in range(count):
        state, loss = step(state, next(source))
        losses.append(float(loss))
    return state, losses


def places(state: Any) -> list[str]:
    """The memory that each array lies in."""
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]


def main() -> None:
    """Train plainly, and planned with a stop in the middle; compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--target", default="h200")
    options = parser.parse_args()

    _, plain = steps(
        jax.jit(train_step, donate_argnums=0), initial_state(), batches(), 8
    )

    step = stowax.jit(  # the one line: was jax.jit
        train_step, donate_argnums=0, budget=options.budget, target=options.target
    )
    source = batches()
    state, first = steps(step, initial_state(), source, 4)
    where = places(state)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "state", state)
        place = source.get_state()  # Grain's own; `grain.checkpoint` saves it for Orbax
        del state

        # Shapes are enough: `specs` says in which memory each array belongs.
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.eval_shape(initial_state)
        shapes = jax.tree.map(lambda s: s.update(sharding=here), shapes)
        like = step.plan.specs(shapes)
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(path / "state", like)
    source = batches()
    source.set_state(place)
    assert places(state) == where, "restored to where it was"
    state, second = steps(step, state, source, 4)

    print(step.plan)
    print("in host memory", where.count("pinned_host"), "of", len(where), "arrays")
    print("plain  ", *(f"{loss:.6f}" for loss in plain))
    print("planned", *(f"{loss:.6f}" for loss in first + second))
    np.testing.assert_allclose(first + second, plain, rtol=1e-4)
    assert "pinned_host" in where


if __name__ == "__main__":
    main()
