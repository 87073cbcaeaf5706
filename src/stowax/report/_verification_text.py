"""What a verification found, for a terminal: the verdict, the leaves, who is to blame.

What is wrong stands first. Of what agrees, the leaves that come closest to what is
tolerated are shown: there the next machine or dtype would fail.
"""

from collections.abc import Iterable, Sequence

from .._records._verification import Blame, LeafCheck, Verification
from .._units import format_seconds
from ._layout import Align, count_of, facts, lines_of, short_source, table, text_width

_MOST_FAILED = 12
_MOST_RIGHT = 8
_ALL_COLUMNS = 120  # narrower, what does not tell leaves apart is left out
_CHANGE_COLUMN = 80  # narrower, what an error is to be held against is left out
_LONGEST_PATH = 24  # at 80 columns


def verification_text(record: Verification, width: int | None = None) -> str:
    """The verification as text of at most `width` columns.

    **Arguments:** `width` in columns, by default the terminal's (80 where there is
    none); kept between 60 and 160.

    >>> print(verification_text(found, width=80))  # doctest: +SKIP
    """
    columns = text_width(width)
    parts = [
        lines_of(_headline(record), columns),
        lines_of(_verdict(record), columns),
        _blame(record, columns),
        _leaves(record, columns),
        facts((("note", note) for note in record.notes), columns),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _headline(record: Verification) -> str:
    step = record.step.rpartition("<locals>.")[2]
    beside = (
        "" if record.reference == record.device else f", plain on {record.reference}"
    )
    return f"stowax verify: {step} under its plan for {record.target}, run on " + (
        f"{record.device}{beside}"
    )


def _verdict(record: Verification) -> str:
    ran = (
        f"{count_of(record.steps, 'step')} in a row, "
        f"{count_of(record.runs, 'program')}, {format_seconds(record.seconds)}"
    )
    leaves = count_of(len(record.leaves), "leaf").replace("leafs", "leaves")
    if record.passed:
        verb = "agrees" if len(record.leaves) == 1 else "agree"
        return f"PASSED: {leaves} {verb}, and two runs gave the same bits ({ran})."
    wrong = []
    if record.failed:
        wrong.append(f"{len(record.failed)} of {leaves} are wrong")
    if not record.repeatable:
        wrong.append("two runs on the same arguments differ")
    return f"FAILED: {', and '.join(wrong)} ({ran}). Do not train with this plan."


def _blame(record: Verification, width: int) -> list[str]:
    if not record.why:
        return []
    pairs = [
        ("to blame" if k == 0 else "", _named(b)) for k, b in enumerate(record.blamed)
    ]
    return facts([*pairs, ("" if pairs else "to blame", record.why)], width)


def _named(blame: Blame) -> str:
    source = short_source(blame.source)
    where = f" ({source})" if source and source not in blame.name else ""
    return f"{blame.decision} {blame.name}{where}"


def _leaves(record: Verification, width: int) -> list[str]:
    failed = list(record.failed)
    right = sorted((x for x in record.leaves if x.ok), key=_closeness, reverse=True)
    shown = [*failed[:_MOST_FAILED], *right[:_MOST_RIGHT]]
    wide = width >= _ALL_COLUMNS
    narrow = width < _CHANGE_COLUMN
    longest = _LONGEST_PATH + width - 80 + (12 if narrow else 0) - (26 if wide else 0)
    headers = ("leaf", "role", "type", "step", "error", "tolerated", "changed by")
    sides: Sequence[Align] = (
        *("left", "left", "left"),
        *("right", "right", "right", "right"),
    )
    without = set() if wide else {"type"}
    if narrow:
        without.add("changed by")
    rows = [_row(leaf, longest) for leaf in shown]
    lines = lines_of(table(headers, rows, sides, without=without), width)
    for title, all_of_them, most in (
        ("wrong", failed, _MOST_FAILED),
        ("that agree", right, _MOST_RIGHT),
    ):
        if len(all_of_them) > most:
            more = count_of(len(all_of_them) - most, "leaf").replace("leafs", "leaves")
            lines.append(f"and {more} more {title}")
    problems = [(_end(x.path, longest), why) for x in failed if (why := _why(x))]
    return [*lines, *_problems(problems, width)]


def _why(leaf: LeafCheck) -> str:
    """What is wrong with a leaf, if it is not the error of a single element."""
    alone = leaf.error is None or leaf.error > leaf.tolerance
    if alone or abs(leaf.bias) <= leaf.bias_tolerance:
        return leaf.problem
    side = "large" if leaf.bias > 0 else "small"
    return (
        f"its change is too {side} by {abs(leaf.bias):.1e} of itself, in all of it or "
        "in a slice of it along the first axis; "
        f"{leaf.bias_tolerance:.1e} is tolerated"
    )


def _problems(pairs: Sequence[tuple[str, str]], width: int) -> Iterable[str]:
    return ["", *facts(pairs[:_MOST_FAILED], width)] if pairs else []


def _closeness(leaf: LeafCheck) -> float:
    if not leaf.error:
        return 0.0
    if not leaf.tolerance:
        return 1.0
    leaning = abs(leaf.bias) / leaf.bias_tolerance if leaf.bias else 0.0
    return max(leaning, leaf.error / leaf.tolerance)


def _end(path: str, width: int) -> str:
    """A path in at most `width` characters; its end tells leaves apart."""
    return path if len(path) <= width else f"…{path[1 - width :]}"


def _row(leaf: LeafCheck, longest: int) -> tuple[str, ...]:
    error = "–" if leaf.error is None else f"{leaf.error:.1e}" if leaf.error else "0"
    mark = "" if leaf.ok else "✗ "
    return (
        mark + _end(leaf.path, longest - len(mark)),
        leaf.role,
        f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]",
        str(leaf.step),
        error,
        f"{leaf.tolerance:.1e}" if leaf.tolerance else "0",
        f"{leaf.change:.1e}" if leaf.change else "0",
    )
