"""Findings about jitted functions, and what runs outside of them; no JAX."""

import os
from collections import defaultdict
from collections.abc import Iterator

from .._records._audit import CopiedUpdate, Event, Facts, Finding, Recording, Reuse
from .._units import format_bytes
from .._where import Place
from ._steps import Steps, rate, regular_lines
from ._transfers import finding, from_line

_UPDATES = ("scatter", "dynamic_update_slice")
# One small operation a step, such as `total += loss`, is how reading is put off.
_FEW_OPERATIONS = 2
_SMALL_BYTES = 1 << 16


def recompilations(steps: Steps) -> Iterator[Finding]:
    """Functions that were compiled again, and what had changed."""
    found: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    for step, number, event in steps.inside():
        first = step == 0 and number == steps.starts[0]
        if event.what == "call" and event.changed and not first:
            found[event.place, event.name, event.key].append(event)
    for events in found.values():
        changes = list(dict.fromkeys(event.changed for event in events))
        what = "; then ".join(changes[:2]) + ("; …" if len(changes) > 2 else "")
        often = "once" if len(events) == 1 else f"{len(events)} times"
        yield finding(
            "recompilation",
            events[0].place,
            f"{events[0].name} is compiled again, {often} in {steps.count} steps: "
            f"{what}",
            _remedy(changes[0]),
            count=len(events) / steps.count,
            seconds=sum(e.compiled_seconds for e in events) / steps.count,
        )


def _remedy(changed: str) -> str:
    if "new function" in changed:
        return "Call jax.jit once, outside of the loop, and keep what it returns."
    if "static" in changed:
        return (
            "Pass it as an array: leave it out of static_argnums and static_argnames."
        )
    if "weak" in changed:
        return "Start with the type it ends with: jax.numpy.asarray(value, dtype)."
    if "committed" in changed or "elsewhere" in changed:
        return (
            "Place it before the loop as the loop does: jax.device_put(value, place)."
        )
    return "Give it one shape and type: pad batches, drop the last, or cast beforehand."


def operations(steps: Steps) -> Iterator[Finding]:
    """What is dispatched one by one, outside of jit; updates apart."""
    for line in regular_lines(steps, lambda e, _: e.what == "operation"):
        updates = [e for e in line.events if e.name.startswith(_UPDATES)]
        if updates:
            size = round(sum(e.bytes for e in updates) / steps.count)
            yield finding(
                "eager-update",
                line.place,
                f"an update outside of jit makes a new array of {format_bytes(size)} "
                "in every step",
                "Do it in a jitted function that donates the array: "
                "jax.jit(update, donate_argnums=0).",
                count=rate(len(updates), steps.count),
                bytes=size,
            )
        elif line.count >= _FEW_OPERATIONS or line.bytes >= _SMALL_BYTES:
            names = list(dict.fromkeys(e.name for e in line.events))
            one = line.count == 1
            what = "operation a step is" if one else "operations a step are"
            yield from_line(
                "eager-dispatch",
                line,
                f"{line.count:g} {what} dispatched outside of jit: "
                f"{', '.join(names[:6])}{', …' * (len(names) > 6)}",
                "Move this line into the jitted step, or into a jitted function of its "
                "own.",
            )


def donations(recording: Recording, steps: Steps) -> Iterator[Finding]:
    """Buffers that could have been reused, warnings of XLA, and what is used again."""
    updated = {
        (key, update.argument)
        for key, facts in recording.facts.items()
        for update in facts.copied
    }
    found: dict[object, list[tuple[Event, str, int]]] = defaultdict(list)
    for unused in recording.unused:
        event = steps.events[unused.event]
        if (event.key, unused.name) not in updated and event.thread == steps.thread:
            found[event.place, event.name].append((event, unused.name, unused.bytes))
    for triples in found.values():
        numbers = {id(event) for event, _, _ in triples}
        # The last step's arguments may be alive, so it is one less than there are.
        if not steps.starts or 2 * len(numbers) + 1 < steps.count or len(numbers) < 2:
            continue
        event = triples[0][0]
        roots = list(dict.fromkeys(name.split("[")[0] for _, name, _ in triples))
        size = round(sum(size for *_, size in triples) / len(numbers))
        yield finding(
            "not-donated",
            event.place,
            f"{', '.join(roots)}: {format_bytes(size)} die after {event.name}, whose "
            "results could have had their place",
            _donate(event.name, roots),
            count=rate(len(triples), len(numbers)),
            bytes=size,
        )
    for place, message in dict.fromkeys(recording.warnings):
        yield finding(
            "unusable-donation",
            place,
            message,
            "Donate only what a result has the shape and type of; or return the "
            "updated array in the type it came in.",
            count=rate(1, steps.count),
        )
    yield from _used_again(recording, steps)


