"""The copies between memories in one computation of a compiled module.

A copy is an instruction whose result is in another memory than what it reads, or a
fusion, asynchronous or not, that reads or writes host memory. `_reader` is the
caller, which knows how often a computation runs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._records._program import HOST_SPACE, Direction, Transfer
from ._costs import (
    NAMES_DATA,
    Function,
    Functions,
    called,
    leaves,
    shape_bytes,
    touched,
)

# A custom call to the host is not a copy; of what is asynchronous the start counts.
_NOT_A_COPY = NAMES_DATA | {
    "custom-call",
    "copy-done",
    "async-start",
    "async-update",
    "async-done",
}


def transfers_in(
    functions: Functions,
    function: Function,
    sequence: Sequence[Any],
    trips: float,
    line_of: Callable[[Any], str],
) -> Iterator[Transfer]:
    """The copies of one computation, in the order of their starts.

    **Arguments:** `trips` is how often the computation runs per step; `line_of` gives
    an instruction's `file:line`.
    """
    for item in sequence:
        moved = list(_moved(functions, function, item))
        asynchronous = item.opcode in ("copy-start", "async-start")
        done = item
        while asynchronous:
            following = [
                user
                for user, _ in function.users.get(done.id, ())
                if user.opcode in ("copy-done", "async-update", "async-done")
            ]
            if not following:
                break
            done = following[0]
        named = item if item.metadata.op_name else done
        near = named if named.metadata.op_name else None
        near = near or _neighbour(function, item, done) or named
        padding = _padding(item, done)
        for direction, size in moved:
            yield Transfer(
                direction=direction,
                bytes=size,
                trips=trips,
                asynchronous=asynchronous,
                start=item.name,
                done=done.name,
                computation=function.message.name,
                op_name=near.metadata.op_name,
                source=line_of(named) or line_of(near),
                tiled_bytes=round(size * padding),
            )


def _neighbour(function: Function, start: Any, done: Any) -> Any | None:
    """Who names a copy that XLA gave no name: what is copied, or who reads it.

    What has a source line, too, goes before what has none.
    """
    users = (user for user, _ in function.users.get(done.id, ()))
    near = [*function.operands(start), *users]
    named = [item for item in near if item.metadata.op_name]
    lined = [
        item
        for item in named
        if item.metadata.source_file or item.metadata.stack_frame_id
    ]
    return next(iter(lined or named), None)


def _padding(start: Any, done: Any) -> float:
    """Bytes in tiles over bytes, of the array that a copy moves."""
    shape = next(leaves(done.shape if done.shape.dimensions else start.shape), None)
    if shape is None or not shape.layout.tiles:
        return 1.0
    part = 1.0
    tile = list(shape.layout.tiles[0].dimensions)
    for length, axis in zip(reversed(tile), shape.layout.minor_to_major, strict=False):
        size = shape.dimensions[axis]
        part *= -(-size // length) * length / size if size else 1.0
    return part


def _moved(
    functions: Functions, function: Function, item: Any
) -> Iterator[tuple[Direction, int]]:
    """What an instruction moves between memory spaces, by direction."""
    operands = function.operands(item)
    if item.opcode == "copy-start":
        target, source = (_on_host(part) for part in list(item.shape.tuple_shapes)[:2])
        size = shape_bytes(item.shape.tuple_shapes[0])
        if target or source:
            yield _direction(source, target), size
        return
    if item.opcode == "async-start":
        inner = called(functions, item)
        if inner is None or inner.root.opcode == "custom-call":
            return
        if item.async_execution_thread not in ("", "main"):
            return
        result_shape = inner.root.shape
    elif item.opcode in _NOT_A_COPY:
        return
    else:
        result_shape = item.shape
    reads, written = touched(functions, function, item)
    sources = [
        (_on_host(operand.shape), size)
        for operand, size in zip(operands, reads, strict=True)
        # Loop counters and slice starts are numbers, not cargo.
        if operand.shape.dimensions and size
    ]
    to_host = any(_on_host(leaf) for leaf in leaves(result_shape))
    read_from_host = sum(size for on_host, size in sources if on_host)
    all_from_host = bool(sources) and all(on_host for on_host, _ in sources)
    if to_host and all_from_host:
        yield "host-to-host", written
    elif to_host:
        yield "device-to-host", written
    if read_from_host and not to_host:
        yield "host-to-device", read_from_host


def _direction(from_host: bool, to_host: bool) -> Direction:
    if from_host and to_host:
        return "host-to-host"
    return "device-to-host" if to_host else "host-to-device"


def _on_host(shape: Any) -> bool:
    return shape.layout.memory_space == HOST_SPACE
