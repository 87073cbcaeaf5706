"""What is in the way of a step that does not fit, as a section of the page."""

from .._records._inspection import Inspection
from .._records._peak import MemoryPeak
from .._units import format_bytes
from ._layout import count_of
from ._page_html import Columns, escaped, path_cell, section, sortable, source_cell
from ._page_tables import bytes_cell, number_cell, text_cell
from ._peak_text import advice, in_order, peak_title, smallest_text


def peak_section(inspection: Inspection) -> str:
    """The arrays at the predicted peak and what could be done; empty without them."""
    peak = inspection.peak
    if peak is None:
        return ""
    words = f"<p>The compiler: {escaped(inspection.refusal)}</p>"
    return section(
        "In the way",
        f"<p>{escaped(peak_title(peak).removeprefix('In the way: '))}.</p>",
        words if inspection.refusal else "",
        _arrays(peak),
        _ways(peak),
        *(f"<p>{escaped(line)}.</p>" for line in _lines(peak, inspection) if line),
    )


def _arrays(peak: MemoryPeak) -> str:
    columns: Columns = (
        ("bytes", "number", lambda a: bytes_cell(a.bytes)),
        ("padding", "number", lambda a: bytes_cell(a.padding)),
        ("role", "role", lambda a: text_cell(a.role)),
        ("number", "number", lambda a: number_cell(a.count)),
        ("shape", "text", lambda a: text_cell(a.shape)),
        ("where", "text", lambda a: source_cell(a.source)),
        ("name", "long", lambda a: path_cell(a.name)),
    )
    number = sum(array.count for array in peak.arrays)
    title = f"{count_of(number, 'place')} at the predicted peak"
    return sortable(title, columns, in_order(peak), name="in-the-way")


def _ways(peak: MemoryPeak) -> str:
    columns: Columns = (
        ("predicted, if you", "text", lambda w: text_cell(w.what)),
        ("leaves", "number", lambda w: bytes_cell(w.needs_bytes)),
        ("frees", "number", lambda w: (w.frees_bytes, format_bytes(w.frees_bytes))),
    )
    return sortable("What could be done", columns, peak.treatments, name="ways-out")


def _lines(peak: MemoryPeak, inspection: Inspection) -> tuple[str, ...]:
    unknown = f"No plan can be made: {peak.unknown}" if peak.unknown else ""
    return advice(peak), smallest_text(peak, inspection.capacity_bytes), unknown
