"""The page's tables: hazards, copies, places at the peak, a plan's decisions.

Records in, HTML out. Figures sort by what they are, not by how they are written.
"""

import dataclasses
from collections.abc import Sequence

from .._records._inspection import Hazard, Inspection
from .._records._memory import MemoryCurve
from .._records._plan import DecisionRecord, PlanRecord
from .._records._program import CopyCheck, Transfer
from .._units import format_bytes, format_seconds
from ._decisions_text import stack_titles
from ._inspection_text import DIRECTIONS
from ._largest import largest
from ._layout import count_of, or_dash
from ._page_budget import budget_points
from ._page_html import Cell, Columns, path_cell, sortable, source_cell

_PEAK_ROWS = 100
_MOVED = ("offloaded", "offload in flight")
_FIRST = ("offload", "recompute", "keep")


def text_cell(text: str) -> Cell:
    """Sorted as it reads."""
    return text, text


def bytes_cell(count: int) -> Cell:
    """Sorted by the number of bytes."""
    return count, or_dash(format_bytes, count)


def seconds_cell(seconds: float | None) -> Cell:
    """Sorted by the number of seconds."""
    return seconds or 0.0, or_dash(format_seconds, seconds)


def number_cell(number: float) -> Cell:
    """Sorted by the number."""
    return number, f"{number:g}"


def hazards_table(hazards: Sequence[Hazard]) -> str:
    """The hazards, worst first."""
    columns: Columns = (
        ("kind", "text", lambda h: text_cell(h.kind)),
        ("what", "long", lambda h: text_cell(h.what)),
        ("where", "long", lambda h: text_cell(h.where)),
        ("cost", "long", lambda h: text_cell(h.cost)),
        ("times a step", "number", lambda h: number_cell(h.count)),
        ("time a step", "number", lambda h: seconds_cell(h.seconds)),
        ("what to do", "long", lambda h: text_cell(h.remedy)),
    )
    return sortable(count_of(len(hazards), "hazard"), columns, hazards, name="hazards")


def transfers_table(transfers: Sequence[Transfer]) -> str:
    """The ledger: every copy between device and host, the most bytes first."""
    columns: Columns = (
        ("direction", "text", lambda t: text_cell(DIRECTIONS[t.direction])),
        ("bytes a step", "number", lambda t: bytes_cell(t.total_bytes)),
        ("copies", "number", lambda t: (t.bytes, _copies_of(t))),
        ("on the link", "number", lambda t: seconds_cell(t.seconds)),
        ("waited for", "number", lambda t: seconds_cell(t.exposed_seconds)),
        (
            "manner",
            "text",
            lambda t: text_cell("asynchronous" if t.asynchronous else "synchronous"),
        ),
        ("serves", "long", lambda t: text_cell(t.serves or "–")),
        ("where", "text", lambda t: source_cell(t.source)),
        ("from … to", "long", lambda t: text_cell(_instructions(t))),
        ("operation", "long", lambda t: path_cell(t.op_name)),
    )
    ordered = sorted(transfers, key=lambda t: -t.total_bytes)
    return sortable(_totals(transfers), columns, ordered, name="transfers")


def _copies_of(transfer: Transfer) -> str:
    """How many there are of what size: `32 × 64.0 MiB`."""
    times = f"{transfer.trips:,} × " if transfer.trips != 1 else ""
    return f"{times}{format_bytes(transfer.bytes)}"


def _instructions(transfer: Transfer) -> str:
    """The instruction where a copy starts, and the one that waits for it."""
    names = dict.fromkeys(name for name in (transfer.start, transfer.done) if name)
    return " … ".join(names)


def _totals(transfers: Sequence[Transfer]) -> str:
    """Bytes, time on the link and waiting of each direction, in one line."""
    parts = []
    for direction in dict.fromkeys(t.direction for t in transfers):
        mine = [t for t in transfers if t.direction == direction]
        moved = format_bytes(sum(t.total_bytes for t in mine))
        busy = format_seconds(sum(t.seconds for t in mine))
        waits = format_seconds(sum(t.exposed_seconds for t in mine))
        way = DIRECTIONS[direction]
        parts.append(f"{way}: {moved}, {busy} on the link, {waits} waited for")
    return "; ".join(parts)


def copies_table(copies: Sequence[CopyCheck]) -> str:
    """What a plan offloads, beside what the program moves of it."""
    columns: Columns = (
        ("offloaded value", "long", lambda c: text_cell(c.name)),
        ("planned each way", "number", lambda c: bytes_cell(c.planned_bytes)),
        ("copied out", "number", lambda c: bytes_cell(c.out_bytes)),
        ("copied in", "number", lambda c: bytes_cell(c.in_bytes)),
        ("as planned", "text", lambda c: text_cell("yes" if c.as_planned else "NO")),
    )
    whole = sum(check.as_planned for check in copies)
    title = f"Planned and compiled copies: {whole} of {len(copies)} agree"
    return sortable(title, columns, copies, name="copies")


