"""Bytes that cross the link more often than they need to.

Three patterns, each within one computation, where the schedule says what is alive:
the same host array is fetched again while its first copy is still in use; a loop
fetches in every trip what it does not change; a value goes out and comes back while
the device keeps it anyway. Fetching weights once forward and once backward is none of
these.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .._records._inspection import Hazard
from .._records._program import Transfer
from .._units import format_bytes, format_seconds
from ._context import Context, hazard, where
from ._copies import NOTABLE_BYTES
from ._view import View

# Moves the whole of its operand; a slice of another place is another value.
_WHOLE = frozenset({"copy", "copy-start"})


class _Copy(NamedTuple):
    transfer: Transfer
    source: str
    starts: int
    last_use: int


def duplicate_copies(context: Context) -> Iterator[Hazard]:
    """Fetches of what is there already, and round trips of what never left."""
    for computation in context.on_device():
        copies = [
            transfer
            for transfer in context.program.transfers
            if transfer.computation == computation.name
            and transfer.total_bytes >= NOTABLE_BYTES
        ]
        if not copies:
            continue
        view = View(computation)
        into = _copies(view, copies, "host-to-device")
        yield from _again(context, into)
        yield from _unchanged(context, view, into)
        yield from _round_trips(context, view, into, copies)


def _copies(view: View, transfers: list[Transfer], direction: str) -> list[_Copy]:
    found = []
    for transfer in transfers:
        item = view.items[transfer.start]
        if transfer.direction != direction or item.opcode not in _WHOLE:
            continue
        found.append(
            _Copy(
                transfer=transfer,
                source=view.place(item.operands[0]),
                starts=view.position[transfer.start],
                last_use=view.last_use(transfer.done),
            )
        )
    return sorted(found, key=lambda copy: copy.starts)


def _again(context: Context, into: list[_Copy]) -> Iterator[Hazard]:
    """The same host array once more, while the first copy of it is in use."""
    seen: dict[str, _Copy] = {}
    for copy in into:
        first = seen.get(copy.source)
        if first is not None and first.last_use >= copy.starts:
            yield _hazard(
                context,
                copy.transfer,
                "are fetched again while the first copy of them is still in use",
            )
        if first is None or copy.last_use > first.last_use:
            seen[copy.source] = copy


def _unchanged(context: Context, view: View, into: list[_Copy]) -> Iterator[Hazard]:
    """What a loop's body gets and hands on unchanged, fetched in every trip."""
    for copy in into:
        item = view.items.get(copy.source)
        if copy.transfer.trips <= 1 or item is None or item.tuple_index is None:
            continue
        for root in view.roots:
            handed_on = root.operands[item.tuple_index : item.tuple_index + 1]
            if [view.place(name) for name in handed_on] == [copy.source]:
                yield _hazard(
                    context,
                    copy.transfer,
                    f"are fetched {copy.transfer.trips:g} x per step, unchanged, by a "
                    "loop that needs them once",
                )


def _round_trips(
    context: Context, view: View, into: list[_Copy], copies: list[Transfer]
) -> Iterator[Hazard]:
    """Out and back while the device keeps the value."""
    out = {copy.transfer.done: copy for copy in _copies(view, copies, "device-to-host")}
    for copy in into:
        gone = out.get(copy.source)
        if gone is None or gone.source not in view.items:
            continue
        if view.last_use(gone.source) >= copy.starts:
            yield _hazard(
                context,
                copy.transfer,
                "went to the host and come back, and were on the device all the while",
            )


def _hazard(context: Context, transfer: Transfer, what: str) -> Hazard:
    once = context.link_seconds(transfer)
    return hazard(
        "duplicate-copy",
        where(transfer),
        f"{format_bytes(transfer.bytes)} {what}: "
        f"{format_seconds(once * transfer.trips)} of the link",
        instruction=transfer.start,
        count=transfer.trips,
        seconds=context.exposed_seconds(transfer),
    )
