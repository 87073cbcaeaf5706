"""The head of an inspection's page: does it fit, what fills memory, moves, stalls.

A person who looks for ten seconds reads the verdict and four short answers. Everything
below them on the page is where the answers come from.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from .._records._inspection import Hazard, Inspection
from .._records._memory import Loop, MemoryCurve
from .._records._plan import PlanRecord
from .._records._program import Transfer
from .._units import format_bytes, format_seconds
from ._largest import largest
from ._layout import count_of
from ._looks import background, swatch
from ._memory_bands import filled
from ._page_data import bands_of
from ._page_html import escaped
from ._page_verdict import verdict_html, verdict_of
from ._peak_text import advice, array_text, known_size, smallest_text
from ._times import parts_of

_MOST_ROLES = 3
_LARGE = 0.05  # of the step, from which waits are worth a word
_MOST_HAZARDS = 2  # kinds of them; the table below has all


def head_html(inspection: Inspection, plan: PlanRecord | None) -> str:
    """The title, the verdict and the four cards."""
    line = "one device, as the compiler schedules the step"
    if inspection.refusal:
        line = "one device, as predicted: nothing is compiled"
    cards = (
        _card("Fills memory", _fills(inspection)),
        _card("Moves", _moves(inspection)),
        _card("Stalls", _stalls(inspection)),
        _card("To do", _to_do(inspection, plan)),
    )
    return (
        f'<header class="line"><h1>{escaped(inspection.program)} on '
        f'{escaped(inspection.target)}</h1><p class="soft">{escaped(line)}</p></header>'
        f"{verdict_html(verdict_of(inspection, plan))}"
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _card(title: str, lines: Iterable[str]) -> str:
    return f'<section class="card"><h2>{title}</h2>{"".join(lines)}</section>'


def _big(text: str) -> str:
    return f'<p class="big">{escaped(text)}</p>'


def _line(text: str, whole: str = "") -> str:
    """A line of a card, cut where it is too long; the pointer shows the whole."""
    return f'<p title="{escaped(whole or text)}">{escaped(text)}</p>'


@dataclasses.dataclass(frozen=True, slots=True)
class _Fill:
    role: str
    bytes: int


def _fills(inspection: Inspection) -> list[str]:
    fills, line = _roles(inspection)
    if not fills:
        return [_line("Nothing is known of what lies in memory.")]
    most = max(fill.bytes for fill in fills)
    bars = [_bar(fill, most) for fill in fills[:_MOST_ROLES]]
    if rest := sum(fill.bytes for fill in fills[_MOST_ROLES:]):
        bars.append(_line(f"and {format_bytes(rest)} of others"))
    return [*bars, *([_line(f"Largest: {line}")] if line else [])]


def _roles(inspection: Inspection) -> tuple[list[_Fill], str]:
    """Bytes by role at the peak, the most first, and what is largest there."""
    memory, peak = inspection.memory_timeline, inspection.peak
    if memory is not None and memory.device.peak_bytes:
        found = sorted(memory.device.by_role().items(), key=lambda item: -item[1])
        top = next(iter(largest(memory.device)), None)
        line = f"{top.text()}, {format_bytes(top.bytes)}" if top else ""
        return [_Fill(role, much) for role, much in found], line
    if peak is not None and peak.arrays:
        top = max(peak.arrays, key=lambda array: array.bytes)
        line = f"{array_text(top)}, {format_bytes(top.bytes)}"
        return [_Fill(role, much) for role, much in peak.by_role().items()], line
    use = inspection.memory.device
    kinds = {
        "arguments": use.argument,
        "outputs": use.output - use.alias,
        "temporary": use.temp,
    }
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return [_Fill(name, much) for name, much in ordered if much > 0], ""


def _bar(fill: _Fill, most: int) -> str:
    style = background(fill.role) or "background-color:#999999"
    width = 100 * fill.bytes / most
    return (
        f'<div class="fill"><span>{escaped(fill.role)}</span>'
        f"<b>{escaped(format_bytes(fill.bytes))}</b>"
        f'<i style="width:{width:.1f}%;{style}"></i></div>'
    )


_WAYS = {"device-to-host": "to the host", "host-to-device": "to the device"}


def _moves(inspection: Inspection) -> list[str]:
    if inspection.refusal:
        return [_line("Not known: there is no program.")]
    if not (crossing := [t for t in inspection.transfers if t.direction in _WAYS]):
        return [_big("Nothing moves"), _line("between device and host.")]
    lines = []
    for direction, way in _WAYS.items():
        mine = [t for t in crossing if t.direction == direction]
        if much := sum(t.total_bytes for t in mine):
            lines.append(_big(f"{format_bytes(much)} {way}"))
    name, much = _most_moved(crossing)
    lines.append(_line(f"a step. Largest: {name}, {format_bytes(much)}"))
    lines.append(_waiting_in_host(inspection))
    if wrong := sum(not check.as_planned for check in inspection.copies):
        text = f"{count_of(wrong, 'offloaded value')} not copied as planned"
        lines.append(f'<p class="bad">{escaped(text)}</p>')
    return lines


def _waiting_in_host(inspection: Inspection) -> str:
    host = inspection.memory.host.total
    return _line(f"{format_bytes(host)} of host memory") if host else ""


def _most_moved(transfers: Sequence[Transfer]) -> tuple[str, int]:
    """What moves most, both ways together, and its bytes one way."""
    sums: dict[str, dict[str, int]] = {}
    for t in transfers:
        name = t.serves or t.op_name.rpartition("/")[2] or t.start
        ways = sums.setdefault(name, dict.fromkeys(_WAYS, 0))
        ways[t.direction] += t.total_bytes
    name = max(sums, key=lambda name: sum(sums[name].values()))
    return name, max(sums[name].values())


def _stalls(inspection: Inspection) -> list[str]:
    timeline = inspection.timeline
    step = timeline.step_seconds
    if inspection.refusal or not step:
        return [_line("Not known: there is no program.")]
    times = dict(parts_of(timeline))
    del times["computing"]
    waits = [(name, s) for name, s in times.items() if s >= step / 10000]
    lines = [_big(f"{format_seconds(step)} a step, {timeline.origin}")]
    for name, seconds in waits:
        text = f"{format_seconds(seconds)}, {seconds / step:.0%}, {name}"
        lines.append(f'<p class="bad">{escaped(text)}</p>')
    if not waits:
        # No share: where bars are too short to be drawn, the picture has gaps.
        lines.append(_line("No stall: the device waits for nothing"))
    return [*lines, *_products(inspection)]


def _products(inspection: Inspection) -> Iterable[str]:
    """How well the chip is used, where its rates are known."""
    if not inspection.flops:
        return
    step = inspection.timeline.step_seconds
    text = f"Matrix products: {_operations(inspection.flops)}"
    if inspection.nominal_seconds:
        text += f", {inspection.nominal_seconds / step:.0%} of the chip's peak rate"
    yield _line(text, f"{text}, those of recomputed values too")


def _operations(flops: float) -> str:
    """A number of operations, in the unit a person would use."""
    units = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
    size, unit = next((u for u in units if flops >= u[0]), (1, "FLOP"))
    return f"{flops / size:.4g} {unit}"


def _to_do(inspection: Inspection, plan: PlanRecord | None) -> list[str]:
    lines = [*_to_fit(inspection), *_against_hazards(inspection.hazards)]
    if plan is not None:
        lines += _of_the_plan(inspection, plan)
    if lines:
        return lines
    unknown = len(inspection.omissions)
    more = f"{count_of(unknown, 'thing')} could not be looked at: see Hazards."
    return [_big("Nothing found"), *([_line(more)] if unknown else [])]


def _of_the_plan(inspection: Inspection, plan: PlanRecord) -> Iterable[str]:
    """What only another budget changes."""
    if inspection.memory.device.total > plan.budget_bytes:
        least, origin = plan.search.smallest_budget, plan.search.smallest_budget_is
        known = f": {known_size(least, origin)}" if least else ""
        yield _line(f"Plan with a larger budget{known}")
    timeline = inspection.timeline
    waits = timeline.exposed_seconds > _LARGE * timeline.step_seconds
    if waits and not inspection.hazards:
        yield _line("A larger budget may move less and stall less")


def _to_fit(inspection: Inspection) -> Iterable[str]:
    """What would make a step fit that does not."""
    peak, has = inspection.peak, inspection.capacity_bytes
    if peak is None:
        return
    if text := smallest_text(peak, has):
        word = "No plan fits" if 0 < has < peak.smallest_budget else "Plan it"
        yield _line(f"{word}: {text}")
    else:
        ways = [way for way in peak.treatments if way.needs_bytes <= has]
        if ways:
            best = min(ways, key=lambda way: way.needs_bytes)
            leaves = format_bytes(best.needs_bytes)
            yield _line(f"{best.what.capitalize()}: leaves {leaves}, predicted")
    if text := advice(peak):
        yield _line(text)
    if peak.unknown:
        yield _line(f"No plan can be made: {peak.unknown}")


def _against_hazards(hazards: Sequence[Hazard]) -> Iterable[str]:
    """The worst kinds with the first clause of their remedy."""
    kinds = list(dict.fromkeys(hazard.kind for hazard in hazards))
    for kind in kinds[:_MOST_HAZARDS]:
        alike = [hazard for hazard in hazards if hazard.kind == kind]
        remedy = alike[0].remedy
        first = re.split(r"[.;] ", remedy)[0].rstrip(".")
        times = f" ({len(alike)} ×)" if len(alike) > 1 else ""
        yield (
            f'<p title="{escaped(remedy)}"><b>⚠ {escaped(kind)}{times}</b>: '
            f"{escaped(first)}.</p>"
        )
    if (more := len(kinds) - _MOST_HAZARDS) > 0:
        yield f'<p><a href="#hazards">and {count_of(more, "kind")} more</a></p>'


def legend_html(curve: MemoryCurve, loops: Sequence[Loop]) -> str:
    """Colour and pattern of each band in the order of the drawing, from the top down.

    The script writes the bytes beside them. A band that nobody could see is left out.
    """
    amounts = filled(curve, loops)
    items = "".join(
        f'<li>{swatch(band)}{escaped(band)} <span data-band="{escaped(band)}"></span>'
        "</li>"
        for band in reversed(bands_of(curve))
        if max(amount[band] for amount in amounts) >= curve.peak_bytes / 1000
    )
    label = "Device memory by role, and how much is there at the dashed line"
    return f'<ul class="legend" aria-label="{label}">{items}</ul>'
