"""Plans for several budgets, side by side: what more memory buys."""

from collections.abc import Sequence

from .._errors import ArgumentError
from .._records._plan import PlanRecord
from .._units import format_bytes, format_seconds
from ._layout import Align, lines_of, or_dash, table, text_width
from ._plan_text import smallest_text

_HEADERS = ("budget", "device", "host", "step time", "waiting", "vs least", "fits")
_SIDES: Sequence[Align] = (
    *("right", "right", "right", "right", "right", "right"),
    "left",
)
_ALL_COLUMNS = 80  # narrower, two columns fewer are better than figures cut short
_LEFT_OUT = ("host", "waiting")


def budgets_text(records: Sequence[PlanRecord], width: int | None = None) -> str:
    """Plans of one step for several budgets as a table, the smallest budget first.

    **Arguments:** `records` are what `stowax.plans` returns, `width` is in columns, by
    default the terminal's; kept between 60 and 160.

    **Returns:** a line per budget: bytes per device and of the host, seconds of the
    step as simulated from its compiled schedule, how many of them wait for host copies,
    and the change against the smallest budget that has a plan.

    **Raises:** `ArgumentError` if there is no plan.

    >>> print(budgets_text(stowax.plans(...), width=80))  # doctest: +SKIP
    """
    if not records:
        raise ArgumentError("records", "no plan", "Give what stowax.plans returns.")
    columns = text_width(width)
    ordered = sorted(records, key=lambda record: record.budget_bytes)
    least = next((r for r in ordered if r.fits and r.step_seconds), None)
    rows = [_row(record, least) for record in ordered]
    wide = columns >= _ALL_COLUMNS
    drawn = table(_HEADERS, rows, _SIDES, without=() if wide else _LEFT_OUT)
    first = ordered[0].program
    step = first.step.rpartition("<locals>.")[2]
    kind = "compile-only" if first.compile_only else first.device_kind
    seconds = sum(record.search.planning_seconds for record in ordered)
    title = f"stowax plans for {step} on {first.target} ({kind}), per device"
    waiting = "; waiting: of it, for host copies" if wide else ""
    below = (
        f"step time: simulated from XLA's compiled schedule{waiting}. Planned in "
        f"{format_seconds(seconds)}."
    )
    lines = [*lines_of(title, columns), *lines_of(drawn, columns)]
    if not ordered[0].fits:
        one = min(ordered, key=lambda record: record.smallest_budget)
        lines += lines_of(smallest_text(one.search), columns)
    return "\n".join([*lines, *lines_of(below, columns)])


def _row(record: PlanRecord, least: PlanRecord | None) -> tuple[str, ...]:
    change = ""
    if least is not None and record is not least and record.fits:
        change = f"{record.step_seconds / least.step_seconds - 1:+.1%}"
    return (
        format_bytes(record.budget_bytes),
        format_bytes(record.device_bytes),
        or_dash(format_bytes, record.host_bytes),
        or_dash(format_seconds, record.step_seconds),
        or_dash(format_seconds, record.proof.exposed_seconds),
        change,
        _verdict(record),
    )


def _verdict(record: PlanRecord) -> str:
    if not record.fits:
        return "no"
    return "as it is" if record.outcome == "unneeded" else "yes"
