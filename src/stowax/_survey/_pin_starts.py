"""A pinned value that the backward pass does not read: it is made to start from it.

What the backward pass reads of a layer is JAX's choice, and changes with its version:
the derivative of `tanh` reads its result and `1 - tanh` in one, only `1 - tanh**2` in
another. A pin names what the user's code computes. To keep or offload such a value is
something if what is read is computed again from it, and nothing otherwise: no decision
would name it, and the plan would say all the same that the pin had met it.

`Preferences.narrow` calls this for pins that would come to nothing.
"""

import dataclasses
from collections.abc import Collection

from .._records._stages import Body, Decision


def start_from(body: Body, pinned: Collection[int]) -> tuple[Body, frozenset[int]]:
    """`body` with a backward pass that starts from `pinned` values, where it can.

    **Arguments:** `pinned` are values that no decision but keeping or offloading is
    open for, and that the backward pass does not read.

    **Returns:** the body in which each of them that something leads away from is
    `needed`, and the cheapest way from it to a value that is read can only be computed
    again; and the indices of those.
    """
    decided: dict[int, frozenset[Decision]] = {}
    starts = set()
    for i in pinned:
        way = _cheapest_way(body, i)
        if way:
            starts.add(i)
            decided.update(dict.fromkeys(way, frozenset({"recompute"})))
    values = tuple(
        dataclasses.replace(
            value,
            needed=value.needed or value.index in starts,
            allowed=decided.get(value.index, value.allowed),
        )
        for value in body.values
    )
    return dataclasses.replace(body, values=values), frozenset(starts)


def _cheapest_way(body: Body, start: int) -> tuple[int, ...]:
    """Values from `start` to the cheapest one that is read; empty if there is none."""
    seconds = {start: 0.0}
    way: dict[int, tuple[int, ...]] = {start: ()}
    read = []
    for operation in body.operations:
        before = min(
            (i for i in operation.inputs if i in seconds),
            key=lambda i: seconds[i],
            default=None,
        )
        if before is None or not operation.repeatable:
            continue
        for value in (body.values[i] for i in operation.outputs):
            if value.available or "recompute" not in value.allowed:
                continue
            if value.needed:
                read.append((seconds[before] + operation.seconds, value.index, before))
                continue
            seconds[value.index] = seconds[before] + operation.seconds
            way[value.index] = (*way[before], value.index)
    if not read:
        return ()
    _, last, before = min(read)
    return (*way[before], last)
