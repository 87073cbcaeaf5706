"""A plan on one screen: does it fit, how fast, against what, what moves, and why.

`print(plan)` and `stowax plan` show it. Compiled figures are facts and predicted ones
are opinions, so they stand in rows of their own: the hand-written policies are
predictions and are compared with this plan's prediction, never with its compiled row.
"""

from collections.abc import Sequence

from .._plan_record import DecisionRecord, PlanRecord
from .._units import format_bytes, format_seconds
from ._decisions_text import decision_lines, stack_titles
from ._layout import count_of, cut, facts, lines_of, table, text_width

SCREEN = 40
"""Lines of a plan, where the number of stacks lets it: one screen."""

_MOST_BASELINES = 9  # two fewer for every stack: together they share a screen


def plan_text(record: PlanRecord, width: int | None = None) -> str:
    """The plan as text of at most `width` columns.

    **Arguments:** `width` in columns, by default the terminal's (80 where there is
    none); kept between 60 and 160.

    **Returns:** about one screen of lines, without colour codes.

    >>> print(plan_text(plan, width=80))  # doctest: +SKIP
    """
    columns = text_width(width)
    top = [*_headline(record, columns), "", *_comparison(record, columns)]
    bottom = facts(_certificate(record), columns)
    room = SCREEN - len(top) - len(bottom) - 2
    middle = decision_lines(record, columns, room)
    parts = [part for part in (top, middle, bottom) if part]
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(record: PlanRecord, width: int) -> list[str]:
    # A target that is not there has stand-ins for devices, whose kind says nothing.
    kind = "compile-only" if record.compile_only else record.device_kind
    step = record.step.rpartition("<locals>.")[2]
    budget = format_bytes(record.budget_bytes)
    used = format_bytes(record.device_bytes)
    if record.fits and record.outcome == "unneeded":
        verdict = f"FITS as it is: {used} of {budget} per device. Nothing moves."
    elif record.fits:
        share = record.device_bytes / max(record.budget_bytes, 1)
        verdict = (
            f"FITS: {used} of {budget} per device ({share:.0%}), "
            f"{_OUTCOMES[record.outcome]}."
        )
    elif record.outcome == "infeasible":
        verdict = (
            f"DOES NOT FIT {budget} per device, nor does anything else; "
            "the decisions below need the least."
        )
    else:
        verdict = f"DOES NOT FIT: compiled {used} per device, budget {budget}."
    text = [f"stowax plan for {step} on {record.target} ({kind})", verdict]
    if record.fits and record.outcome != "unneeded":
        text.append(_against_baselines(record))
    return [line for part in text if part for line in lines_of(part, width)]


_OUTCOMES = {
    "optimal": "optimal under the model",
    "feasible": "the best plan found in the time there was",
    "infeasible": "although the model said that nothing fits",
}


def _against_baselines(record: PlanRecord) -> str:
    if not record.baselines or not record.model_seconds:
        return ""
    fitting = [b for b in record.baselines if b.fits]
    if not fitting:
        return "No hand-written policy fits this budget."
    best = min(fitting, key=lambda b: b.seconds)
    change = 1 - record.model_seconds / best.seconds
    if abs(change) < 0.0005:
        return f"As fast as '{best.name}', the fastest hand-written policy that fits."
    faster = "faster" if change > 0 else "slower"
    return (
        f"Step predicted {abs(change):.1%} {faster} than '{best.name}', the fastest "
        "hand-written policy that fits."
    )


def _comparison(record: PlanRecord, width: int) -> list[str]:
    offloaded = sum(d.bytes * d.count for d in record.decisions if _moves(d))
    model = record.model_seconds
    rows = [
        (
            "▸ this plan, compiled",
            _size(record.device_bytes),
            _size(record.host_bytes),
            _time(record.step_seconds),
            "",
            _yes(record.fits),
        ),
        (
            "▸ this plan, predicted",
            _size(record.predicted_device_bytes),
            _size(offloaded),
            _time(model),
            "",
            _yes(record.predicted_device_bytes <= record.budget_bytes),
        ),
    ]
    ordered = sorted(record.baselines, key=lambda b: (not b.fits, b.seconds))
    most = max(3, _MOST_BASELINES - 2 * len(record.stacks))
    for baseline in ordered[:most]:
        change = f"{baseline.seconds / model - 1:+.1%}" if model else ""
        rows.append(
            (
                f"  {cut(baseline.name, width // 3)}",
                _size(baseline.device_bytes),
                _size(baseline.host_bytes),
                _time(baseline.seconds),
                change,
                _yes(baseline.fits),
            )
        )
    drawn = table(
        ("  per device", "device", "host", "step time", "vs plan", "fits"),
        rows,
        ("left", "right", "right", "right", "right", "left"),
    )
    lines = lines_of(drawn, width)
    if (more := len(ordered) - most) > 0:
        lines.append(f"  and {count_of(more, 'policy')} slower or larger")
    return lines


