"""How long the loops of a compiled program work: the time in which copies hide.

The planner's windows are prices of arithmetic, and XLA's schedules may be faster: in
PaliGemma2-28B on a v5p two layers' forward pass is priced at 251 ms and takes 213. The
planner then moves more than hides. So the windows of what comes next are those of the
last program that was compiled; the prices of computing again stay as they are.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from .._hlo._program import transfers_named
from .._planner import operations_run_again, recomputed_values
from .._records._program import Program
from .._records._stages import Body, Decisions, Problem
from .._target._machine import Target
from .._timing._simulate import busy_seconds

Windows = Mapping[str, tuple[float | None, float | None]]
"""By body: seconds of one run forward, and one backward; `None` where nothing tells."""


def loop_seconds(program: Program, bodies: Sequence[Body], target: Target) -> Windows:
    """How long the loops of each body work in which offloaded values move."""
    found = {
        body.name: (
            _one_run(program, f"stowax.offload.{body.name}.", target),
            _one_run(program, f"stowax.fetch.{body.name}.", target),
        )
        for body in bodies
    }
    return {name: pair for name, pair in found.items() if pair != (None, None)}


def _one_run(program: Program, scope: str, target: Target) -> float | None:
    """Seconds of one run of the loop that has the copies under a scope."""
    copies = [t for t in transfers_named(program, scope) if t.trips > 1]
    if not copies:
        return None
    # XLA peels iterations off a loop, and unrolls it: then a copy is there twice.
    inside = max(copies, key=lambda t: t.trips).computation
    names = [t.op_name for t in copies if t.computation == inside]
    seconds = busy_seconds(program, target.chip, target.link, inside)
    return seconds / max(map(names.count, names))


def windows_of(bodies: Sequence[Body], decisions: Decisions, loops: Windows) -> Windows:
    """Windows by what was compiled, without what those decisions compute again."""
    found = {}
    for body, chosen in zip(bodies, decisions, strict=True):
        if body.name not in loops:
            continue
        forward, backward = loops[body.name]
        if backward is not None:
            again = operations_run_again(body, recomputed_values(body, chosen)[0])
            rerun = sum(body.operations[f].seconds for f in again)
            backward = max(0.0, backward - rerun)
        found[body.name] = forward, backward
    return found


def windowed(problem: Problem, windows: Windows) -> Problem:
    """The problem, its bodies with the windows that are known."""
    bodies = tuple(
        dataclasses.replace(
            body,
            forward_window=windows[body.name][0],
            backward_window=windows[body.name][1],
        )
        if body.name in windows
        else body
        for body in problem.bodies
    )
    return dataclasses.replace(problem, bodies=bodies)