def _used_again(recording: Recording, steps: Steps) -> Iterator[Finding]:
    """Donated buffers that are used again, by the lines that do so."""
    found: dict[Place, list[Reuse]] = defaultdict(list)
    for reuse in recording.reused:
        found[reuse.place].append(reuse)
    for place, group in found.items():
        reuse = group[0]
        what = reuse.message
        if reuse.argument:
            at = f"{os.path.basename(reuse.donated_at.file)}:{reuse.donated_at.line}"
            what = (
                f"{reuse.argument} was donated to {reuse.function} at {at} and is used "
                f"again here: {reuse.message}"
            )
        yield finding(
            "donated-reuse",
            place,
            what,
            "Use what the step returned in its place, or copy it before the step: "
            "value.copy().",
            count=rate(len(group), steps.count),
        )


def _donate(name: str, roots: list[str]) -> str:
    if any(root.startswith(("args", "kwargs", "dynamic")) for root in roots):
        # A library's own function around the user's: names say nothing to the user.
        return (
            f"Donate the state where {name} is jitted: nnx.jit(..., "
            'donate_argnums=...), eqx.filter_jit(..., donate="all").'
        )
    return f"jax.jit({name}, donate_argnames={tuple(roots)!r})"


def from_programs(
    facts: dict[object, Facts], steps: Steps, enough: int
) -> Iterator[Finding]:
    """What the jaxprs of the functions called say: copies, recomputation.

    **Arguments:** kept activations below `enough` bytes are no matter.
    """
    called = defaultdict(list)
    for _, _, event in steps.inside():
        if event.what == "call":
            called[event.key].append(event)
    for key, events in called.items():
        known = facts.get(key, Facts())
        for update in known.copied:
            yield _copied(update, events[0].name, rate(len(events), steps.count))
        count = rate(len(events), steps.count)
        name, plan = events[0].name, _plan(events[0].name, known.arguments)
        if known.recomputed is not None:
            yield finding(
                "recomputation",
                known.recomputed,
                f"{name} computes its layers' activations again (jax.checkpoint)",
                f"{plan}: it keeps or offloads what is cheaper than computing it.",
                count=count,
            )
        elif known.kept_bytes >= enough:
            yield finding(
                "kept-activations",
                known.kept,
                f"{name} keeps {format_bytes(known.kept_bytes)} of activations for its "
                "backward pass, most of them made here",
                f"Where memory is short, or a larger batch would pay: {plan}: it "
                "offloads or computes again what is cheap enough.",
                count=count,
                bytes=known.kept_bytes,
            )


def _copied(update: CopiedUpdate, name: str, count: float) -> Finding:
    size, argument = format_bytes(update.bytes), update.argument
    if argument:
        what = f"{argument} of {name} is updated and not donated, so {size} are copied"
        remedy = (
            f"jax.jit({name}, donate_argnames=({argument.split('[')[0]!r},)), and use "
            "what it returns from there on."
        )
    else:
        what = f"{name} reads what this line updates once more afterwards, so {size} "
        what += "are copied"
        remedy = (
            "Read before the update what is needed of the old values: the part that "
            "changes, or a sum of all."
        )
    return finding(
        "copied-update",
        update.place,
        f"{what} first",
        remedy,
        count=count,
        bytes=update.bytes,
    )


def _plan(name: str, arguments: tuple[str, ...]) -> str:
    """The call that hands a step over."""
    plain = all(argument.isidentifier() for argument in arguments)
    words = ", ".join(arguments) if arguments and plain else "..."
    name = name if name.isidentifier() else "step"
    return (
        "mark the function that is differentiated (@stowax.stow) and plan the step "
        f'without jax.jit: plan = stowax.plan({name}, {words}, budget="..."); '
        f"{name} = plan.apply({name})"
    )
