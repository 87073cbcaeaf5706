"""How often a compiled `while` runs its body.

XLA peels iterations off a loop, unrolls others and keeps copies in flight across them,
so the length of the scanned array is not the number of trips. GPU compilers write the
count down (`known_trip_count`); TPU compilers leave only the loop: a counter with its
start, a comparison and a step. This module runs that little integer program, and
nothing else of the loop, until the comparison fails.

`_program` is the only caller. A count that depends on data is `None`, never a guess.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from ._costs import Function, Functions, called, config

Element = Callable[[int], int | None]
"""Element of the tuple that a computation gets as its only parameter -> scalar
value."""

# Longer loops are as good as unknown: nobody trains with layers or blocks by the
# 100,000.
_MOST_TRIPS = 65536
_SAME = {
    "copy",
    "bitcast",
    "convert",
    "reshape",
    "copy-start",
    "copy-done",
    "opt-barrier",
}
_COMPARE = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    # Integer division of HLO rounds towards zero, Python's towards minus infinity.
    "divide": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remainder": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}


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
    for trips in range(_MOST_TRIPS):
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
    while argument.opcode in _SAME:
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
    known = {
        index: scalar(functions, body, item, before, None)
        for index, item in enumerate(body.operands(body.root))
        if not item.shape.dimensions and not item.shape.tuple_shapes
    }
    return known.get


def scalar(
    functions: Functions,
    function: Function,
    item: Any,
    element: Element,
    arguments: list[int | None] | None,
) -> int | None:
    """The value of an integer or boolean scalar; `None` where it is not known."""

    def value(operand: Any) -> int | None:
        return scalar(functions, function, operand, element, arguments)

    operands = function.operands(item)
    opcode = item.opcode
    if opcode == "constant":
        return _constant(item)
    if opcode == "parameter" and arguments is not None:
        return arguments[item.parameter_number]
    if opcode == "get-tuple-element":
        source = operands[0]
        if source.opcode in ("fusion", "call"):
            inner = called(functions, source)
            if inner is None or inner.root.opcode != "tuple":
                return None
            given = [value(operand) for operand in function.operands(source)]
            part = inner.operands(inner.root)[item.tuple_index]
            return scalar(functions, inner, part, lambda index: None, given)
        return _tuple_element(source, item.tuple_index, function, value, element)
    if opcode in _SAME:
        return value(operands[0])
    if opcode in ("fusion", "call"):
        inner = called(functions, item)
        if inner is None or inner.root.opcode == "tuple":
            return None
        given = [value(operand) for operand in operands]
        return scalar(functions, inner, inner.root, lambda index: None, given)
    if opcode == "not":
        only = value(operands[0])
        return None if only is None else int(not only)
    if opcode == "select":
        chosen = value(operands[0])
        return None if chosen is None else value(operands[1 if chosen else 2])
    return _binary(item, operands, value)


def _tuple_element(
    source: Any,
    index: int,
    function: Function,
    value: Callable[[Any], int | None],
    element: Element,
) -> int | None:
    if source.opcode == "parameter":
        return element(index)
    if source.opcode == "tuple":
        return value(function.operands(source)[index])
    return None


def _binary(
    item: Any, operands: list[Any], value: Callable[[Any], int | None]
) -> int | None:
    combine = _BINARY.get(item.opcode)
    if item.opcode == "compare":
        combine = _COMPARE.get(item.comparison_direction)
    if combine is None:
        return None
    left, right = (value(operand) for operand in operands)
    if left is None or right is None:
        return None
    if right == 0 and item.opcode in ("divide", "remainder"):
        return None
    return int(combine(left, right))


def _constant(item: Any) -> int | None:
    literal = item.literal
    for values in (
        literal.preds,
        literal.s32s,
        literal.u32s,
        literal.s64s,
        literal.u64s,
    ):
        if len(values) == 1:
            return int(values[0])
    return None
