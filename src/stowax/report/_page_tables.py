"""The page's tables: hazards, copies, places at the peak, a plan's decisions.

Records in, HTML out. Figures sort by what they are, not by how they are written.
"""

import itertools
from collections.abc import Sequence

from .._records._inspection import Hazard, Inspection
from .._records._memory import Block, Loop, MemoryCurve
from .._records._plan import PlanRecord
from .._records._program import CopyCheck, Transfer
from .._units import format_bytes, format_seconds
from ._decisions_text import stack_titles
from ._layout import count_of
from ._page_data import STYLES, bands_of, filled
from ._page_figures import budget_points
from ._page_html import Cell, Columns, escaped, path_cell, sortable, source_cell

_PEAK_ROWS = 100


def text_cell(text: str) -> Cell:
    """Sorted as it reads."""
    return text, text


def bytes_cell(count: int) -> Cell:
    """Sorted by the number of bytes."""
    return count, format_bytes(count) if count else "–"


def seconds_cell(seconds: float | None) -> Cell:
    """Sorted by the number of seconds."""
    return seconds or 0.0, format_seconds(seconds) if seconds else "–"


def number_cell(number: float) -> Cell:
    """Sorted by the number."""
    return number, f"{number:g}"


def hazards_table(hazards: Sequence[Hazard]) -> str:
    """The hazards, worst first."""
    columns: Columns = (
        ("kind", "text"),
        ("what", "long"),
        ("where", "long"),
        ("cost", "long"),
        ("times a step", "number"),
        ("time a step", "number"),
        ("what to do", "long"),
    )
    rows = [
        (
            text_cell(hazard.kind),
            text_cell(hazard.what),
            text_cell(hazard.where),
            text_cell(hazard.cost),
            number_cell(hazard.count),
            seconds_cell(hazard.seconds),
            text_cell(hazard.remedy),
        )
        for hazard in hazards
    ]
    return sortable(count_of(len(rows), "hazard"), columns, rows, name="hazards")


def transfers_table(transfers: Sequence[Transfer]) -> str:
    """The ledger: every copy between device and host, the most bytes first."""
    columns: Columns = (
        ("direction", "text"),
        ("bytes a step", "number"),
        ("each", "number"),
        ("times", "number"),
        ("on the link", "number"),
        ("waited for", "number"),
        ("manner", "text"),
        ("serves", "long"),
        ("where", "long"),
        ("starts at", "text"),
        ("waited for at", "text"),
        ("operation", "long"),
    )
    rows = [
        (
            text_cell(transfer.direction.replace("-", " ")),
            bytes_cell(transfer.total_bytes),
            bytes_cell(transfer.bytes),
            number_cell(transfer.trips),
            seconds_cell(transfer.seconds),
            seconds_cell(transfer.exposed_seconds),
            text_cell("asynchronous" if transfer.asynchronous else "synchronous"),
            text_cell(transfer.serves or "–"),
            source_cell(transfer.source),
            text_cell(transfer.start),
            text_cell(transfer.done),
            path_cell(transfer.op_name),
        )
        for transfer in sorted(transfers, key=lambda t: -t.total_bytes)
    ]
    return sortable(_totals(transfers), columns, rows, name="transfers")


def _totals(transfers: Sequence[Transfer]) -> str:
    """Bytes, time on the link and waiting of each direction, in one line."""
    parts = []
    for direction in dict.fromkeys(t.direction for t in transfers):
        mine = [t for t in transfers if t.direction == direction]
        moved = format_bytes(sum(t.total_bytes for t in mine))
        busy = format_seconds(sum(t.seconds for t in mine))
        waits = format_seconds(sum(t.exposed_seconds for t in mine))
        way = direction.replace("-", " ")
        parts.append(f"{way}: {moved}, {busy} on the link, {waits} waited for")
    return "; ".join(parts)


def copies_table(copies: Sequence[CopyCheck]) -> str:
    """What a plan offloads, beside what the program moves of it."""
    columns: Columns = (
        ("offloaded value", "long"),
        ("planned each way", "number"),
        ("copied out", "number"),
        ("copied in", "number"),
        ("as planned", "text"),
    )
    rows = [
        (
            text_cell(check.name),
            bytes_cell(check.planned_bytes),
            bytes_cell(check.out_bytes),
            bytes_cell(check.in_bytes),
            text_cell("yes" if check.as_planned else "NO"),
        )
        for check in copies
    ]
    whole = sum(check.as_planned for check in copies)
    title = f"Planned and compiled copies: {whole} of {len(rows)} agree"
    return sortable(title, columns, rows, name="copies")


