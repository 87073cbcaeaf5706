"""Findings about values that cross between host and device, from events; no JAX."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .._records._audit import Event, Finding, SentValue
from .._units import format_bytes
from .._where import Place
from ._steps import Line, Steps, rate, regular_lines

# From so many transfers of one function a step, one call with a pytree pays.
_MANY = 4
_SMALL_BYTES = 1 << 20


def finding(
    kind: str,
    place: Place,
    what: str,
    remedy: str,
    *,
    count: float,
    bytes: int = 0,  # the field's name, as everywhere
    seconds: float = 0.0,
) -> Finding:
    """A finding at a line."""
    return Finding(
        kind=kind,
        file=place.file,
        line=place.line,
        count=count,
        bytes=bytes,
        seconds=seconds,
        what=what,
        remedy=remedy,
    )


def from_line(kind: str, line: Line, what: str, remedy: str) -> Finding:
    """A finding about all that regularly happens at a line."""
    return finding(
        kind,
        line.place,
        what,
        remedy,
        count=line.count,
        bytes=line.bytes,
        seconds=line.seconds,
    )


def transfers_a_step(steps: Steps) -> float:
    """Values that cross between host and device in a step, in either direction.

    A pytree that one call brings there is one. What another thread places counts, also
    what it placed before the first step: it is ahead.
    """
    count = 0
    for number, event in enumerate(steps.events):
        own = event.thread == steps.thread
        if steps.step_of(number) >= 0 if own else event.what == "put":
            count += event.what == "read" or (event.what == "put" and not event.sent)
            count += len(event.sent)
    return rate(count, steps.count)


_Values = tuple[str, list[SentValue]]  # an argument's name, and what was sent


class _Call(NamedTuple):
    place: Place
    what: str
    name: str


def sent_values(steps: Steps) -> Iterator[Finding]:
    """Values that jitted functions, operations and `device_put` send in every step."""
    found: dict[tuple[_Call, str], list[tuple[int, SentValue]]] = defaultdict(list)
    for step, _, event in steps.inside():
        call = _Call(event.place, event.what, event.name)
        for value in event.sent:
            # A number beside an array, as in x + 1, is a literal of the program, and
            # what a library hands its own function is nobody's to keep.
            literal = event.what == "operation" or event.library
            if not literal or "NumPy array" in value.described:
                found[call, value.name].append((step, value))
    calls: dict[tuple[_Call, bool], list[_Values]] = defaultdict(list)
    for (call, name), pairs in found.items():
        if steps.is_regular(step for step, _ in pairs):
            constant = len(pairs) > 2 and all(v.same for _, v in pairs[1:])
            if constant or call.what != "put":
                calls[call, constant].append((name, [v for _, v in pairs]))
    for (call, constant), values in calls.items():
        yield _sent(steps, call, constant, values)


def _sent(steps: Steps, call: _Call, constant: bool, values: list[_Values]) -> Finding:
    sent = [value for _, several in values for value in several]
    names = ", ".join(name for name, _ in values[:4]) + (", …" * (len(values) > 4))
    described = sent[0].described
    arrays = any("array" in value.described for value in sent)
    into = "jax.device_put" if call.what == "put" else call.name
    subject = f"{names}: {described}" if len(values) == 1 else f"{names}"
    if constant:
        text = f"{into} is sent the same {subject} in every step"
        remedy = (
            f"Before the loop: {_word(values[0][0])} = jax.device_put("
            f"{_word(values[0][0])}), and pass that; or make it static."
        )
    elif arrays:
        text = f"{into} is handed {subject}, sent while the step waits to begin"
        remedy = "Place batches ahead of use: for batch in stowax.prefetch(batches): …"
    else:
        text = f"{into} is handed {subject}"
        remedy = (
            "Keep it on the device: start from jax.numpy.asarray(...) before the loop "
            "and let the jitted function return the next one."
        )
    return finding(
        "repeated-constant" if constant else "implicit-transfer",
        call.place,
        text,
        remedy,
        count=rate(len(sent), steps.count),
        bytes=round(sum(value.bytes for value in sent) / steps.count),
    )


def _word(name: str) -> str:
    return name if name.isidentifier() else "value"


def moves(steps: Steps) -> Iterator[Finding]:
    """Arrays that go to another device, or another memory, in every step."""
    for line in regular_lines(steps, lambda e, _: e.what == "put" and e.moved):
        yield from_line(
            "moved-array",
            line,
            f"{format_bytes(line.bytes)} go to another device or memory, "
            f"{line.count:g} times a step",
            "Place it once, before the loop, where the step reads it; what is to lie "
            "in host memory and be used in every step is a plan's: stowax.plan(...).",
        )
    for line in regular_lines(steps, lambda e, _: bool(e.elsewhere)):
        names = ", ".join(line.events[-1].elsewhere[:4])
        yield from_line(
            "moved-array",
            line,
            f"{names} lies on other devices than {line.events[0].name} runs on, and is "
            "copied there at every call",
            "Place it before the loop as the step reads it: jax.device_put(value, "
            "sharding).",
        )


def many(steps: Steps) -> Iterator[Finding]:
    """Many small transfers of one function that one call could do."""
    for what, name in (("put", "device_put"), ("read", "device_get")):
        groups: dict[object, list[tuple[int, Event]]] = defaultdict(list)
        for step, _, event in steps.inside():
            small = event.bytes < _SMALL_BYTES and not event.moved
            if event.what == what and small:
                groups[event.place.file, event.place.first].append((step, event))
        for pairs in groups.values():
            count = rate(len(pairs), steps.count)
            if count < _MANY or not steps.is_regular(step for step, _ in pairs):
                continue
            line = Line(
                pairs[0][1].place,
                tuple(event for _, event in pairs),
                tuple(step for step, _ in pairs),
                steps.count,
            )
            yield from_line(
                "many-transfers",
                line,
                f"{count:g} small transfers a step, {format_bytes(line.bytes)} in all",
                f"One call for the whole pytree: jax.{name}(tree).",
            )


def _fresh(steps: Steps, event: Event, number: int) -> bool:
    """Whether the newest step made what is read, so that the device runs dry.

    A value of the step before is read while the device works: the next is dispatched.
    """
    started = steps.step_of(number)
    return event.made >= 0 and steps.step_of(event.made) >= started


def reads(steps: Steps) -> Iterator[Finding]:
    """Results that are read, and waited for, before the next step is dispatched."""
    for line in regular_lines(
        steps, lambda e, n: e.what == "read" and _fresh(steps, e, n)
    ):
        how = sorted(
            {_HOW.get(event.name, f"numpy.{event.name}") for event in line.events}
        )
        yield from_line(
            "host-read",
            line,
            f"{' and '.join(how)} reads {format_bytes(line.bytes)} of this step's "
            "result: the device has nothing to do until the next step is dispatched",
            "Read it every so many steps, or one step late: keep the result, dispatch "
            "the next step, then read.",
        )
    for line in regular_lines(
        steps, lambda e, n: e.what == "wait" and _fresh(steps, e, n)
    ):
        yield from_line(
            "early-wait",
            line,
            "block_until_ready waits for this step before the next is dispatched",
            "Wait once, after the loop: jax.block_until_ready(state).",
        )


_HOW = {
    "value": "float(), bool(), print or a format",
    "item": ".item()",
    "asarray": "numpy.asarray",
    "array": "numpy.array",
    "device_get": "jax.device_get",
}
