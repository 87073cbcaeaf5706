"""An inspection as one page for a browser: offline, in one file, for eyes and keys.

`Inspection.to_html` and `stowax inspect --html` write it. Made from records alone, so a
saved inspection of another machine will do. Names are escaped (`_page_html`), what is
drawn comes packed (`_page_data`) and moves by `page.js`
and `step.js`.
"""

from .._records._audit import AuditRecord
from .._records._inspection import Inspection
from .._records._plan import PlanRecord
from .._units import format_bytes, format_seconds
from ._page_audit import audit_table
from ._page_budget import budget_figure, budget_ranges
from ._page_data import curves_of, page_data, size_unit, step_end, time_unit
from ._page_figures import library_script, step_figures
from ._page_head import head_html, legend_html
from ._page_html import (
    asset,
    document,
    escaped,
    facts_html,
    json_in_script,
    packed,
    section,
)
from ._page_peak import peak_section
from ._page_tables import (
    copies_table,
    decisions_table,
    hazards_table,
    peak_table,
    points_table,
    totals_table,
    transfers_table,
    unpriced_table,
)
from ._peak_text import known_size
from ._times import busy_in, parts_of


def inspection_page(
    inspection: Inspection,
    plan: PlanRecord | None = None,
    audit: AuditRecord | None = None,
) -> str:
    """The whole page.

    **Arguments:** `plan` is the one that the step was compiled under, if one was: its
    budget and decisions are shown too. `audit` is of the loop around the step.

    **Raises:** `MissingExtraError` without the extra `[report]`.
    """
    step = step_figures(inspection, plan)
    budget = budget_figure(plan) if plan is not None else None
    units = {"time": time_unit(step_end(inspection))[0]}
    for kind in curves_of(inspection):
        curve = getattr(inspection.memory_timeline, kind)
        units[kind] = size_unit(curve.peak_bytes)[0]
    call = json_in_script(
        {
            "step": step,
            "drawings": {"budget": budget} if budget else {},
            "ranges": budget_ranges(plan) if plan is not None else None,
            "packed": packed(page_data(inspection)) if step else None,
            "units": units,
        }
    )
    parts = [
        head_html(inspection, plan),
        _step(inspection) if step else "",
        peak_section(inspection),
        section("Hazards", _hazards(inspection)),
        section("The loop around the step", audit_table(audit)) if audit else "",
        section("Copies between device and host", _copies(inspection))
        if not inspection.refusal
        else "",
        _plan(plan) if plan is not None else "",
        section("Largest places", *_places(inspection)),
        section("What the figures rest on", _small_print(inspection)),
    ]
    scripts = [
        library_script(),
        asset("moments.js"),
        asset("bands.js"),
        asset("step.js"),
        asset("page.js"),
        f"start({call});",
    ]
    title = f"{inspection.program} on {inspection.target}"
    return document(title, "\n".join(part for part in parts if part), scripts)


def _times(inspection: Inspection) -> str:
    """Where the time of the step goes, and how long each link is busy."""
    timeline = inspection.timeline
    step = timeline.step_seconds
    pairs = [
        (name, f"{format_seconds(seconds)}, {seconds / step:.1%}")
        for name, seconds in parts_of(timeline)
        if seconds and step
    ]
    pairs += [
        (f"{name}, busy", format_seconds(seconds))
        for name, seconds in busy_in(timeline)
        if seconds
    ]
    return facts_html(pairs)


_KEYS = (
    "Drag to zoom, Ctrl and wheel to zoom, Shift and wheel to move, double-click for "
    "the whole step. Keys, once the drawing has the focus: <kbd>←</kbd> <kbd>→</kbd> "
    "move (with <kbd>Shift</kbd> further), <kbd>Page Up</kbd> <kbd>Page Down</kbd>, "
    "<kbd>Home</kbd> <kbd>End</kbd>, <kbd>+</kbd> <kbd>−</kbd> zoom, <kbd>0</kbd> "
    "whole step, <kbd>P</kbd> peak."
)
_BUTTONS = (
    ("in", "Zoom in"),
    ("out", "Zoom out"),
    ("all", "Whole step"),
    ("peak", "Go to the peak"),
)