def peak_table(curve: MemoryCurve, kind: str) -> str:
    """The largest places at the peak."""
    columns: Columns = (
        ("bytes", "number"),
        ("padding", "number"),
        ("role", "text"),
        ("name", "long"),
        ("shape", "text"),
        ("where", "long"),
        ("instruction", "text"),
    )
    blocks = curve.top(_PEAK_ROWS)
    alive = sum(1 for _ in curve.at(curve.peak_position))
    title = f"Largest places at the peak of {kind} memory"
    if alive > len(blocks):
        title += f", {len(blocks)} of {alive}"
    rows = [_block_row(block) for block in blocks]
    return sortable(title, columns, rows, name=f"peak-{kind}")


def _block_row(block: Block) -> tuple[Cell, ...]:
    return (
        bytes_cell(block.bytes),
        bytes_cell(block.padding),
        text_cell(block.role),
        path_cell(block.framework_name),
        text_cell(block.shape),
        source_cell(block.source),
        text_cell(block.name),
    )


def legend_table(curve: MemoryCurve, loops: Sequence[Loop]) -> str:
    """The bands from the top down: colour and pattern, bytes here and at the peak."""
    at_peak = [m.position == curve.peak_position for m in curve.moments]
    amounts = next(itertools.compress(filled(curve, loops), at_peak), {})
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch" style="{_swatch(band)}"></span>'
        f'{escaped(band)}</th><td class="number" data-band="{escaped(band)}">–</td>'
        f'<td class="number">{escaped(format_bytes(amounts.get(band, 0)))}</td></tr>'
        for band in reversed(bands_of(curve))
    )
    return (
        '<div class="scroll"><table id="bands"><caption>Device memory by role, in the '
        "order of the drawing</caption><thead><tr><th>role</th>"
        '<th class="number">here</th><th class="number">at the peak</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


# Bokeh's patterns as near as stylesheets come to them.
_STRIPES = {"/": "135deg", "\\": "45deg", "-": "180deg", "|": "90deg"}


def _swatch(band: str) -> str:
    colour, pattern = STYLES[band]
    lines = "#0006 0 1px, transparent 1px 6px"
    images = [
        f"repeating-linear-gradient({angle}, {lines})"
        for sign, angle in _STRIPES.items()
        if sign == pattern or (pattern == "x" and sign in "/\\")
    ]
    if pattern == ".":
        dots = "radial-gradient(#0008 1px, transparent 1.5px)"
        return f"background:{dots} 0 0/5px 5px {colour}"
    image = f";background-image:{','.join(images)}" if images else ""
    return f"background-color:{colour}{image}"


def decisions_table(plan: PlanRecord) -> str:
    """What the plan decided on each value, and why."""
    titles = stack_titles(plan)
    columns: Columns = (
        ("value", "long"),
        ("decision", "text"),
        ("of", "text"),
        ("role", "text"),
        ("all layers", "number"),
        ("one layer", "number"),
        ("layers", "number"),
        ("where", "long"),
        ("reason", "long"),
    )
    rows = [
        (
            text_cell(value.name),
            text_cell(f"{value.decision} (pinned)" if value.pinned else value.decision),
            text_cell(titles.get(value.stack, value.stack)),
            text_cell(value.role),
            bytes_cell(value.bytes * value.count),
            bytes_cell(value.bytes),
            number_cell(value.count),
            source_cell(value.source),
            text_cell(value.reason),
        )
        for value in sorted(plan.decisions, key=lambda d: -d.bytes * d.count)
    ]
    return sortable(count_of(len(rows), "decision"), columns, rows, name="decisions")


def points_table(plan: PlanRecord) -> str:
    """The points of the drawing of time over memory, as figures."""
    columns: Columns = (
        ("point", "text"),
        ("what it is", "text"),
        ("device memory", "number"),
        ("step time", "number"),
        ("within the budget", "text"),
    )
    rows = [
        (
            text_cell(name),
            text_cell(title),
            bytes_cell(much),
            seconds_cell(seconds),
            text_cell("yes" if much <= plan.budget_bytes else "no"),
        )
        for title, _, _, points in budget_points(plan)
        for name, much, seconds in points
    ]
    return sortable("What is known", columns, rows, name="points")


def unpriced_table(inspection: Inspection) -> str:
    """What nobody gave a time for, and what it was taken to cost."""
    columns: Columns = (
        ("not priced", "long"),
        ("times a step", "number"),
        ("taken to cost", "number"),
        ("why", "long"),
    )
    rows = [
        (
            text_cell(item.what),
            number_cell(item.count),
            seconds_cell(item.seconds),
            text_cell(item.reason),
        )
        for item in sorted(inspection.timeline.unpriced, key=lambda i: -i.seconds)
    ]
    return sortable("Without a price", columns, rows, name="unpriced")
