"""What a notebook shows of an inspection or a plan: small, without scripts.

A notebook keeps every output in its file: the page's megabytes would be there once per
cell. `Inspection.to_html` writes the page.
"""

from .._records._inspection import Inspection
from .._records._plan import PlanRecord
from .._units import format_bytes, format_seconds
from ._inspection_text import inspection_text
from ._layout import count_of, short_source
from ._page_html import escaped
from ._plan_text import plan_text

_MOST_PLACES = 10
_MOST_HAZARDS = 5


def inspection_html(inspection: Inspection) -> str:
    """Totals, hazards and the largest places at the peak, as a piece of HTML."""
    timeline, memory = inspection.timeline, inspection.memory
    if inspection.refusal:  # all that there is, as text
        text = escaped(inspection_text(inspection, width=100))
        return f'<pre style="line-height:1.25">{text}</pre>'
    line = (
        f"{inspection.program} on {inspection.target}: "
        f"{format_bytes(memory.device.total)} of device and "
        f"{format_bytes(memory.host.total)} of host memory, step "
        f"{format_seconds(timeline.step_seconds)} ({timeline.origin}), "
        f"{format_seconds(timeline.exposed_seconds)} of it waiting for the host, "
        f"{count_of(len(inspection.transfers), 'copy')}"
    )
    parts = [f"<p><b>{escaped(line)}</b></p>", _hazards(inspection)]
    if inspection.memory_timeline is not None:
        curve = inspection.memory_timeline.device
        rows = [
            (
                format_bytes(block.bytes),
                block.role,
                block.framework_name or block.name,
                block.shape,
                short_source(block.source),
            )
            for block in curve.top(_MOST_PLACES)
        ]
        peak = f"{format_bytes(curve.peak_bytes)} at the peak; the largest:"
        heads = ("bytes", "role", "name", "shape", "where")
        parts.append(f"<p>{escaped(peak)}</p>{_table(heads, rows)}")
    return f"<div>{''.join(parts)}</div>"


def _hazards(inspection: Inspection) -> str:
    if not inspection.hazards:
        return "<p>No hazards found.</p>"
    rows = [(h.kind, h.where, h.cost) for h in inspection.hazards[:_MOST_HAZARDS]]
    more = len(inspection.hazards) - len(rows)
    rest = f"<p>and {more} more</p>" if more else ""
    number = count_of(len(inspection.hazards), "hazard")
    return f"<p>{number}:</p>{_table(('kind', 'where', 'cost'), rows)}{rest}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        inner = "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(heads, 'th')}</thead><tbody>{body}</tbody></table>"


def plan_html(record: PlanRecord) -> str:
    """The plan's screen of text, its columns kept."""
    text = escaped(plan_text(record, width=100))
    return f'<pre style="line-height:1.25">{text}</pre>'
