"""Many steps in one process: memory, live arrays and executables stay what they are.

The first fifth of the steps is for what is kept once: caches, pools of allocators.
"""

import gc
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

import stowax
from benchmarks._record import Figures
from benchmarks.models import reliable

ROWS, WIDTH = 8, 16  # small: many steps in little time
MOST_GROWTH = 8 << 20
"""Bytes that the process may grow by: half a kilobyte of each of 20,000 steps."""

_BATCHES = 8


def _resident() -> int:
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _executables() -> int:
    client: Any = jax.devices()[0].client
    return len(client.live_executables())


def _measured() -> dict[str, int]:
    return {
        "bytes": _resident(),
        "arrays": len(jax.live_arrays()),
        "executables": _executables(),
    }


def _applied() -> tuple[Callable[..., Any], Any]:
    args = (*reliable.initial(WIDTH), reliable.batch(0, ROWS, WIDTH))
    plan = stowax.plan(
        reliable.train_step,
        *args,
        target="cpu",
        pin={"*tanh*": "recompute"},
        progress=False,
    )
    return plan.apply(reliable.train_step), plan.place(*args[:2])


def _jitted() -> tuple[Callable[..., Any], Any]:
    step = stowax.jit(
        reliable.train_step, budget="90%", cache=False, progress=False, target="cpu"
    )
    return step, reliable.initial(WIDTH)


STEPS = {"plan.apply": _applied, "stowax.jit": _jitted}


def steps(name: str, count: int) -> Figures:
    """The figures of `count` steps, measured 20 times on the way."""
    step, state = STEPS[name]()
    batches = [reliable.batch(k, ROWS, WIDTH) for k in range(_BATCHES)]
    seen: list[dict[str, int]] = []
    every = max(1, count // 20)
    for number in range(count):
        *state, loss = step(*state, batches[number % _BATCHES])
        if (number + 1) % every == 0:
            float(loss)
            seen.append(_measured())
    settled, last = seen[len(seen) // 5], seen[-1]
    grown = {name: last[name] - settled[name] for name in last}
    flat = grown["bytes"] <= MOST_GROWTH and not (
        grown["arrays"] or grown["executables"]
    )
    return {
        "tries": count,
        "right": count if flat else 0,
        "lost": 0 if flat else count,
        "raw": 0,
        "grown": grown,
        "at_first": settled,
        "said": [] if flat else [f"grown by {grown}"],
    }
