"""The price of given decisions: seconds, device bytes and host bytes of the step.

This is the model itself, written once and plainly; the solver's matrices (`_model`) say
the same in rows and columns, and everything that the solver returns has been priced
here again. Called by the solver for each candidate plan, by baselines, and by whoever
edits a plan by hand. What goes silently wrong elsewhere and not here: a value counted
as stored although what it is needed for was dropped, or a recomputation whose inputs
are gone. The minimal closure below raises instead.

Model, per body with `count` runs (its rows and columns are in `_model`):

    D = sum of offloaded bytes, R = sum of seconds of operations run again
    S = sum of seconds spent on storing
    forward run   max(C_f, D / device_to_host, P_f / host_to_device)
    backward run  max(C_b + R, (D + P_b) / host_to_device, G / device_to_host)
    update        max(C_b, U_out / device_to_host, U_in / host_to_device) + H
    step          sum count (forward + backward + S) + first exposed reload + update
                  + other_seconds

P and G are the parameters and gradients of one run that pass, of state that is
offloaded (`Value.passages`), U what it moves at the update, H the seconds of what the
host's processor updates (`Body.host_updates`): its bytes are not in U.

With `prefetch_depth` 1 nothing is pipelined, so nothing hides: both maxima become sums.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .._errors import ArgumentError
from .._records._stages import (
    Body,
    Decision,
    Decisions,
    Evaluation,
    Passage,
    Problem,
    updated_on_host,
)
from ._tables import BodyTable, Part, base_seconds, cannot_run_again, maker, tables

STORED = ("keep", "offload")


def recomputed_values(
    body: Body, decisions: Sequence[Decision | None]
) -> tuple[frozenset[int], frozenset[int]]:
    """The values that must be computed again in the backward pass, and what is read.

    The least set: each `needed` value that is neither stored nor available, and in turn
    everything that its operation reads and that is neither stored nor available.

    **Arguments:** `decisions`, one entry per value of `body`.

    **Returns:** value indices recomputed, and indices of the stored values that are
    read (a stored value outside that set is stored for nothing).

    **Raises:** `ValueError` naming the value that would have to be recomputed and
    cannot.
    """
    recomputed: set[int] = set()
    read: set[int] = set()
    waiting = [(value.index, None) for value in body.values if value.needed]
    while waiting:
        index, reader = waiting.pop()
        value = body.values[index]
        if value.available or index in recomputed:
            continue
        if decisions[index] in STORED:
            read.add(index)
            continue
        reason = cannot_run_again(body, value)
        if reason is not None:
            wanted_by = "the backward pass" if reader is None else f"{reader!r}"
            raise ValueError(
                f"{value.name!r} ({value.source}) of {body.name!r} is neither kept nor "
                f"offloaded, {wanted_by} needs it, and it cannot be recomputed: it is "
                f"{reason}. Decide 'keep' or 'offload' for it."
            )
        recomputed.add(index)
        waiting += [(i, value.name) for i in maker(body, value).inputs]
    return frozenset(recomputed), frozenset(read)


def operations_run_again(body: Body, recomputed: frozenset[int]) -> frozenset[int]:
    """Indices of the operations that make the `recomputed` values, each once."""
    return frozenset(
        operation
        for i in recomputed
        if (operation := body.values[i].operation) is not None
    )


def evaluate(problem: Problem, decisions: Decisions) -> Evaluation:
    """What `decisions` cost under the model of `problem`, whether or not they fit.

    Decisions are priced as they stand: `Value.allowed` is not asked, so a baseline or a
    plan edited by hand can be priced beside the solver's.

    **Arguments:** `decisions`, one tuple per body, in it one entry per value; `None`
    and `"recompute"` both mean not stored, and cost something only where needed.

    **Returns:** seconds of one step, bytes per device. `recomputed` holds value indices
    per body. `transfer_seconds` is the link's busy time, `exposed_seconds` what of it
    the step waits for. `*_window_used` is the part of a body's forward or backward
    seconds that the link is busy; above 1 the step waits for it.

    **Raises:** `ValueError` (see `recomputed_values`) when something cannot be
    recomputed; `ArgumentError` when the lengths do not match the problem's, or
    something is offloaded outside a loop.

    >>> from stowax._planner import baselines, evaluate
    >>> from stowax._records._stages import Body, Link, Operation, Point, Problem, Value
    >>> every = frozenset({"keep", "offload", "recompute"})
    >>> def value(index, operation, needed, allowed):
    ...     return Value(index=index, name=f"v{index}", source="model.py:1", shape=(8,),
    ...                  dtype="uint8", bytes=8, operation=operation, available=False,
    ...                  needed=needed, allowed=allowed)
    >>> body = Body(
    ...     name="layer", count=10, forward_seconds=1.0, backward_seconds=2.0,
    ...     values=(value(0, None, True, every - {"recompute"}),
    ...             value(1, 0, True, every)),
    ...     operations=(Operation(index=0, primitive="sin", source="model.py:1",
    ...                           inputs=(0,), outputs=(1,), seconds=0.5),),
    ...     points=(Point(reserved_bytes=4, live=(0, 1)),))
    >>> problem = Problem(bodies=(body,), device_bytes=1000, host_bytes=1000,
    ...                   link=Link(device_to_host=16.0, host_to_device=16.0),
    ...                   loss_reserved_bytes=4, other_seconds=0.0)
    >>> kept = evaluate(problem, (("keep", "keep"),))
    >>> kept.seconds, kept.device_bytes
    (30.0, 164)
    >>> again = evaluate(problem, (("keep", "recompute"),))
    >>> again.seconds, again.device_bytes
    (35.0, 92)
    """
    return priced(problem, tables(problem), decisions)


def _part(table: BodyTable, chosen: tuple[Decision | None, ...]) -> Part:
    """Worked out once for the same decisions."""
    known = table.parts.get(chosen)
    if known is not None:
        return known
    body = table.body
    recomputed, _ = recomputed_values(body, chosen)
    offloads = np.array([d == "offload" for d in chosen], dtype=bool)
    peak = None
    if len(table.reserved):
        working = np.where(offloads, table.bytes, 0.0)
        again = sorted(recomputed)
        working[again] = table.bytes[again]
        peak = float((table.reserved + table.live @ working).max())
    run_again = operations_run_again(body, recomputed)
    found = Part(
        recomputed=recomputed,
        rerun=sum(body.operations[f].seconds for f in run_again),
        storing=_storing_seconds(body, chosen),
        hosting=sum(part.seconds for part in updated_on_host(body, chosen)),
        kept=float(table.kept[[d == "keep" for d in chosen]].sum()),
        staged=float(table.offloaded[offloads].sum()),
        moved=float(table.bytes[offloads].sum()),
        peak=peak,
    )
    return table.parts.setdefault(chosen, found)


def priced(
    problem: Problem, body_tables: tuple[BodyTable, ...], decisions: Decisions
) -> Evaluation:
    """`evaluate` for a caller that has the tables already."""
    check_shape(problem, decisions)
    depth = problem.prefetch_depth
    parts = [
        _part(table, chosen)
        for table, chosen in zip(body_tables, decisions, strict=True)
    ]
    passages = passing(problem, decisions)
    again, storing, transfer, exposed = 0.0, 0.0, 0.0, 0.0
    hosting = 0.0
    forward_used, backward_used = [], []
    for body, part, chosen in zip(problem.bodies, parts, decisions, strict=True):
        window = body.backward_seconds + part.rerun
        again += body.count * part.rerun
        storing += body.count * part.storing
        hosting += part.hosting
        through = passages.get(body.name, ())
        link = _link_seconds(problem, through, body, chosen, part.moved)
        transfer += body.count * sum(link)
        forward, backward = max(link[:2]), max(link[2:])
        if depth > 1 or body.phase == "update":
            exposed += body.count * max(0.0, forward - body.forward_seconds)
            exposed += body.count * max(0.0, backward - window)
        else:
            exposed += body.count * sum(link)
        forward_used.append(_share(forward, body.forward_seconds))
        backward_used.append(_share(backward, window))
    if depth > 1 and parts and problem.bodies[-1].phase == "layers":
        exposed += parts[-1].moved / problem.link.host_to_device
    base = base_seconds(problem)
    return Evaluation(
        seconds=base + again + storing + exposed + hosting,
        device_bytes=_device_bytes(problem, parts, passages),
        host_bytes=int(
            sum(b.count * p.moved for b, p in zip(problem.bodies, parts, strict=True))
        ),
        recomputed=tuple(part.recomputed for part in parts),
        recompute_seconds=again,
        transfer_seconds=transfer,
        exposed_seconds=exposed,
        forward_window_used=tuple(forward_used),
        backward_window_used=tuple(backward_used),
        host_seconds=hosting,
    )


def _link_seconds(
    problem: Problem,
    passages: Sequence[Passage],
    body: Body,
    chosen: tuple[Decision | None, ...],
    moved: float,
) -> tuple[float, float, float, float]:
    """Seconds of the link in one run: forward out and in, backward out and in."""
    rates = problem.link.device_to_host, problem.link.host_to_device
    if body.phase == "update":
        mine = [v for v, d in zip(body.values, chosen, strict=True) if d == "offload"]
        parts = updated_on_host(body, chosen)
        out = sum(v.update_out for v in mine) - sum(p.update_out for p in parts)
        into = sum(v.update_in for v in mine) - sum(p.update_in for p in parts)
        return 0.0, 0.0, out / rates[0], into / rates[1]
    return (
        moved / rates[0],
        sum(p.forward_in for p in passages) / rates[1],
        sum(p.backward_out for p in passages) / rates[0],
        (moved + sum(p.backward_in for p in passages)) / rates[1],
    )


def passing(problem: Problem, decisions: Decisions) -> dict[str, list[Passage]]:
    """What of the offloaded state passes through each body, by the body's name."""
    found: dict[str, list[Passage]] = {}
    for body, chosen in zip(problem.bodies, decisions, strict=True):
        for value, decision in zip(body.values, chosen, strict=True):
            if decision == "offload":
                for passage in value.passages:
                    found.setdefault(passage.body, []).append(passage)
    return found


