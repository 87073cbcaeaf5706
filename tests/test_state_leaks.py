"""Five hundred planned steps leave the process as large as it was.

In a process of its own, which is this file run as a program: what other tests hold and
give back does not count.
"""

import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from planned_models import plan, spec

OPTIMIZER = optax.sgd(np.float32(1e-3), momentum=0.9)
WIDTH = 1024  # a momentum of 4 MiB, the least that streams
WARM_UP, STEPS, WINDOW = 100, 500, 50
STATISTICS = pathlib.Path("/proc/self/statm")


@stowax.stow
def loss_fn(w, x):
    return jnp.mean(jnp.tanh(w) * x)


def step(w, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(w, x)
    updates, state = OPTIMIZER.update(grads, state, w)
    return optax.apply_updates(w, updates), state, loss


def run(file):
    """Prints resident pages and live arrays after each step."""
    found = stowax.load_plan(file)
    w = jnp.ones((WIDTH, WIDTH))
    w, state = found.place(w, OPTIMIZER.init(w))
    planned = found.apply(step)
    seen = []
    for number in range(WARM_UP + STEPS):
        w, state, loss = planned(w, state, np.float32(number))
        jax.block_until_ready((w, state, loss))
        if number in (WARM_UP, WARM_UP + STEPS - WINDOW):
            trim()
        resident = int(STATISTICS.read_text().split()[1])
        seen.append((resident, len(jax.live_arrays())))
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state)}
    print(json.dumps({"seen": seen, "kinds": sorted(kinds)}))


def trim():
    """What compiling left free goes back to the system, where glibc can do that."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


@pytest.mark.slow
@pytest.mark.skipif(not STATISTICS.exists(), reason="no /proc to read memory from")
@pytest.mark.usefixtures("usual_promotion")
def test_five_hundred_steps_take_no_memory(tmp_path):
    w = spec(WIDTH, WIDTH)
    found = plan(
        step,
        *(w, jax.eval_shape(OPTIMIZER.init, w), spec()),
        pin={"optimizer state": "offload"},
    )
    found.save(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        check=False,
        # Large buffers go back at once when they are freed.
        env={
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "1048576",
            "MALLOC_ARENA_MAX": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kinds"] == ["pinned_host"]
    before, after = report["seen"][WARM_UP:][:WINDOW], report["seen"][-WINDOW:]
    assert {arrays for _, arrays in after} == {arrays for _, arrays in before}
    # What is held is the least of several steps: buffers that are just being given back
    # come and go.
    (held, _), (held_after, _) = min(before), min(after)
    assert abs(held_after - held) <= 0.01 * held


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    run(sys.argv[1])
