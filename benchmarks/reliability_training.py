"""A planned training under Orbax's checkpoints, to be killed at any moment.

    python -m benchmarks.reliability_training FOLDER STEPS EVERY

goes on from the newest checkpoint in FOLDER and writes a line per step to
FOLDER/losses: its number and the loss, to the bit.
"""

import pathlib
import sys

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

import stowax
from benchmarks.models import reliable

ROWS, WIDTH = 128, 256  # arrays of the state that are large enough to be offloaded


def train(folder: pathlib.Path, steps: int, every: int) -> None:
    """Trains up to `steps`, and saves after `every` steps, beside the training."""
    plan = stowax.load_plan(folder / "plan.json")
    planned = plan.apply(reliable.train_step)
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
    with ocp.CheckpointManager(folder / "saved", options=options) as manager:
        done = manager.latest_step()
        if done is None:
            state, done = plan.place(*reliable.initial(WIDTH)), 0
        else:
            here = SingleDeviceSharding(jax.devices()[0])
            shapes = jax.eval_shape(lambda: reliable.initial(WIDTH))
            specs = plan.specs(*jax.tree.map(lambda s: s.update(sharding=here), shapes))
            saved = manager.restore(done, args=ocp.args.StandardRestore([*specs]))
            state = tuple(saved)
        with (folder / "losses").open("a", buffering=1) as losses:
            for number in range(done, steps):
                *state, loss = planned(*state, reliable.batch(number, ROWS, WIDTH))
                losses.write(f"{number} {float(loss).hex()}\n")
                manager.save(number + 1, args=ocp.args.StandardSave([*state]))
        manager.wait_until_finished()


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
