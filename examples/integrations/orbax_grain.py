"""Grain feeds the step, Orbax saves and restores it, state in host memory included.

A run is stopped in the middle and taken up again from the checkpoint. The losses have
to be those of a run that was never stopped, and the state has to lie where the plan
wants it.

    python examples/integrations/orbax_grain.py
"""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from common import ROWS, WIDTH, compare, loss_fn, options, parameters

import stowax

optimizer = optax.adamw(1e-3)


def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """One step of AdamW."""
    params, opt_state = state
    loss, gradients = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def initial_state() -> Any:
    """Parameters, and the optimizer's state."""
    params = parameters()
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
    asked = options("60%", "h200", 8)
    before = asked.steps // 2
    _, plain = steps(
        jax.jit(train_step, donate_argnums=0), initial_state(), batches(), asked.steps
    )

    step = stowax.jit(  # the one line: was jax.jit
        train_step, donate_argnums=0, budget=asked.budget, target=asked.target
    )
    source = batches()
    state, first = steps(step, initial_state(), source, before)
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
    state, second = steps(step, state, source, asked.steps - before)

    compare([step.plan], plain, first + second)
    print("in host memory", where.count("pinned_host"), "of", len(where), "arrays")
    assert "pinned_host" in where


if __name__ == "__main__":
    main()
