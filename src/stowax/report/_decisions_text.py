"""The decisions of a plan, so that a person sees the shape of them.

Per stack: values with the same name, source and decision are one group; the largest of
every decision are shown, with the reason, and the rest is folded into one line with its
totals.
"""

import collections
import dataclasses
import textwrap
from collections.abc import Sequence

from .._records._plan import DecisionRecord, PlanRecord, StackRecord
from .._units import format_bytes, format_ratio, format_seconds
from ._layout import count_of, cut, cut_paths, lines_of, short_source, table

_SEGMENTS = "segments"
"""Stands for the names of all segments: they are one block of the text."""

_STRAIGHT = "straight-line code"
"""What the text calls them."""

_LEAST_GROUPS = 3  # shown per stack, however little room there is: one per decision
_WIDE = 110  # from here on a decision and its reason share a line


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Values of one stack that look alike and go the same way."""

    decision: str
    name: str
    values: int
    arrays: int
    bytes: int
    reason: str


def decision_lines(record: PlanRecord, width: int, room: int) -> list[str]:
    """The decisions of every stack, in about `room` lines of at most `width` columns.

    >>> decision_lines(plan, width=80, room=20)  # doctest: +SKIP
    """
    if not record.decisions:
        return []
    if all(d.decision == "keep" for d in record.decisions):
        kept = sum(d.count * d.bytes for d in record.decisions)
        return lines_of(
            f"All {count_of(len(record.decisions), 'value')} that the backward pass "
            f"reads stay on the device ({format_bytes(kept)}).",
            width,
        )
    stacks = {stack.name: stack for stack in record.program.stacks}
    segments = [stack for stack in record.program.stacks if stack.segment]
    inside = {stack.name: _SEGMENTS for stack in segments}
    names = list(dict.fromkeys(inside.get(d.stack, d.stack) for d in record.decisions))
    titles = stack_titles(record)
    lines: list[str] = []
    for position, name in enumerate(names):
        values = [d for d in record.decisions if inside.get(d.stack, d.stack) == name]
        lines += [""] if lines else []
        if name == _SEGMENTS:
            lines += _segments_header(segments, width)
        else:
            lines += _stack_header(titles.get(name, name), stacks.get(name), width)
        left = (room - len(lines)) // (len(names) - position)
        lines += _stack_groups(values, left, width)
    return lines


def stack_titles(record: PlanRecord) -> dict[str, str]:
    """What each stack is called here: its source line; its own name is a fingerprint.

    Segments are one block of the text, and have one name.

    >>> stack_titles(plan)  # doctest: +SKIP
    {'501e0c86.0-7f': 'model.py:88'}
    """
    titles = {
        stack.name: short_source(stack.source) or f"stack {number}"
        for number, stack in enumerate(record.program.stacks, start=1)
        if not stack.segment
    }
    shared = collections.Counter(titles.values())
    found = {stack.name: _STRAIGHT for stack in record.program.stacks}
    counted = collections.Counter[str]()
    for name, title in titles.items():
        counted[title] += 1
        found[name] = title if shared[title] == 1 else f"{title} #{counted[title]}"
    return found


def _stack_header(title: str, stack: StackRecord | None, width: int) -> list[str]:
    if stack is None:
        return lines_of(f"{title or 'outside the stacks'}:", width)
    kind = "unrolled loop" if stack.unrolled else "scan"
    forward, backward = stack.forward_window_used, stack.backward_window_used
    what = "block" if stack.tiles else "layer"
    times = (
        f"forward {format_seconds(stack.forward_seconds)} a {what}"
        + (f" ({_filled(forward)})" if forward else "")
        + f", backward {format_seconds(stack.backward_seconds)}"
        + (f" ({_filled(backward)})" if backward else "")
    )
    kind = "of tokens, one after the other" if stack.tiles else f"({kind})"
    groups = f" in groups of {stack.group}" if stack.group else ""
    head = f"{title}: {count_of(stack.count, what)}{groups} {kind}"
    if len(head) + len(times) + 2 <= width:
        return [f"{head}; {times}"]
    wrapped = textwrap.wrap(times, width, initial_indent="  ", subsequent_indent="    ")
    return [*lines_of(head, width), *wrapped]


def _segments_header(segments: Sequence[StackRecord], width: int) -> list[str]:
    forward = format_seconds(sum(stack.forward_seconds for stack in segments))
    backward = format_seconds(sum(stack.backward_seconds for stack in segments))
    return lines_of(
        f"{_STRAIGHT}, {count_of(len(segments), 'segment')}; "
        f"forward {forward}, backward {backward}",
        width,
    )


def _filled(window_used: float) -> str:
    """How much of a layer's time its copies take; over 100 % nobody reads as that."""
    if window_used < 1.005:
        return f"copies fill {window_used:.0%}"
    return f"copies take {format_ratio(window_used)} × a layer's time"