def _step(inspection: Inspection) -> str:
    memory, kinds = inspection.memory_timeline, curves_of(inspection)
    buttons = "".join(
        f'<button type="button" data-do="{what}">{name}</button>'
        for what, name in _BUTTONS
        if kinds or what != "peak"
    )
    legend = ""
    if memory is not None and kinds:
        legend = legend_html(getattr(memory, kinds[0]), memory.loops)
    return (
        '<section><div class="line"><h2>The step</h2>'
        f'<div class="buttons">{buttons}</div></div>{legend}'
        '<div id="step" tabindex="0" role="slider" aria-valuemin="0" '
        'aria-valuemax="1000" aria-valuenow="0" aria-label="Place in the step">'
        '<div id="drawing"></div><div id="cursor"></div><div id="tip"></div></div>'
        '<p id="reading" role="status" aria-live="polite"></p>'
        f'<p class="soft">{_KEYS} Blue: the device or a link is busy. Red with '
        "crosses: the device waits. Where something is too short to be drawn, the "
        f"height of a bar is its share of the time.</p>{_times(inspection)}"
        f"{_HERE if legend else ''}</section>"
    )


_HERE = (
    '<div class="scroll" tabindex="0" role="region" aria-label="Largest places here">'
    '<table id="here"><caption>Largest places at the dashed line</caption><thead><tr>'
    '<th class="number">bytes</th><th class="number">number</th><th>role</th>'
    '<th class="long">name</th><th>shape</th><th>where</th></tr></thead><tbody></tbody>'
    "</table></div>"
)
"""The largest places where the reader is: filled by the script."""


def _hazards(inspection: Inspection) -> str:
    found = hazards_table(inspection.hazards)
    if not found and not inspection.refusal:
        found = "<p>No hazards found.</p>"
    unknown = "".join(
        f"<li>{escaped(item.what)}: {escaped(item.reason)}</li>"
        for item in inspection.omissions
    )
    return found + (f"<p>Not known:</p><ul>{unknown}</ul>" if unknown else "")


def _copies(inspection: Inspection) -> str:
    ledger = transfers_table(inspection.transfers)
    return copies_table(inspection.copies) + (
        ledger or "<p>No copies between device and host.</p>"
    )


def _plan(plan: PlanRecord) -> str:
    proof, search = plan.proof, plan.search
    text = (
        f"{'Fits' if proof.fits else 'Does not fit'}: "
        f"{format_bytes(proof.device_bytes)} of {format_bytes(proof.budget_bytes)} on "
        f"the device, {format_bytes(proof.host_bytes)} of "
        f"{format_bytes(proof.host_budget_bytes)} on the host, compiled. Smallest "
        f"budget: {known_size(search.smallest_budget, search.smallest_budget_is)}. "
        "No plan is predicted below "
        f"{format_seconds(search.bound_seconds)} a step (gap {search.gap:.2%})."
    )
    return section(
        "The plan", f"<p>{escaped(text)}</p>", decisions_table(plan)
    ) + section(
        "Step time over device memory",
        '<p class="soft">Points that are known, nothing between them. What is '
        "predicted is the planner's model; what is compiled is simulated from the "
        "schedule. Drag to zoom.</p>"
        '<div class="buttons"><button type="button" data-near="yes">Near the budget'
        '</button><button type="button" data-near="">All points</button></div>'
        '<div id="budget"></div>',
        points_table(plan),
    )


def _places(inspection: Inspection) -> list[str]:
    return [
        peak_table(getattr(inspection.memory_timeline, kind), kind)
        for kind in curves_of(inspection)
    ]


def _small_print(inspection: Inspection) -> str:
    items = "".join(f"<li>{escaped(a)}</li>" for a in inspection.timeline.assumptions)
    listed = f"<ul>{items}</ul>" if items else ""
    return totals_table(inspection) + listed + unpriced_table(inspection)
