"""Integers of a compiled program: counters, comparisons, indices, worked out.

A value is known where it depends on constants and on what is known of a loop's tuple;
everything else is `None`, never a guess. Results wrap as their types do.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from ._costs import Function, Functions, called
from ._proto import PRIMITIVE_TYPES

Element = Callable[[int], int | None]
"""Element of the tuple that a computation gets as its only parameter -> scalar
value."""
Memory = dict[int, int | None]
"""What is known in one computation, by the instruction's id."""

SAME = {"copy", "bitcast", "reshape", "copy-start", "copy-done", "opt-barrier"}
"""Opcodes that hand a value on."""
_PRED = 1
_COMPARE = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_UNARY: Mapping[str, Callable[[int], int]] = {
    "convert": int,
    "negate": operator.neg,
    "abs": abs,
    "not": operator.invert,
    "sign": lambda a: (a > 0) - (a < 0),
}
_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    # Integer division of HLO rounds towards zero, Python's towards minus infinity.
    "divide": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remainder": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "shift-left": lambda a, b: a << b,
    "shift-right-arithmetic": lambda a, b: a >> b,
}
_SHIFTS = ("shift-left", "shift-right-arithmetic")


def is_integer(shape: Any) -> bool:
    """Whether a shape is that of one integer or truth value."""
    name, _ = PRIMITIVE_TYPES.get(shape.element_type, ("", 0))
    whole = name == "bool" or name.startswith(("int", "uint"))
    return whole and math.prod(shape.dimensions) == 1


def scalar(
    functions: Functions,
    function: Function,
    item: Any,
    element: Element,
    arguments: list[int | None] | None,
    memory: Memory | None = None,
) -> int | None:
    """The value of an integer or truth value in `function`; `None`: not known.

    `element` has what is known of the tuple that is its only parameter, `arguments` its
    parameters where it has several, `memory` what was worked out with the same.
    """
    memory = {} if memory is None else memory

    def value(operand: Any) -> int | None:
        if operand.id not in memory:
            found = None
            if is_integer(operand.shape):
                found = _worked_out(
                    functions, function, operand, value, element, arguments
                )
            memory[operand.id] = None if found is None else _wrapped(operand, found)
        return memory[operand.id]

    return value(item)


def _worked_out(
    functions: Functions,
    function: Function,
    item: Any,
    value: Callable[[Any], int | None],
    element: Element,
    arguments: list[int | None] | None,
) -> int | None:
    operands, opcode = function.operands(item), item.opcode
    if opcode == "constant":
        return _constant(item)
    if opcode == "parameter":
        return None if arguments is None else arguments[item.parameter_number]
    if opcode == "get-tuple-element":
        return _tuple_element(functions, function, item, value, element)
    if opcode in SAME:
        return value(operands[0])
    if opcode in ("fusion", "call"):
        return _inside(functions, function, item, value, None)
    if opcode == "select":
        chosen = value(operands[0])
        return None if chosen is None else value(operands[1 if chosen else 2])
    given = []
    for operand in operands:
        given.append(value(operand))
        if given[-1] is None:
            return None
    return _computed(item, given)


def _computed(item: Any, given: list[Any]) -> int | None:
    opcode = item.opcode
    if opcode == "compare":
        compare = _COMPARE.get(item.comparison_direction)
        return None if compare is None else int(compare(*given))
    if opcode == "clamp":
        low, number, high = given
        return min(max(number, low), high)
    if opcode in _UNARY:
        return _UNARY[opcode](given[0])
    if opcode in ("divide", "remainder") and given[1] == 0:
        return None
    if opcode in _SHIFTS and not 0 <= given[1] < 64:
        return None
    return _BINARY[opcode](*given) if opcode in _BINARY else None


def _tuple_element(
    functions: Functions,
    function: Function,
    item: Any,
    value: Callable[[Any], int | None],
    element: Element,
) -> int | None:
    (source,) = function.operands(item)
    if source.opcode == "parameter":
        return element(item.tuple_index)
    if source.opcode == "tuple":
        return value(function.operands(source)[item.tuple_index])
    if source.opcode in ("fusion", "call"):
        return _inside(functions, function, source, value, item.tuple_index)
    return None


def _inside(
    functions: Functions,
    function: Function,
    caller: Any,
    value: Callable[[Any], int | None],
    part: int | None,
) -> int | None:
    """The result of a called computation, or one part of it."""
    inner = called(functions, caller)
    if inner is None or (inner.root.opcode == "tuple") != (part is not None):
        return None
    result = inner.root if part is None else inner.operands(inner.root)[part]
    given = [value(operand) for operand in function.operands(caller)]
    return scalar(functions, inner, result, lambda index: None, given)


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


def _wrapped(item: Any, number: int) -> int:
    """A number as its type holds it."""
    if item.shape.element_type == _PRED:
        return int(number & 1)
    name, bits = PRIMITIVE_TYPES[item.shape.element_type]
    low = number & ((1 << bits) - 1)
    return low - (1 << bits) if name.startswith("int") and low >> (bits - 1) else low
