"""A plan on one screen: does it fit, how fast, against what, what moves, and why.

`print(plan)` and `stowax plan` show it. Compiled figures are facts and predicted ones
are opinions, so they stand in rows of their own: the hand-written policies are
predictions and are compared with this plan's prediction, never with its compiled row.
"""

import dataclasses
import textwrap
from collections.abc import Sequence

from .._plan_record import DecisionRecord, PlanRecord, StackRecord
from .._units import format_bytes, format_seconds
from ._layout import count_of, cut, facts, lines_of, short_source, table, text_width

SCREEN = 40
"""Lines of a plan, where the number of stacks lets it: one screen."""

_LEAST_GROUPS = 2  # shown per stack, however little room there is
_MOST_BASELINES = 8  # all stacks and baselines together share a screen
_WIDE = 110  # from here on a decision and its reason share a line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Values of one stack that look alike and go the same way."""

    decision: str
    name: str
    arrays: int
    bytes: int
    reason: str


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
    middle = _decisions(record, columns, room)
    parts = [part for part in (top, middle, bottom) if part]
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(record: PlanRecord, width: int) -> list[str]:
    where = f"{record.target} ({record.device_kind}"
    where += ", compile-only)" if record.compile_only else ")"
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
    text = [f"stowax plan for {record.step} on {where}", verdict]
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
    most = max(3, _MOST_BASELINES - len(record.stacks))
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


def _decisions(record: PlanRecord, width: int, room: int) -> list[str]:
    if not record.decisions:
        return []
    if all(d.decision == "keep" for d in record.decisions):
        kept = sum(d.count * d.bytes for d in record.decisions)
        return lines_of(
            f"All {count_of(len(record.decisions), 'value')} that the backward pass "
            f"reads stay on the device ({format_bytes(kept)}).",
            width,
        )
    names = list(dict.fromkeys(d.stack for d in record.decisions))
    stacks = {stack.name: stack for stack in record.stacks}
    lines: list[str] = []
    for position, name in enumerate(names):
        values = [d for d in record.decisions if d.stack == name]
        lines += [""] if lines else []
        lines += _stack_header(name, stacks.get(name), width)
        left = (room - len(lines)) // (len(names) - position)
        lines += _stack_groups(values, left, width)
    return lines


def _stack_header(name: str, stack: StackRecord | None, width: int) -> list[str]:
    if stack is None:
        return lines_of(f"{name or 'outside the stacks'}:", width)
    kind = "unrolled loop" if stack.unrolled else "scan"
    where = f", {short_source(stack.source)}" if stack.source else ""
    forward, backward = stack.forward_window_used, stack.backward_window_used
    times = (
        f"forward {format_seconds(stack.forward_seconds)} a layer"
        + (f" (copies fill {forward:.0%})" if forward else "")
        + f", backward {format_seconds(stack.backward_seconds)}"
        + (f" ({backward:.0%})" if backward else "")
    )
    head = f"{stack.name}: {count_of(stack.count, 'layer')} ({kind}{where})"
    if len(head) + len(times) + 2 <= width:
        return [f"{head}; {times}"]
    return [*lines_of(head, width), *lines_of(f"  {times}", width)]


def _stack_groups(values: Sequence[DecisionRecord], room: int, width: int) -> list[str]:
    """As many groups as `room` lines hold, the reasons whole if all of them fit."""
    groups = _grouped(values)
    lines = _drawn_groups(groups, width, reason_lines=2)
    shown = len(groups)
    while len(lines) > room and shown >= _LEAST_GROUPS:
        lines = _drawn_groups(groups[:shown], width, reason_lines=1)
        if folded := groups[shown:]:
            lines += _fold(folded, values, width)
        shown -= 1
    return lines


def _drawn_groups(
    groups: Sequence[_Group], width: int, *, reason_lines: int
) -> list[str]:
    wide = width >= _WIDE
    # Indent, decision, size and number of arrays, with the gaps between the columns.
    room = width - 2 - 11 - 12 - 2 - max(len(f"{g.arrays} ×") for g in groups)
    room_for_name = room * 2 // 5 if wide else room
    names = [cut(group.name, room_for_name) for group in groups]
    if wide:
        room -= max(map(len, names)) + 2
    rows = []
    for group, name in zip(groups, names, strict=True):
        size = format_bytes(group.bytes)
        row = (group.decision, size, f"{group.arrays} ×", name)
        reasons = _folded_text(group.reason, room - (0 if wide else 2), reason_lines)
        if wide:
            rows.append((*row, reasons[0] if reasons else ""))
            rows += [("", "", "", "", more) for more in reasons[1:]]
        else:
            rows.append(row)
            rows += [("", "", "", f"  {reason}") for reason in reasons]
    sides = ("left", "right", "right", "left", "left")[: 5 if wide else 4]
    return lines_of(table(("",) * len(sides), rows, sides, indent=2), width)


def _folded_text(text: str, width: int, most: int) -> list[str]:
    """`text` in at most `most` lines, the end marked where some is missing."""
    lines = textwrap.wrap(text, width)
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), width)]
    return lines


def _grouped(values: Sequence[DecisionRecord]) -> list[_Group]:
    together: dict[tuple[str, ...], list[DecisionRecord]] = {}
    for value in values:
        together.setdefault((value.decision, value.name, value.source), []).append(
            value
        )
    groups = [_group(alike) for alike in together.values()]
    return sorted(groups, key=lambda group: -group.bytes)


def _group(alike: Sequence[DecisionRecord]) -> _Group:
    largest = max(alike, key=lambda value: value.bytes)
    source = short_source(largest.source)
    named = largest.name
    if source and source not in named:
        named = f"{named} ({source})"
    reason = largest.reason
    if largest.pinned is not None:
        reason = f"pinned by {largest.pinned!r}" + (f"; {reason}" if reason else "")
    return _Group(
        decision=largest.decision,
        name=named,
        arrays=sum(value.count for value in alike),
        bytes=sum(value.count * value.bytes for value in alike),
        reason=reason,
    )


def _fold(
    folded: Sequence[_Group], values: Sequence[DecisionRecord], width: int
) -> list[str]:
    layers = max(value.count for value in values)
    parts = []
    for decision in ("offload", "keep", "recompute"):
        of_it = [group for group in folded if group.decision == decision]
        if of_it:
            number = sum(group.arrays for group in of_it) / layers
            size = format_bytes(sum(group.bytes for group in of_it))
            parts.append(f"{number:g} {decision}, {size}")
    total = sum(group.arrays for group in folded) / layers
    text = f"and {count_of(total, 'smaller value')}: {'; '.join(parts)}"
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


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
            pairs.append(("limited by", ", ".join(record.binding)))
        if record.seconds_per_gib > 0:
            buys = format_seconds(record.seconds_per_gib)
            pairs.append(("1 GiB more", f"would save about {buys} of each step"))
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
