"""Batch size against memory and time, for a terminal: what `stowax.fit` found."""

from collections.abc import Sequence

from .._records._fit import BatchTrial, FitRecord
from .._units import format_bytes, format_seconds
from ._layout import Align, count_of, lines_of, or_dash, table, text_width

_HEADERS = (
    *("", "batch", "way", "predicted", "compiled", "host", "step time"),
    *("items/s", "", "fits"),
)
_SIDES: Sequence[Align] = (
    *("left", "right", "left", "right", "right", "right", "right", "right"),
    *("left", "left"),
)
_ALL_COLUMNS = 96  # narrower, bars and the host's bytes are left out
_BAR = 12
_MOST_ROWS = 10
FRONT = "▸"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def fit_text(
    record: FitRecord, width: int | None = None, *, so_far: bool = False
) -> str:
    """The largest batches, and a line for each size that was looked at.

    **Arguments:** `record` is what `stowax.fit` returns, `width` is in columns, by
    default the terminal's; kept between 60 and 160. `so_far`: it is not finished, and
    says nothing of what was not found yet.

    **Returns:** lines without colour codes. What is on the front is marked: no other
    batch that fits is as large and takes as little time for a step. Of many sizes
    those are shown that something was compiled for.

    >>> print(fit_text(stowax.fit(...), width=80))  # doctest: +SKIP
    """
    columns = text_width(width)
    lines = lines_of(title_of(record), columns)
    for text in largest_of(record, so_far=so_far):
        lines += lines_of(text, columns)
    front, best = record.front, record.fastest
    fastest = best.per_second if best else 0.0
    shown = _shown(record)
    rows = [_row(trial, trial in front, fastest) for trial in shown]
    wide = columns >= _ALL_COLUMNS
    picked = [i for i in range(len(_HEADERS)) if wide or i not in (5, 8)]
    drawn = table(
        [_HEADERS[i] for i in picked],
        [[row[i] for i in picked] for row in rows],
        [_SIDES[i] for i in picked],
    )
    ended = "Interrupted after" if so_far else "Found in"
    below = (
        f"{FRONT} the front: no batch that fits is as large and takes as little time a "
        "step. Step time is simulated from XLA's compiled schedule; (in brackets) "
        "the planner's model of a step that was not compiled, to be compared with its "
        f"like only. {ended} {format_seconds(record.seconds)}."
    )
    body = lines_of(drawn, columns)
    if more := len({t.batch for t in record.trials} - {t.batch for t in shown}):
        body.append(f"and {count_of(more, 'size')} more, predicted only")
    return "\n".join([*lines, "", *body, "", *lines_of(below, columns)])


def title_of(record: FitRecord) -> str:
    """What was asked, in a line."""
    step = record.step.rpartition("<locals>.")[2]
    kind = " (compile-only)" if record.compile_only else ""
    budget = format_bytes(record.budget_bytes)
    return f"stowax fit of {step} on {record.target}{kind}, {budget} per device"


def largest_of(record: FitRecord, *, so_far: bool = False) -> list[str]:
    """The largest batches that fit, a sentence for each way."""
    if so_far and not record.largest:
        return ["So far nothing was compiled that fits."]
    known = " so far" if so_far else ""
    plain = _largest(record.largest_as_written, record.next_as_written)
    planned = _largest(record.largest, record.next)
    gain = ""
    if record.largest_as_written and record.largest > record.largest_as_written:
        gain = f", {record.largest / record.largest_as_written:.3g} times as many"
    lines = [
        f"Largest batch as written{known}: {plain}.",
        f"Largest batch under a plan{known}: {planned}{gain}.",
    ]
    if best := record.fastest:
        way = "under a plan" if best.way == "plan" else best.way
        lines.append(
            f"Most items a second: {_rate(best.per_second)}, with {best.batch} {way}."
        )
    return lines


def _shown(record: FitRecord) -> list[BatchTrial]:
    """All trials, or of many those of the sizes that something was compiled for."""
    trials = list(record.trials)
    compiled = {trial.batch for trial in trials if trial.compiled}
    if len(trials) <= _MOST_ROWS or not compiled:
        return trials
    return [t for t in trials if t.compiled or (t.batch in compiled and not t.fits)]


def _largest(batch: int, beyond: int) -> str:
    after = f" ({beyond} does not fit)" if beyond else ""
    return f"{batch}{after}" if batch else f"none{after}"


def _row(trial: BatchTrial, on_front: bool, fastest: float) -> list[str]:
    seconds = or_dash(format_seconds, trial.step_seconds)
    if not trial.compiled and trial.predicted_seconds:
        seconds = f"({format_seconds(trial.predicted_seconds)})"
    return [
        FRONT if on_front else "",
        f"{trial.batch}",
        trial.way,
        format_bytes(trial.predicted_bytes),
        or_dash(format_bytes, trial.device_bytes),
        or_dash(format_bytes, trial.host_bytes),
        seconds,
        or_dash(_rate, trial.per_second),
        _bar(trial.per_second / fastest) if fastest and trial.fits else "",
        _verdict(trial),
    ]


def _rate(per_second: float) -> str:
    """A number of items with four digits or so."""
    return f"{per_second:.4g}" if per_second < 1e4 else f"{per_second:,.0f}"


def _bar(share: float) -> str:
    """A bar as long as the share of the fastest, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * _BAR * 8)
    whole, rest = divmod(eighths, 8)
    return f"{'█' * whole}{_EIGHTHS[rest] if rest else ''}"


def _verdict(trial: BatchTrial) -> str:
    if trial.compiled:
        return "yes" if trial.fits else "no"
    return "should" if trial.fits else "no (predicted)"
