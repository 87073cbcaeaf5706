"""Does the step fit? The first line of a page, in words, with a sign and a colour."""

import dataclasses
from typing import Literal

from .._records._inspection import Inspection
from .._records._peak import MemoryPeak
from .._records._plan import PlanRecord
from .._units import format_bytes
from ._layout import short_source
from ._page_html import escaped

_SIGNS = {"yes": "✓", "no": "✗", "unknown": "?"}
_APART = 0.01  # of the total, from which two figures of memory need a word
_LEAST = 0.05  # of the peak: less is not worth a place in the verdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a step fits, with the figures; `more` are sentences beside it."""

    fits: Literal["yes", "no", "unknown"]
    text: str
    more: tuple[str, ...] = ()


def verdict_of(inspection: Inspection, plan: PlanRecord | None) -> Verdict:
    """Whether the step fits its device, and its plan's budget.

    The device counts first, then host memory, then the budget: a budget may be larger
    than what a device has.
    """
    used, has = inspection.memory.device.total, inspection.capacity_bytes
    more = tuple(line for line in _more(inspection, plan) if line)
    if inspection.fits is False:
        text = f"Does NOT fit: it needs {format_bytes(used)}, a device has "
        return Verdict(fits="no", text=text + format_bytes(has), more=more)
    if plan is not None:
        host, allowed = inspection.memory.host.total, plan.proof.host_budget_bytes
        device = f"a device has {format_bytes(has)}" if has else ""
        if host > allowed:
            text = f"Does NOT fit the host budget: {against(host, allowed)}"
            return Verdict(fits="no", text=text, more=more)
        budget = plan.budget_bytes
        word = "Fits the budget" if used <= budget else "Does NOT fit the budget"
        text = "; ".join(p for p in (f"{word}: {against(used, budget)}", device) if p)
        return Verdict(fits="yes" if used <= budget else "no", text=text, more=more)
    if inspection.fits is None:
        text = f"It needs {format_bytes(used)}; what a device has is not known"
        return Verdict(fits="unknown", text=text, more=more)
    text = f"Fits the device: {against(used, has)}"
    return Verdict(fits="yes", text=text, more=more)


def verdict_html(verdict: Verdict) -> str:
    """The verdict as a bar: what it says is in its words, not in its colour."""
    more = f"<p>{escaped(' '.join(verdict.more))}</p>" if verdict.more else ""
    return (
        f'<div class="verdict {verdict.fits}"><span class="sign" aria-hidden="true">'
        f"{_SIGNS[verdict.fits]}</span><div><strong>{escaped(verdict.text)}</strong>"
        f"{more}</div></div>"
    )


def against(used: int, room: int) -> str:
    """Bytes beside the room for them, the unit once, the share where it fits.

    >>> against(3 * 2**30, 4 * 2**30), against(5 * 2**30, 4 * 2**30)
    ('3.00 of 4.00 GiB (75%)', '5.00 of 4.00 GiB')
    """
    one, other = format_bytes(used), format_bytes(room)
    if one.split()[1] == other.split()[1]:
        one = one.split()[0]
    if not 0 < used <= room:
        return f"{one} of {other}"
    share = used / room
    return f"{one} of {other} ({f'{share:.0%}' if share >= 0.005 else 'under 1%'})"


def _more(inspection: Inspection, plan: PlanRecord | None) -> tuple[str, ...]:
    # Of a plan's program that was compiled the cards know better.
    predicted = inspection.peak if plan is None or inspection.refusal else None
    return (
        _filled(predicted) if predicted is not None else "",
        "The compiler refused the program." * bool(inspection.refusal),
        _done(plan) if plan is not None else "",
        _apart(inspection),
    )


def _filled(peak: MemoryPeak) -> str:
    """What most of a predicted peak is, with the line that makes the largest array."""
    parts = []
    for role, much in list(peak.by_role().items())[:3]:
        if much < _LEAST * peak.bytes:
            continue
        mine = [a for a in peak.arrays if a.role == role and a.source]
        source = short_source(max(mine, key=lambda a: a.bytes).source) if mine else ""
        where = f" ({source})" if source else ""
        parts.append(f"{format_bytes(much)} {role}{where}")
    return f"At the predicted peak: {', '.join(parts)}." if parts else ""


def _done(plan: PlanRecord) -> str:
    """What a plan did with the values that it could decide on."""
    if plan.outcome == "unneeded":
        return "The plan leaves the step as it is written."
    words = {"keep": "keeps", "offload": "offloads", "recompute": "recomputes"}
    sizes = {
        word: sum(d.bytes * d.count for d in plan.decisions if d.decision == decision)
        for decision, word in words.items()
    }
    parts = [f"{word} {format_bytes(much)}" for word, much in sizes.items() if much]
    return f"The plan {', '.join(parts)}." if parts else ""


def _apart(inspection: Inspection) -> str:
    """Why the drawing's peak is another figure than the total, where it is."""
    memory, total = inspection.memory_timeline, inspection.memory.device.total
    if memory is None or not memory.device.moments:
        return ""
    peak = memory.device.peak_bytes
    if abs(peak - total) <= _APART * total:
        return ""
    if peak < total:
        return (
            f"Drawn are arrays, {format_bytes(peak)} at most; the rest are gaps that "
            "XLA leaves between them."
        )
    return (
        f"Drawn are arrays by their live ranges, {format_bytes(peak)} at most; XLA's "
        "own total is less."
    )
