"""The machines that can be planned for, with their figures and where these are from.

`stowax targets` shows it. A figure without its origin invites trust that it may not
deserve, so a mark stands beside every one that no maker's page gives.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from .._hardware._calibrated import calibrated
from .._hardware._figures import GB, GIB, TERA, Chip, Figure, unknown
from .._records._calibration import CalibrationRecord
from ._layout import Align, count_of, facts, lines_of, table, text_width

MARKS = {"quoted": " ", "measured": "*", "assumed": "~", "unknown": " "}
"""The mark behind a figure, by its kind; the legend says what it means."""

_LEGEND = (
    "* measured   ~ assumed or derived   ? unknown   no mark: the maker's own figure"
)

_UNITS = {
    "bytes": (GIB, "GiB"),
    "bytes/second": (GB, "GB/s"),
    "operations/second": (TERA, "TFLOP/s"),
    "hertz": (1e9, "GHz"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One chip in the list of targets: what may be written, and its main figures.

    `measured` is what was measured of attached ones here, by the target's name; `notes`
    what there is of that and is not used.
    """

    chip: Chip
    names: tuple[str, ...]
    attached: bool
    measured: tuple[tuple[str, CalibrationRecord], ...] = ()
    notes: tuple[str, ...] = ()


def targets_text(rows: Sequence[TargetRow], width: int | None = None) -> str:
    """All machines in one table, then the source of every figure in it.

    **Arguments:** `rows` as `_target.targets_table()` makes them; `width` in columns,
    by default the terminal's, kept between 60 and 160.

    >>> from stowax._target._target import targets_table
    >>> "v5p-8" in targets_text(targets_table(), width=80)
    True
    """
    columns = text_width(width)
    headers = (
        "write",
        "memory\nGiB",
        "memory\nGB/s",
        "bfloat16\nTFLOP/s",
        "link out\nGB/s",
        "link in\nGB/s",
        "host\nGiB",
    )
    drawn = [line for row in rows for line in _table_rows(row)]
    lines = lines_of(table(headers, drawn), columns)
    lines += ["", *lines_of(_LEGEND, columns)]
    lines += lines_of(
        "Memory is what the compiler or JAX allows one device; the rest is per chip; "
        "host is the usual machine's memory shared out. All figures of one machine: "
        "stowax targets NAME.",
        columns,
    )
    lines += [line for row in rows for line in _measured_lines(row, columns)]
    lines += ["", "Sources (read " + _dates(rows) + ")"]
    lines += facts(_sources(rows), columns)
    return "\n".join(lines)


def target_text(row: TargetRow, width: int | None = None) -> str:
    """Every figure of one machine with its kind and source.

    >>> from stowax._target._target import targets_table
    >>> row = next(r for r in targets_table() if "h200" in r.names)
    >>> print(target_text(row, width=80).splitlines()[0])
    H200 SXM: h200 … x256
    """
    columns = text_width(width)
    attached = ", attached" if row.attached else ""
    head = f"{row.chip.title}: {', '.join(_spans(row.names))}{attached}"
    here = [dict(calibrated(row.chip, found).figures()) for _, found in row.measured]
    quoted = dict(row.chip.figures())
    names = list(dict.fromkeys(name for given in (*here, quoted) for name in given))
    drawn = []
    for name in names:
        figure = quoted.get(name, _NONE)
        own = [given.get(name, _NONE) for given in here]
        shown = [_number(f) if f.known and f != figure else "" for f in own]
        unit = _unit(next((f for f in (figure, *own) if f.known), figure))
        drawn.append((name, _number(figure), *shown, unit, figure.kind, figure.source))
    empty = ("",) * len(here)
    drawn.append(("chips per host", f"{row.chip.chips_per_host}", *empty, "", "", ""))
    columns_here = tuple(f"{name}\nhere" for name, _ in row.measured)
    headers = ("figure", "value", *columns_here, "", "kind", "source")
    sides: tuple[Align, ...] = (
        *("left", "right"),
        *("right" for _ in here),
        *("left", "left", "left"),
    )
    flexible = len(headers) - 1
    lines = lines_of(head, columns)
    lines += ["", *lines_of(table(headers, drawn, sides, flexible=flexible), columns)]
    lines += _measured_lines(row, columns)
    return "\n".join(lines)


