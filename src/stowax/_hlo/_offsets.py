"""Slices whose place a GPU's compiler worked out beforehand, worked out again.

Where XLA's GPU compiler believes that a slice in a loop moves by as many bytes every
trip, it makes a plain copy of it, and writes down where the copy begins and how far it
moves (`dynamic_slice_config`). It may be wrong: of a number that one trip hands on to
the next it believes that it grows as the loop's counter does, whatever it starts with
(openxla/xla 39302 mends a case of it), and in jaxlib 0.10, perhaps in 0.11.0 as well
(46231), it forgets what an index is computed with before it comes to the copy. Then the
copy goes to another place, and a step trains on wrong numbers: on an H200 with jaxlib
0.11.2 every plan did whose state streamed in blocks.

So the loop's integers are run here as they are written in the program, and every trip's
place is compared with the compiler's. What cannot be worked out counts as wrong.
"""

import functools
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from ._costs import Function, Functions, bits_of, config, shape_bytes
from ._loops import (
    MOST_TRIPS,
    body_and_condition,
    following,
    initial,
    invariant,
    trip_count,
)
from ._scalars import Element, scalar

_CONFIG = "dynamic_slice_config"
_SLICES = {"dynamic-slice": 1, "dynamic-update-slice": 2}
"""Opcodes, and which operand is the first index."""
_MOST_CHAINS = 64
"""Ways to one slice; who has more is not looked at to the end, and counts as wrong."""
_READ = {"loop_index", "byte_offset", "byte_stride", "linear"}

Caller = tuple[Function, Any]


def misplaced(functions: Functions) -> Iterator[Any]:
    """The slices that the compiled program copies from or to another place."""
    callers = _callers(functions)
    return (
        item
        for function in functions.values()
        for item in function.message.instructions
        if item.opcode in _SLICES
        and (told := config(item).get(_CONFIG)) is not None
        and _is_copy(function, callers)
        and not _agrees_everywhere(functions, callers, function, item, told)
    )


def _callers(functions: Functions) -> Mapping[int, list[Caller]]:
    found: dict[int, list[Caller]] = {}
    for function in functions.values():
        for item in function.message.instructions:
            if item.opcode in ("async-update", "async-done"):
                continue  # of what `async-start` calls
            for identifier in item.called_computation_ids:
                found.setdefault(identifier, []).append((function, item))
    return found


def _is_copy(function: Function, callers: Mapping[int, list[Caller]]) -> bool:
    """Whether a computation is made into a copy, and not into a kernel.

    Kernels read indices where they run. Since jaxlib 0.11 every fusion that becomes a
    copy is started asynchronously; others are marked for it.
    """
    above = callers.get(function.message.id, [])
    if any(i.opcode == "fusion" and i.fusion_kind == "kCustom" for _, i in above):
        return True
    starts = (c for outer, _ in above for c in callers.get(outer.message.id, []))
    return _copies_by_itself() and any(s.opcode == "async-start" for _, s in starts)


@functools.cache
def _copies_by_itself() -> bool:
    """Whether the compiler makes copies of fusions that no pass has marked for it.

    Since jaxlib 0.11: `xla_gpu_enable_dynamic_slice_fusion` does not turn it off.
    """
    try:
        release = importlib.metadata.version("jaxlib").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:  # what made it is not known
        return True
    return [int(part) for part in release] >= [0, 11]


def _chains(
    function: Function, callers: Mapping[int, list[Caller]]
) -> Iterator[list[Caller]]:
    """Every way to a computation from the entry: who calls it, who calls that, …."""
    above = callers.get(function.message.id, [])
    if not above:
        yield []
    for caller in above:
        for rest in _chains(caller[0], callers):
            yield [caller, *rest]


def _agrees_everywhere(
    functions: Functions,
    callers: Mapping[int, list[Caller]],
    function: Function,
    item: Any,
    told: Mapping[str, Any],
) -> bool:
    for number, chain in enumerate(_chains(function, callers)):
        if number == _MOST_CHAINS:
            return False
        if not _agrees(functions, chain, function, item, told):
            return False
    return True