def _stack_groups(values: Sequence[DecisionRecord], room: int, width: int) -> list[str]:
    """As many groups as `room` lines hold; reasons are shortened first, then groups."""
    groups = _grouped(values)
    least = min(_LEAST_GROUPS, len(groups))
    tries = [(len(groups), 2), *((n, 1) for n in range(len(groups), least - 1, -1))]
    lines: list[str] = []
    for shown, reason_lines in (*tries, (least, 0)):
        chosen = _from_each_decision(groups, shown)
        lines = _drawn_groups(chosen, width, reason_lines=reason_lines)
        if shown < len(groups):
            folded = [group for group in groups if group not in chosen]
            lines += _fold(folded, chosen, width)
        if len(lines) <= room:
            break
    return lines


def _from_each_decision(groups: Sequence[_Group], number: int) -> list[_Group]:
    """`number` of `groups` in their order, every decision's largest in turn.

    By size alone the recomputed values of a large model would fill the screen, and the
    few that are offloaded, which the plan is about, would be folded away.
    """
    rounds = collections.Counter[str]()
    ranked: list[tuple[int, int]] = []
    for position, group in enumerate(groups):
        ranked.append((rounds[group.decision], position))
        rounds[group.decision] += 1
    return [
        groups[position] for position in sorted(p for _, p in sorted(ranked)[:number])
    ]


def _drawn_groups(
    groups: Sequence[_Group], width: int, *, reason_lines: int
) -> list[str]:
    wide = width >= _WIDE
    # Indent, decision, size and number of arrays, with the gaps between the columns.
    room = width - 2 - 11 - 12 - 2 - max(len(f"{g.arrays} ×") for g in groups)
    room_for_name = room * 2 // 5 if wide else room
    names = cut_paths([group.name for group in groups], room_for_name)
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
    if most == 0:
        return []
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
    reason = _reason(alike, largest)
    if largest.pinned is not None:
        reason = f"pinned by {largest.pinned!r}" + (f"; {reason}" if reason else "")
    return _Group(
        decision=largest.decision,
        name=named,
        values=len(alike),
        arrays=sum(value.count for value in alike),
        bytes=sum(value.count * value.bytes for value in alike),
        reason=reason,
    )


def _reason(alike: Sequence[DecisionRecord], largest: DecisionRecord) -> str:
    """The reason of a group: of each value where all say the same, or of the largest.

    Sizes in the table are of all layers; what a reason says is of one value in one.
    """
    if len(alike) == 1 or not largest.reason:
        return largest.reason
    same = all((v.reason, v.bytes) == (largest.reason, largest.bytes) for v in alike)
    return f"{'each' if same else 'largest'}: {largest.reason}"


def _fold(folded: Sequence[_Group], shown: Sequence[_Group], width: int) -> list[str]:
    parts = []
    for decision in ("offload", "keep", "recompute"):
        of_it = [group for group in folded if group.decision == decision]
        if of_it:
            number = sum(group.values for group in of_it)
            size = format_bytes(sum(group.bytes for group in of_it))
            parts.append(f"{number} {decision}, {size}")
    total = sum(group.values for group in folded)
    smaller = all(
        group.bytes < other.bytes
        for group in folded
        for other in shown
        if group.decision == other.decision
    )
    what = "smaller value" if smaller else "more value"
    text = f"and {count_of(total, what)}: {'; '.join(parts)}"
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
