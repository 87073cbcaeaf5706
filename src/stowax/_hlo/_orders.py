"""Which instructions only lay an array out anew: its axes in another order in memory.

A GPU's compiler writes them as fusions of a transpose, a TPU's as copies. `_reader` is
the caller.
"""

from typing import Any

from ._costs import Function, Functions, called, leaves

_MOVES = frozenset({"bitcast", "copy", "get-tuple-element", "transpose", "tuple"})


def reorders(functions: Functions, function: Function, instruction: Any) -> bool:
    """Whether an instruction computes nothing and writes axes in another order."""
    opcode = instruction.opcode
    if opcode == "transpose":
        return True  # one that moves nothing is a bitcast in a compiled program
    if opcode in ("copy", "copy-start"):
        source = function.operands(instruction)[0].shape
        return _order(source) != _order(next(leaves(instruction.shape)))
    body = called(functions, instruction)
    if opcode not in ("fusion", "async-start") or body is None:
        return False
    parts = [i for i in body.message.instructions if i.opcode != "parameter"]
    found = [reorders(functions, body, part) for part in parts]
    return any(found) and all(
        moves or part.opcode in _MOVES for moves, part in zip(found, parts, strict=True)
    )


def _order(shape: Any) -> list[int]:
    """The axes, minor first, without those of length one: they may stand anywhere."""
    return [i for i in shape.layout.minor_to_major if shape.dimensions[i] != 1]