def _storing_seconds(body: Body, chosen: tuple[Decision | None, ...]) -> float:
    seconds = {
        "keep": [value.keep_seconds for value in body.values],
        "offload": [value.offload_seconds for value in body.values],
    }
    return sum(seconds[d][i] for i, d in enumerate(chosen) if d in STORED)


def _device_bytes(
    problem: Problem, parts: list[Part], passages: Mapping[str, Sequence[Passage]]
) -> int:
    """The peak: over the loss, and over every point of every body's backward pass.

    Backward, body k runs after all later bodies have freed their stacks, so the stacks
    of bodies 0..k are alive. Writing late leaves the last run's offloaded values of
    each of those bodies on the device as well (one D each, none without pipelining);
    reading early holds `prefetch_depth - 1` further D of body k. State that is kept is
    a stack that is alive throughout; what streams in blocks takes nothing. Layers in
    groups store nothing before their backward pass but what is reserved.
    """
    stacks, peak = 0.0, 0.0
    for body, part in zip(problem.bodies, parts, strict=True):
        early = 0 if body.phase == "update" else problem.prefetch_depth - 1
        late = min(early, 1)
        before, stacks = stacks, stacks + part.kept
        stacks += part.staged
        if part.peak is not None:
            through = sum(p.in_flight for p in passages.get(body.name, ()))
            peak = max(peak, stacks + early * part.moved + part.peak + through)
        stacks = before if body.group else stacks + late * part.moved
    return int(max(peak, problem.loss_reserved_bytes + stacks))