def _agrees(
    functions: Functions,
    chain: list[Caller],
    function: Function,
    item: Any,
    told: Mapping[str, Any],
) -> bool:
    """Whether the slice `item` begins where the compiler has it, at every trip."""
    if not told.keys() <= _READ:
        return False
    line = told.get("linear", told)
    begin, stride = int(line.get("byte_offset", 0)), int(line.get("byte_stride", 0))
    loops = [k for k, (_, caller) in enumerate(chain) if caller.opcode == "while"]
    wanted = int(told.get("loop_index", 0))
    place = lambda at, known: _place(functions, chain, at, known, function, item)
    # What runs begins no later than the last slice, and no earlier than the first.
    last = _last_place(function, item)
    runs = lambda trip: min(max(begin + trip * stride, 0), last)
    if not stride and place(len(chain), _nothing) == runs(0):
        return True
    if wanted >= len(loops):
        return False
    at = loops[wanted]
    parent, loop = chain[at]
    outside = _outside(functions, chain[at + 1 :])
    trips = trip_count(functions, parent, loop, outside)
    if trips is None:
        return False
    body, _ = body_and_condition(functions, loop)
    element = initial(functions, parent, loop, outside)
    for trip in range(min(trips, MOST_TRIPS)):
        if place(at, element) != runs(trip):
            return False
        element = following(functions, body, element)
    return True


def _last_place(function: Function, item: Any) -> int:
    """The largest place, in bytes, at which the slice is within its array."""
    whole, *rest = function.operands(item)
    piece = item.shape if _SLICES[item.opcode] == 1 else rest[0].shape
    return shape_bytes(whole.shape) - shape_bytes(piece)


def _outside(functions: Functions, chain: list[Caller]) -> Element:
    """What a computation knows of its own parameter: what loops around hand on."""
    if not chain or chain[0][1].opcode != "while":
        return _nothing
    parent, loop = chain[0]
    body, _ = body_and_condition(functions, loop)
    start = initial(functions, parent, loop, _outside(functions, chain[1:]))
    return invariant(body, start)


def _place(
    functions: Functions,
    chain: list[Caller],
    at: int,
    element: Element,
    function: Function,
    item: Any,
) -> int | None:
    """Bytes from its array's beginning to the slice; `None` where that depends on data.

    `element` has the scalars of the loop that is `chain[at]`.
    """
    values = _values(functions, chain, at, element)
    first = _SLICES[item.opcode]
    whole, *rest = function.operands(item)
    piece = item.shape if first == 1 else rest[0].shape
    place, bits = 0, bits_of(whole.shape)
    for axis in whole.shape.layout.minor_to_major:
        size, part = whole.shape.dimensions[axis], piece.dimensions[axis]
        if part != size:
            index = function.operands(item)[first + axis]
            start = scalar(functions, function, index, *values)
            if start is None:
                return None
            place += min(max(start, 0), size - part) * bits
        bits *= size
    return place // 8 if place % 8 == 0 else None


def _values(
    functions: Functions, chain: list[Caller], at: int, element: Element
) -> tuple[Element, list[int | None] | None]:
    """What the computation below `chain[0]` knows: its tuple, or its arguments."""
    if not chain:
        return _nothing, None
    function, caller = chain[0]
    if at == 0:
        return element, None
    if caller.opcode == "while":
        known, _ = _values(functions, chain[1:], at - 1, element)
        body, _ = body_and_condition(functions, caller)
        return invariant(body, initial(functions, function, caller, known)), None
    if caller.opcode == "conditional":  # which branch has which operand
        return _nothing, [None]
    known, arguments = _values(functions, chain[1:], at - 1, element)
    memory: dict[int, int | None] = {}
    return _nothing, [
        scalar(functions, function, operand, known, arguments, memory)
        for operand in function.operands(caller)
    ]


def _nothing(index: int) -> int | None:
    del index
    return None