def _certificate(record: PlanRecord) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    moves = record.outcome != "unneeded"
    if not record.fits and record.smallest_budget:
        pairs.append(("it takes", _smallest(record)))
        pairs += [("in the way" * (i == 0), s) for i, s in enumerate(record.in_the_way)]
    if record.fits and moves:
        pairs.append(("step time", _step_time(record)))
        pairs.append(("bound", _bound(record)))
        if record.binding:
            pairs.append(("limited by", _binding(record)))
        elif record.device_bytes < 0.9 * record.budget_bytes:
            pairs.append(("left free", _left_free(record)))
        if record.seconds_per_gib > 0:
            pairs.append(_more_memory(record))
        if record.smallest_budget:
            pairs.append(("at least", _smallest(record)))
    for pin in record.pins:
        price = f"costs {format_seconds(pin.seconds)} per step"
        pairs.append(
            (
                "pin",
                f"{pin.pattern!r} to {pin.decision} "
                f"({count_of(pin.matched, 'value')}): "
                f"{price if pin.seconds > 0 else 'costs nothing'}",
            )
        )
    if record.unpriced:
        pairs.append(("not priced", _listed(record.unpriced, 6)))
    pairs += [("note", note) for note in record.notes]
    if record.donate_argnums:
        numbers = ", ".join(str(number) for number in record.donate_argnums)
        noun = "argument" if len(record.donate_argnums) == 1 else "arguments"
        pairs.append(("donated", f"{noun} {numbers}"))
    if record.trials:
        pairs.append(("compiled", _trials(record)))
    return pairs


def _step_time(record: PlanRecord) -> str:
    seconds = format_seconds(record.step_seconds)
    exposed = format_seconds(record.exposed_seconds)
    waiting = f", {exposed} of it waiting for host copies"
    return (
        f"{seconds} simulated from the compiled schedule"
        f"{waiting if record.exposed_seconds > 0 else ', no copy exposed'}"
    )


def _bound(record: PlanRecord) -> str:
    bound = format_seconds(record.bound_seconds)
    return f"no plan is faster than {bound} under the model; gap {record.gap:.2%}"


def _binding(record: PlanRecord) -> str:
    text = ", ".join(record.binding)
    for name, title in stack_titles(record).items():
        text = text.replace(name, title)
    return text


def _left_free(record: PlanRecord) -> str:
    free = format_bytes(record.budget_bytes - record.device_bytes)
    return f"{free}: storing more would take longer than computing it again"


def _more_memory(record: PlanRecord) -> tuple[str, str]:
    """What one more unit buys: one that is small beside the budget, as prices are."""
    of_gib, unit = (1, "GiB") if record.budget_bytes >= 4 * 2**30 else (2**10, "MiB")
    buys = format_seconds(record.seconds_per_gib / of_gib)
    return f"1 {unit} more", f"would save about {buys} of each step"


def _smallest(record: PlanRecord) -> str:
    return f"{format_bytes(record.smallest_budget)}: the smallest budget that works"


def _trials(record: PlanRecord) -> str:
    seconds = sum(trial.seconds_to_compile for trial in record.trials)
    sizes = " → ".join(format_bytes(t.compiled_bytes) for t in record.trials)
    return (
        f"{count_of(len(record.trials), 'program')} in {format_seconds(seconds)}: "
        f"{sizes} (first guess {format_bytes(record.first_predicted_device_bytes)}); "
        f"planned in {format_seconds(record.planning_seconds)}"
    )


def _listed(items: Sequence[str], most: int) -> str:
    more = len(items) - most
    text = ", ".join(items[:most])
    return f"{text} and {more} more" if more > 0 else text


def _moves(value: DecisionRecord) -> bool:
    return value.decision == "offload"


def _size(count: int) -> str:
    return format_bytes(count) if count else "–"


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "–"


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"
