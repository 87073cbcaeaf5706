"""What compiled programs were seen to wait for, charged to the values that moved.

The planner lets a copy hide in all of the arithmetic of a layer. The compiled schedule
may not: a value that arises late, or is read early, is waited for. `charges_of` takes
what a program waited for beyond what the model expects, and shares it out among the
offloaded values, by what each one's own copies were waited for; `charged` puts that on
the price of offloading them, so that the solver moves something else, or nothing. Where
the link itself was full, something else would be waited for as well: what no program
has offloaded yet is charged with half of what its like were, byte for byte; what is as
good as a value that was waited for (its name, its reshaping) with the same. Copies that
were seen to hide are known to, others are not: what was never offloaded costs a little,
so that of two plans that the model finds equal the one nearer to a program that was
compiled comes next. In PaliGemma2-28B on a v5p the first program hid 8.7 s of copies
and missed the chip by 6 %; other values in their place, as good by the model, were
waited for 2.5 to 6.5 s of a step of 14.5.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._hlo._program import transfers_named
from .._records._stages import Body, Decisions, Evaluation, Operation, Problem, Value
from .._survey._survey import Survey

Charges = Mapping[tuple[str, int], float]
"""Seconds per run of the body, by its name and the value's number."""

_SUSPECTED = 0.5
"""Part of the others' charge, per byte, of what was never offloaded: assumed."""

_UNPROVEN = 0.05
"""Part of a copy's own time that may be waited for, as long as no program had it:
assumed."""

_FREE = 0.01
"""Part of a layer's forward pass below which an operation counts for nothing."""


def charged(problem: Problem, charges: Charges) -> Problem:
    """The problem with what is charged added to the price of offloading."""
    if not charges:
        return problem

    def body_of(body: Body) -> Body:
        seen = {
            value.index: charges[body.name, value.index]
            for value in body.values
            if (body.name, value.index) in charges
        }
        moved = sum(body.values[i].bytes for i in seen)
        suspected = _SUSPECTED * sum(seen.values()) / moved if moved else 0.0
        rate = min(problem.link.device_to_host, problem.link.host_to_device)
        suspected = max(suspected, _UNPROVEN / rate)
        for one, other in _steps(body):
            if one in seen or other in seen:
                both = seen.get(one, 0.0), seen.get(other, 0.0)
                seen[one], seen[other] = (seen.get(i, max(both)) for i in (one, other))
        values = tuple(
            dataclasses.replace(
                value,
                offload_seconds=value.offload_seconds
                + seen.get(value.index, suspected * value.bytes),
            )
            for value in body.values
        )
        return dataclasses.replace(body, values=values)

    return dataclasses.replace(problem, bodies=tuple(map(body_of, problem.bodies)))


def _steps(body: Body) -> list[tuple[int, int]]:
    """Values that are as good as one: one is made of the other alone, for nothing.

    Both ways along each chain, so that a charge travels all of it.
    """
    free = _FREE * body.forward_seconds
    readers: dict[int, list[Operation]] = {}
    for operation in body.operations:
        for i in operation.inputs:
            readers.setdefault(i, []).append(operation)
    steps = [
        (i, readers[i][0].outputs[0])
        for i in readers
        if len(readers[i]) == 1 == len(readers[i][0].outputs)
        and readers[i][0].seconds <= free
        and body.values[i].bytes == body.values[readers[i][0].outputs[0]].bytes
    ]
    return [*sorted(steps), *sorted(steps, reverse=True)]


def charges_of(
    survey: Survey, decisions: Decisions, expected: Evaluation, inspection: Any
) -> dict[tuple[str, int], float]:
    """What each offloaded value is to be charged with, by one compiled program.

    **Arguments:** `expected` is the model's own opinion, without charges: what it
    expects to wait for is in its price already.
    """
    waits = {key: 0.0 for key, _ in _offloaded(survey, decisions)}
    known = 0.0
    for key in waits:
        for scope in _scopes(survey, *key):
            for transfer in transfers_named(inspection, scope):
                waits[key] += transfer.exposed_seconds
                known += transfer.exposed_seconds
    total = inspection.timeline.exposed_seconds
    surprise = total - expected.exposed_seconds - expected.host_seconds
    if surprise <= 0.0 or total <= 0.0:
        return dict.fromkeys(waits, 0.0)
    # Copies of weights and gradients, and those whose name the compiler dropped, count
    # for all that moves, by its bytes.
    moving = dict(_bytes(survey, decisions))
    everything = sum(moving.values())
    rest = max(0.0, total - known)
    counts = {body.name: body.count for body in survey.bodies}
    return {
        key: surprise
        / total
        * (wait + rest * moving[key] / everything)
        / counts[key[0]]
        for key, wait in waits.items()
    }


def _offloaded(
    survey: Survey, decisions: Decisions
) -> list[tuple[tuple[str, int], Value]]:
    return [
        ((body.name, value.index), value)
        for body, chosen in zip(survey.bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        if decision == "offload"
    ]


def _bytes(survey: Survey, decisions: Decisions) -> list[tuple[tuple[str, int], int]]:
    counts = {body.name: body.count for body in survey.bodies}
    return [
        (key, counts[key[0]] * value.bytes)
        for key, value in _offloaded(survey, decisions)
    ]


def _scopes(survey: Survey, body: str, number: int) -> list[str]:
    """The named scopes that copies of one value stand under."""
    state = survey.state
    if state is None or body != state.body.name:
        return [f"stowax.offload.{body}.{number}", f"stowax.fetch.{body}.{number}"]
    leaves = state.leaves[number]
    return [f"stowax.{what}.{i}" for what in ("state", "gradient") for i in leaves]
