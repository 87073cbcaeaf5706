"""The step as its user has it, beside the plan: compiled, or else predicted.

Compiled figures are compared with the plan's compiled ones, predicted with predicted.
"""

from .._records._plan import PlanRecord, SearchRecord
from .._units import format_bytes, format_seconds
from ._layout import or_dash

Row = tuple[str, ...]
_SAME = 0.0005  # of a step's time: less prints as 0.0 %


def against_written(record: PlanRecord) -> str:
    """What the plan costs or brings beside the step as it is, in a sentence."""
    search, written = record.search, record.search.written
    if written is None:
        return _against_foreseen(search)
    size = format_bytes(written.compiled_bytes)
    if not written.step_seconds or not record.step_seconds:
        return f"As written it needs {size}."
    change = _change(record.step_seconds, written.step_seconds)
    return f"As written it compiles to {size}; the plan {change or 'is as fast'}."


def _against_foreseen(search: SearchRecord) -> str:
    """The same by the model, which does not know all that the compiler fuses.

    So it takes the step as it is for slower than it is: that a plan is faster, only two
    compiled programs say.
    """
    needed, seconds = search.written_predicted_bytes, search.written_model_seconds
    if not needed:
        return ""
    needs = f"As written: {format_bytes(needed)} predicted"
    if not 0 < seconds * (1 - _SAME) <= search.model_seconds:
        return f"{needs}."
    change = _change(search.model_seconds, seconds)
    return f"{needs}; by the model the plan {change or 'is as fast'}."


def _change(seconds: float, written: float) -> str:
    change = seconds / written - 1
    if abs(change) < _SAME:
        return ""
    return f"takes {abs(change):.1%} {'longer' if change > 0 else 'less time'}"


def compiled_row(record: PlanRecord) -> list[Row]:
    """The step as it is, where it was compiled, as a row below the plan's."""
    written = record.search.written
    if written is None or record.outcome == "unneeded":
        return []
    fits = (
        written.compiled_bytes <= record.budget_bytes
        and written.host_bytes <= record.proof.host_budget_bytes
    )
    return [
        (
            "  as written, compiled",
            or_dash(format_bytes, written.compiled_bytes),
            or_dash(format_bytes, written.host_bytes),
            or_dash(format_seconds, written.step_seconds),
            "",
            yes_or_no(fits),
        )
    ]


def foreseen_row(record: PlanRecord) -> list[Row]:
    """The same where it was only predicted, below the plan's prediction."""
    search = record.search
    needed, seconds = search.written_predicted_bytes, search.written_model_seconds
    if not needed or record.outcome == "unneeded":
        return []
    both = seconds and search.model_seconds
    return [
        (
            "  as written, predicted",
            format_bytes(needed),
            "",
            or_dash(format_seconds, seconds),
            f"{seconds / search.model_seconds - 1:+.1%}" if both else "",
            yes_or_no(needed <= record.budget_bytes),
        )
    ]


def unlike_keep_all(search: SearchRecord) -> bool:
    """Whether a row "keep all" has other seconds than one of the step as it is.

    One was compiled, or the plan's layers run in another way than they are written.
    """
    known = search.written_model_seconds
    kept = [b.seconds for b in search.baselines if b.name == "keep all"]
    return search.written is not None or any(
        abs(seconds / known - 1) >= _SAME for seconds in kept if known
    )


def yes_or_no(fits: bool) -> str:
    """What a column of yes and no says."""
    return "yes" if fits else "no"
