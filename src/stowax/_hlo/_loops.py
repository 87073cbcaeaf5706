"""How often a compiled `while` runs its body.

XLA peels iterations off a loop, unrolls others and keeps copies in flight across them,
so the length of the scanned array is not the number of trips. GPU compilers write the
count down (`known_trip_count`); TPU compilers leave only the loop: a counter with its
start, a comparison and a step. This module runs that little integer program, and
nothing else of the loop, until the comparison fails.

`_reader` counts with it, `_offsets` goes through the trips. A count that depends on
data is `None`, never a guess.
"""

from typing import Any

from ._costs import Function, Functions, config
from ._scalars import SAME, Element, Memory, is_integer, scalar

# Longer loops are as good as unknown: nobody trains with layers or blocks by the
# 100,000.
MOST_TRIPS = 65536


def trip_count(
    functions: Functions, function: Function, loop: Any, outside: Element
) -> int | None:
    """Trips of the `while` instruction `loop` in `function`.

    `outside(i)` is element i of `function`'s own parameter where that is known.
    """
    known = config(loop).get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known)
    body, condition = body_and_condition(functions, loop)
    start = initial(functions, function, loop, outside)
    element = start
    for trips in range(MOST_TRIPS):
        going = scalar(functions, condition, condition.root, element, None)
        if going is None:
            return None
        if not going:
            return trips
        element = following(functions, body, element)
    return None


def initial(
    functions: Functions, function: Function, loop: Any, outside: Element
) -> Element:
    """The scalars that `loop` starts with."""
    (argument,) = function.operands(loop)
    while argument.opcode in SAME:
        argument = function.operands(argument)[0]

    def element(index: int) -> int | None:
        if argument.opcode == "parameter":
            return outside(index)
        if argument.opcode != "tuple":
            return None
        item = function.operands(argument)[index]
        return scalar(functions, function, item, outside, None)

    return element


def invariant(body: Function, start: Element) -> Element:
    """The scalars of `start` that the body hands on unchanged."""

    def element(index: int) -> int | None:
        if body.root.opcode != "tuple":
            return None
        item = body.operands(body.root)[index]
        same = item.opcode == "get-tuple-element" and item.tuple_index == index
        if not same or body.operands(item)[0].opcode != "parameter":
            return None
        return start(index)

    return element


def body_and_condition(functions: Functions, loop: Any) -> tuple[Function, Function]:
    """The two computations of a `while`; the one that returns a bool comes last."""
    first, second = (functions[i] for i in loop.called_computation_ids)
    if first.root.shape.tuple_shapes or second.root.shape.element_type == 1:
        return first, second
    return second, first


def following(functions: Functions, body: Function, before: Element) -> Element:
    """The loop's scalars after one more trip."""
    if body.root.opcode != "tuple":
        return lambda index: None
    # At once: what is asked for at the last trip alone would ask all trips before.
    memory: Memory = {}
    known = {
        index: scalar(functions, body, item, before, None, memory)
        for index, item in enumerate(body.operands(body.root))
        if is_integer(item.shape)
    }
    return known.get