MISTAKEN = 0.25
"""Part of the `turnover` by which the model may be mistaken about it: assumed."""


def turnover(mine: Evaluation, other: Evaluation) -> float:
    """Seconds of recomputation, of copies and of storing that are not the same."""
    return sum(
        abs(here - there)
        for here, there in zip(_parts(mine), _parts(other), strict=True)
    )


def _parts(evaluation: Evaluation) -> tuple[float, float, float]:
    again, moving = evaluation.recompute_seconds, evaluation.transfer_seconds
    return again, moving, evaluation.seconds - again - evaluation.exposed_seconds


def _share(busy: float, window: float) -> float:
    if not busy:
        return 0.0
    return busy / window if window else float("inf")


def check_shape(problem: Problem, decisions: Decisions) -> None:
    """Raises `ArgumentError` unless `decisions` has an entry for every value."""
    got = tuple(len(chosen) for chosen in decisions)
    wanted = tuple(len(body.values) for body in problem.bodies)
    if got != wanted:
        raise ArgumentError(
            "decisions",
            f"{got} entries per body",
            f"Give one entry per value of each body: {wanted}.",
        )
    for body, chosen in zip(problem.bodies, decisions, strict=True):
        if not body.in_loop and "offload" in chosen:
            value = body.values[chosen.index("offload")]
            raise ArgumentError(
                "decisions",
                f"'offload' for {value.name!r} of {body.name!r}, which is not a loop",
                "Keep or recompute it: outside a loop the compiler drops the copies.",
            )