def peak_table(curve: MemoryCurve, kind: str) -> str:
    """The largest places at the peak, those of layers that are alike in one row.

    What is on its way over the link is in it, however small it is.
    """
    columns: Columns = (
        ("bytes", "number", lambda r: bytes_cell(r.bytes)),
        ("number", "number", lambda r: number_cell(r.count)),
        ("each", "number", lambda r: bytes_cell(r.first.bytes)),
        ("padding", "number", lambda r: bytes_cell(r.padding)),
        ("role", "role", lambda r: text_cell(r.first.role)),
        ("name", "long", lambda r: (r.first.framework_name or r.name, r.name)),
        ("shape", "text", lambda r: text_cell(r.first.shape)),
        ("where", "text", lambda r: source_cell(r.first.source)),
        ("instruction", "long", lambda r: text_cell(r.first.name)),
    )
    rows = largest(curve)
    shown = [r for k, r in enumerate(rows) if k < _PEAK_ROWS or r.first.role in _MOVED]
    places = sum(row.count for row in rows)
    title = f"{count_of(places, 'place')} at the peak of {kind} memory"
    if len(rows) > len(shown):
        title += f", the largest {len(shown)} of {len(rows)} kinds"
    return sortable(title, columns, shown, name=f"peak-{kind}")


def decisions_table(plan: PlanRecord) -> str:
    """What the plan decided on each value, and why; what moves stands first.

    Values that differ in nothing but their number share a row.
    """
    titles = stack_titles(plan)
    alike: dict[DecisionRecord, int] = {}
    for decision in plan.decisions:
        key = dataclasses.replace(decision, value=0)
        alike[key] = alike.get(key, 0) + 1

    def size(row: tuple[DecisionRecord, int]) -> int:
        return row[0].bytes * row[0].count * row[1]

    columns: Columns = (
        ("value", "long", lambda r: text_cell(r[0].name)),
        ("decision", "text", lambda r: text_cell(_decided(r[0]))),
        ("of", "text", lambda r: text_cell(titles.get(r[0].stack) or r[0].stack)),
        ("role", "role", lambda r: text_cell(r[0].role)),
        ("values", "number", lambda r: number_cell(r[1])),
        ("all layers", "number", lambda r: bytes_cell(size(r))),
        ("one value", "number", lambda r: bytes_cell(r[0].bytes)),
        ("layers", "number", lambda r: number_cell(r[0].count)),
        ("where", "text", lambda r: source_cell(r[0].source)),
        ("reason", "long", lambda r: text_cell(r[0].reason)),
    )
    ordered = sorted(
        alike.items(), key=lambda r: (_FIRST.index(r[0].decision), -size(r))
    )
    title = count_of(len(plan.decisions), "decision")
    return sortable(title, columns, ordered, name="decisions")


def _decided(decision: DecisionRecord) -> str:
    return f"{decision.decision} (pinned)" if decision.pinned else decision.decision


def points_table(plan: PlanRecord) -> str:
    """The points of the drawing of time over memory, as figures."""

    def within(much: int) -> str:
        return "yes" if much <= plan.budget_bytes else "no"

    columns: Columns = (
        ("point", "text", lambda p: text_cell(p[0])),
        ("what it is", "text", lambda p: text_cell(p[3])),
        ("device memory", "number", lambda p: bytes_cell(p[1])),
        ("step time", "number", lambda p: seconds_cell(p[2])),
        ("within the budget", "text", lambda p: text_cell(within(p[1]))),
    )
    rows = [
        (*point, title)
        for title, _, _, points in budget_points(plan)
        for point in points
    ]
    return sortable("What is known", columns, rows, name="points")


def unpriced_table(inspection: Inspection) -> str:
    """What nobody gave a time for, and what it was taken to cost."""
    columns: Columns = (
        ("not priced", "long", lambda i: text_cell(i.what)),
        ("times a step", "number", lambda i: number_cell(i.count)),
        ("taken to cost", "number", lambda i: seconds_cell(i.seconds)),
        ("why", "long", lambda i: text_cell(i.reason)),
    )
    ordered = sorted(inspection.timeline.unpriced, key=lambda i: -i.seconds)
    return sortable("Without a price", columns, ordered, name="unpriced")


def totals_table(inspection: Inspection) -> str:
    """XLA's own figures of memory, that the verdict goes by."""
    columns: Columns = (
        ("memory", "text", lambda r: text_cell(r[0])),
        ("arguments", "number", lambda r: bytes_cell(r[1].argument)),
        ("outputs", "number", lambda r: bytes_cell(r[1].output)),
        ("of these in donated arguments", "number", lambda r: bytes_cell(r[1].alias)),
        ("temporary", "number", lambda r: bytes_cell(r[1].temp)),
        ("total", "number", lambda r: bytes_cell(r[1].total)),
    )
    memory = inspection.memory
    rows = [("device", memory.device), ("host", memory.host)]
    who = "Predicted" if inspection.refusal else "XLA's"
    return sortable(f"{who} bytes of one device", columns, rows, name="totals")
