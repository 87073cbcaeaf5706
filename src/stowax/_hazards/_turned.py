"""Stacks that the compiler lays out anew between the loop that writes and that reads.

XLA gives each loop the layout that suits its own products. Where those of a backward
loop want a stack with its axes in another order than the forward one wrote it in, the
whole stack is transposed between them, and both are alive then. No source line says so,
and a total of bytes does not say why.

Looked for is a chain within one computation that runs once: what a loop fills slice by
slice, an instruction that only reorders it, a later loop that gets it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .._records._inspection import Hazard
from .._records._program import Instruction
from .._units import format_bytes, format_seconds
from ._context import Context, hazard, where
from ._view import View

_HUGE_BYTES = 1 << 30
_LARGE_BYTES = 1 << 20
_LARGE_PART = 0.01


class _Turned(NamedTuple):
    """What reorders a stack of `bytes`, and what filled it in the loop before."""

    item: Instruction
    filled: Instruction
    bytes: int


def turned_stacks(context: Context) -> Iterator[Hazard]:
    """One hazard per pair of loops, at the largest stack between them."""
    if context.intent.planned:
        return  # its loops are the plan's
    for computation in context.on_device():
        if computation.executions > 1:
            continue
        view = View(computation)
        groups: dict[tuple[str, str], dict[str, _Turned]] = {}
        for loop in computation.instructions:
            for name in _given(view, loop):
                for writer, turned in _turned(context, view, name):
                    found = groups.setdefault((writer, loop.name), {})
                    found[view.place(name)] = turned
        for found in groups.values():
            yield from _hazards(context, list(found.values()))


def _hazards(context: Context, found: list[_Turned]) -> Iterator[Hazard]:
    total = sum(turned.bytes for turned in found)
    part = max(_LARGE_BYTES, _LARGE_PART * context.memory.device.total)
    if total < min(_HUGE_BYTES, part):
        return
    largest = max(found, key=lambda turned: turned.bytes)
    items = {turned.item.name for turned in found}
    seconds = sum(context.seconds.get(name, 0.0) for name in items)
    stacks = f"{len(found)} stacks, the largest {format_bytes(largest.bytes)}"
    what = f"{format_bytes(total)}, {stacks}" if len(found) > 1 else format_bytes(total)
    yield hazard(
        "turned-stack",
        where(largest.filled),
        f"{what} of {largest.item.dtype}: written by one loop, laid out anew for the "
        f"next, and there twice meanwhile: {format_seconds(seconds)}",
        instruction=largest.item.name,
        count=len(found),
        seconds=seconds,
    )


def _given(view: View, loop: Instruction) -> tuple[str, ...]:
    """What a loop begins with; of anything else nothing."""
    if loop.opcode != "while":
        return ()
    start = view.items[view.place(loop.operands[0])]
    return start.operands if start.opcode == "tuple" else ()


def _turned(context: Context, view: View, name: str) -> Iterator[tuple[str, _Turned]]:
    """The loop that filled what `name` is another order of, if it is one of that."""
    size, item = view.items[view.place(name)].result_bytes, view.maker(name)
    for operand in item.operands if item.reorders else ():
        read, loop = view.items[view.place(operand)], view.maker(operand)
        if loop.opcode != "while" or read.result_bytes != size:
            continue
        filled = _filled(context, loop, read)
        if filled is not None:
            yield loop.name, _Turned(item, filled, size)
            return


def _filled(
    context: Context, loop: Instruction, read: Instruction
) -> Instruction | None:
    """What writes, a slice at a time, the array that `read` takes out of a loop."""
    index = read.tuple_index or 0
    size = read.result_bytes
    fills = {fill.name for fill in context.program.fills if fill.bytes == size}
    for body in loop.called:
        inside = View(context.program.computations[body])
        for root in inside.roots:
            for name in root.operands[index : index + 1]:
                if (item := inside.maker(name)).name in fills:
                    return item
    return None
