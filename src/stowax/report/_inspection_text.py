"""What a compiled program does, for a terminal: memory, time, copies, hazards.

`stowax inspect` shows it. Copies come in dozens that differ in nothing but their
number, so they are grouped by direction, manner and source line; totals stand per
direction.
"""

from collections.abc import Iterable, Mapping, Sequence

from .._records._inspection import Hazard, Inspection, MemoryUse, Omission
from .._records._program import Transfer
from .._records._timeline import Timeline
from .._units import format_bytes, format_seconds
from ._layout import (
    count_of,
    cut,
    facts,
    lines_of,
    or_dash,
    short_source,
    table,
    text_width,
)
from ._memory_text import memory_text
from ._peak_text import peak_text
from ._times import busy_in, parts_of

_MOST_TRANSFERS = 5  # groups per direction
_MOST_UNPRICED = 4
_MOST_HAZARDS = 4  # of one kind
_ALL_COLUMNS = 80  # narrower, the memory table stands on its side

DIRECTIONS: Mapping[str, str] = {
    "device-to-host": "to host",
    "host-to-device": "to device",
    "host-to-host": "in host",
}


def inspection_text(inspection: Inspection, width: int | None = None) -> str:
    """The inspection as text of at most `width` columns.

    **Arguments:** `width` in columns, by default the terminal's (80 where there is
    none); kept between 60 and 160.

    >>> step = jax.jit(lambda x: x @ x)
    >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> found = stowax.inspect(step, x, target="v5e-4")
    >>> print(inspection_text(found, width=80).splitlines()[0])
    jit__lambda on v5e-4: 8.00 MiB of device memory, 0 hazards
    """
    columns = text_width(width)
    peak = _peak(inspection, columns)
    top = [*_headline(inspection, columns), "", *_memory(inspection, columns)]
    if inspection.refusal:
        words = [("compiler", inspection.refusal)]
        below = [*facts(words, columns), *_omissions(inspection.omissions, columns)]
        return "\n\n".join("\n".join(part) for part in (top, peak, below) if part)
    parts = [
        top,
        peak,
        facts(_time(inspection.timeline, inspection.flops), columns),
        memory_text(inspection.memory_timeline, columns)
        if inspection.memory_timeline
        else [],
        [
            *_transfers(inspection.transfers, columns),
            *facts(_agreement(inspection), columns),
        ],
        _hazards(inspection.hazards, columns),
        [
            *_omissions(inspection.omissions, columns),
            *_small_print(inspection.timeline, columns),
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _peak(inspection: Inspection, width: int) -> list[str]:
    if inspection.peak is None:
        return []
    return peak_text(inspection.peak, width, inspection.capacity_bytes)


def fits_text(inspection: Inspection) -> str:
    """Whether the step fits on a device, with what that has; empty: not known."""
    fits = inspection.fits
    if fits is None:
        return ""
    needs = format_bytes(inspection.memory.device.total)
    has = format_bytes(inspection.capacity_bytes)
    if inspection.refusal:
        needs = f"{needs} (predicted; the compiler refused the program)"
    elif fits:
        share = inspection.memory.device.total / max(inspection.capacity_bytes, 1)
        return f"FITS: {needs} of the {has} that a device has ({share:.0%})."
    return f"DOES NOT FIT: it needs {needs}, and a device has {has}."


def _headline(inspection: Inspection, width: int) -> list[str]:
    memory = inspection.memory
    if inspection.refusal:
        line = f"{inspection.program} on {inspection.target}: nothing compiled"
        return [*lines_of(line, width), *lines_of(fits_text(inspection), width)]
    host = (
        f" and {format_bytes(memory.host.total)} of host" if memory.host.total else ""
    )
    line = (
        f"{inspection.program} on {inspection.target}: "
        f"{format_bytes(memory.device.total)} of device{host} memory, "
        f"{count_of(len(inspection.hazards), 'hazard')}"
    )
    verdict = fits_text(inspection)
    return [*lines_of(line, width), *(lines_of(verdict, width) if verdict else [])]


def _memory(inspection: Inspection, width: int) -> list[str]:
    memory = inspection.memory
    rows = [_memory_row("device", memory.device), _memory_row("host", memory.host)]
    headers = ("per device", "arguments", "outputs", "donated", "temporary", "total")
    if width < _ALL_COLUMNS:
        headers, *rows = zip(headers, *rows, strict=True)  # one line per figure
    return lines_of(table(headers, rows), width)


def _memory_row(kind: str, use: MemoryUse) -> tuple[str, ...]:
    figures = (use.argument, use.output, -use.alias, use.temp, use.total)
    return (kind, *(or_dash(format_bytes, figure) for figure in figures))


def _time(timeline: Timeline, flops: float) -> Iterable[tuple[str, str]]:
    origin = "the compiled schedule" if timeline.origin == "simulated" else "a trace"
    yield (
        "step",
        f"{format_seconds(timeline.step_seconds)}, {timeline.origin} from {origin}",
    )
    at_work = [part for part in parts_of(timeline) if part[0] != "idle"]
    for title, times in (("of which", at_work), ("links busy", busy_in(timeline))):
        if parts := [f"{what} {format_seconds(s)}" for what, s in times if s]:
            yield title, ", ".join(parts)
    if flops:
        yield "products", f"{flops / 1e12:.4g} TFLOP of matrix products per step"


def _transfers(transfers: Sequence[Transfer], width: int) -> list[str]:
    if not transfers:
        return ["No copies between device and host."]
    rows: list[tuple[str, ...]] = []
    for direction, title in DIRECTIONS.items():
        chosen = [t for t in transfers if t.direction == direction]
        if chosen:
            rows += _direction_rows(title, chosen, width - 48)
    headers = ("copies", "per step", "number", "manner", "what")
    sides = ("left", "right", "right", "left", "left")
    return lines_of(table(headers, rows, sides), width)


def _agreement(inspection: Inspection) -> Iterable[tuple[str, str]]:
    """Whether a plan's copies are in the program, and which copies serve no plan."""
    checks = inspection.copies
    if not checks:
        return
    whole = sum(check.as_planned for check in checks)
    number = count_of(len(checks), "offloaded value")
    yield "as planned", f"{whole} of {number} copied out and back"
    for check in checks:
        if not check.as_planned:
            moved = f"{format_bytes(check.out_bytes)} out, "
            moved += f"{format_bytes(check.in_bytes)} in"
            wanted = format_bytes(check.planned_bytes)
            yield "not so", f"{check.name}: {moved}, {wanted} planned each way"
    others = [t for t in inspection.transfers if not t.serves]
    if others:
        much = format_bytes(sum(t.total_bytes for t in others))
        yield "not planned", f"{count_of(len(others), 'copy')}, {much} a step"


def _direction_rows(
    title: str, transfers: Sequence[Transfer], width: int
) -> Iterable[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Transfer]] = {}
    for transfer in transfers:
        manner = "asynchronous" if transfer.asynchronous else "synchronous"
        groups.setdefault((manner, _what(transfer)), []).append(transfer)
    ordered = sorted(groups.items(), key=lambda item: -_bytes(item[1]))
    if len(ordered) > 1:
        yield _transfer_row(title, transfers, "", "all")
        title = ""
    for (manner, what), alike in ordered[:_MOST_TRANSFERS]:
        yield _transfer_row(title, alike, manner, cut(what, width))
    rest = [t for _, alike in ordered[_MOST_TRANSFERS:] for t in alike]
    if rest:
        yield _transfer_row("", rest, "", "smaller ones")


def _transfer_row(
    title: str, transfers: Sequence[Transfer], manner: str, what: str
) -> tuple[str, ...]:
    number = sum(transfer.trips for transfer in transfers)
    return (title, format_bytes(_bytes(transfers)), f"{number:g} ×", manner, what)


def _bytes(transfers: Iterable[Transfer]) -> int:
    return sum(transfer.total_bytes for transfer in transfers)


def _what(transfer: Transfer) -> str:
    if transfer.serves:
        return transfer.serves
    named = transfer.op_name.rpartition("/")[2] or transfer.start
    source = short_source(transfer.source)
    return f"{source} ({named})" if source else named


def _hazards(hazards: Sequence[Hazard], width: int) -> list[str]:
    """By kind, a few places of each, the remedy once."""
    if not hazards:
        return ["No hazards found."]
    lines: list[str] = []
    for kind in dict.fromkeys(hazard.kind for hazard in hazards):
        alike = [hazard for hazard in hazards if hazard.kind == kind]
        lines += [""] if lines else []
        lines.append(f"HAZARD {kind}, {count_of(len(alike), 'place')}")
        lines += facts(_of_a_kind(alike), width)
    return lines


def _of_a_kind(alike: Sequence[Hazard]) -> list[tuple[str, str]]:
    pairs = [("  what", alike[0].what)] if alike[0].what else []
    for hazard in alike[:_MOST_HAZARDS]:
        pairs += [("  where", hazard.where), ("  cost", hazard.cost)]
    if rest := alike[_MOST_HAZARDS:]:
        seconds = sum(hazard.seconds for hazard in rest)
        cost = f", {format_seconds(seconds)}" if seconds else ""
        pairs.append(("", f"and {count_of(len(rest), 'place')} more{cost}"))
    remedies = dict.fromkeys(hazard.remedy for hazard in alike)
    return [*pairs, *(("  remedy", remedy) for remedy in remedies)]


def _omissions(omissions: Sequence[Omission], width: int) -> list[str]:
    """What was not looked for, with why: a report that finds nothing has to say so."""
    return facts(
        [("not known", f"{item.what}: {item.reason}") for item in omissions], width
    )


def _small_print(timeline: Timeline, width: int) -> list[str]:
    pairs: list[tuple[str, str]] = []
    unpriced = sorted(timeline.unpriced, key=lambda item: -item.seconds)
    for item in unpriced[:_MOST_UNPRICED]:
        pairs.append(
            (
                "not priced",
                f"{item.what}, {item.count:g} × per step: {item.reason}; taken to cost "
                f"{format_seconds(item.seconds)}",
            )
        )
    if rest := unpriced[_MOST_UNPRICED:]:
        seconds = format_seconds(sum(item.seconds for item in rest))
        pairs.append(("not priced", f"{len(rest)} more, taken to cost {seconds}"))
    pairs += [("assumed", assumption) for assumption in timeline.assumptions]
    return facts(pairs, width)
