"""What the compiler's own rematerialization computes again."""

import re
from collections.abc import Iterator

from .._records._inspection import Hazard
from .._units import format_seconds
from ._context import Context, hazard, where

# XLA's rematerialization pass names its clones `x.remat`, `x.remat2`,
# `x.remat_compressed`. JAX's own `remat2` tuples begin with the word and carry no dot
# before it.
_REMATERIALIZED = re.compile(r"\.remat\d*(_(un)?compressed)?(\.|$)")


def rematerialization(context: Context) -> Iterator[Hazard]:
    """One hazard per computation, at the clone that takes longest."""
    for computation in context.program.computations.values():
        clones = [
            item
            for item in computation.instructions
            if _REMATERIALIZED.search(item.name) and item.bytes_accessed > 0
        ]
        if not clones:
            continue
        costs = {item.name: context.seconds.get(item.name, 0.0) for item in clones}
        worst = max(clones, key=lambda item: costs[item.name])
        seconds = sum(costs.values()) * computation.executions
        yield hazard(
            "rematerialization",
            where(worst),
            f"{len(clones)} recomputed operations, "
            f"{sum(item.flops for item in clones) / 1e9:.3g} GFLOP of matrix "
            f"products, {computation.executions:g} x per step: "
            f"{format_seconds(seconds)}",
            instruction=worst.name,
            count=len(clones),
            seconds=seconds,
        )
