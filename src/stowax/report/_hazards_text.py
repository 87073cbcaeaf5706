"""Hazards for a terminal: by kind, a few places of each, the remedy once.

And what was not looked for, with why: a report that finds nothing has to say where it
did not look.
"""

from collections.abc import Sequence

from .._records._inspection import Hazard, Omission
from .._units import format_seconds
from ._layout import count_of, facts

_MOST_HAZARDS = 4  # of one kind


def hazards_text(hazards: Sequence[Hazard], width: int) -> list[str]:
    """The hazards as lines of at most `width` columns."""
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


def omissions_text(omissions: Sequence[Omission], width: int) -> list[str]:
    """What the inspection says nothing about, as lines of at most `width` columns."""
    return facts(
        [("not known", f"{item.what}: {item.reason}") for item in omissions], width
    )