def _table_rows(row: TargetRow) -> Iterable[tuple[str, ...]]:
    chip = row.chip
    spans = _spans(row.names)
    attached = " (attached)" if row.attached else ""
    host = chip.host_bytes
    shared = (
        "?" if host.value is None else f"{host.value / GIB / chip.chips_per_host:.0f}"
    )
    shown = _shown(chip)
    cells = [_cell(figure) for name, figure in shown.items() if name != "host"]
    yield (spans[0] + attached, *cells, shared + MARKS[host.kind])
    for name, found in row.measured:
        own = _shown(calibrated(chip, found))
        cells = [
            _cell(figure) if figure != shown[title] else ""
            for title, figure in own.items()
            if title != "host"
        ]
        yield (f"  {name} as measured", *cells, "")
    for span in spans[1:]:
        yield (span, *[""] * 6)


_NONE = unknown("bytes/second")


def _measured_lines(row: TargetRow, columns: int) -> list[str]:
    """What was measured on this machine, or that nothing was."""
    said = []
    for name, found in row.measured:
        busy = count_of(found.device_count, "device")
        together = " at once" * (found.device_count > 1)
        said.append(
            f"{name} was measured on {found.date[:10]}, {busy}{together} (stowax "
            "calibrate measures again)."
        )
    said += [f"Note: {note}." for note in row.notes]
    if row.attached and not said:
        said.append(
            "Nothing was measured here yet: stowax calibrate does, in two minutes."
        )
    return [line for text in said for line in ["", *lines_of(text, columns)]]


def _best(sustained: Figure, nominal: Figure) -> Figure:
    """What is known to be left of the link, or else what its maker promises."""
    return sustained if sustained.known else nominal


def _cell(figure: Figure) -> str:
    return _number(figure) + MARKS[figure.kind]


def _number(figure: Figure) -> str:
    if figure.value is None:
        return "?"
    number = figure.value / _UNITS[figure.unit][0]
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _unit(figure: Figure) -> str:
    return _UNITS[figure.unit][1] if figure.known else ""


def _spans(names: Sequence[str]) -> list[str]:
    """`v5p-8 … -4096` of a family of names; one entry per family.

    A family's members differ in the number at their end.
    """
    families: dict[str, list[str]] = {}
    for name in names:
        stem = name.rstrip("0123456789")
        single = f"{name}x"
        family = single if any(n.startswith(single) for n in names) else stem
        families.setdefault(family, []).append(name)
    spans = []
    for family, members in families.items():
        first, last = members[0], members[-1]
        # The part of the name from the separator on: -4096 of v5p-4096.
        tail = last[len(family) - 1 :]
        spans.append(first if len(members) == 1 else f"{first} … {tail}")
    return spans


def _sources(rows: Sequence[TargetRow]) -> Iterable[tuple[str, str]]:
    """Every source of the table's figures, with the figures and machines it is for."""
    together: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        for name, figure in _shown(row.chip).items():
            named = together.setdefault((figure.kind, figure.source), {})
            named.setdefault(name, []).append(row.chip.key)
    for (kind, source), named in together.items():
        machines = dict.fromkeys(key for keys in named.values() for key in keys)
        yield ", ".join(named), f"{', '.join(machines)}: {kind}, {source}"


def _shown(chip: Chip) -> dict[str, Figure]:
    return {
        "memory": chip.allowed_bytes,
        "bandwidth": chip.memory_bandwidth,
        "bfloat16": dict(chip.matrix)["bfloat16"],
        "link out": _best(chip.sustained_out, chip.link_out),
        "link in": _best(chip.sustained_in, chip.link_in),
        "host": chip.host_bytes,
    }


def _dates(rows: Sequence[TargetRow]) -> str:
    dates = {figure.date for row in rows for _, figure in row.chip.figures()}
    return ", ".join(sorted(dates))
