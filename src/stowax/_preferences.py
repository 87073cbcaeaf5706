"""The user has the last word: pins, and kinds of decision that are forbidden.

Patterns are `fnmatch` patterns, case-insensitive, tried on a value's name, its role, and
its source line (`model.py:41`, with or without the folders). A pattern that matches
nothing is an error that lists near names: a silent one is the classic way to plan
something else than one thinks (see `jax.checkpoint` policies and misspelt names).
"""

import dataclasses
import difflib
import fnmatch
import pathlib
from collections.abc import Mapping

from ._errors import ArgumentError
from ._stages import DECISIONS, Decision, Value

_ANY = "*"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    argument: str
    pattern: str
    decision: Decision

    def matches(self, value: Value) -> bool:
        pattern = self.pattern.lower()
        return any(fnmatch.fnmatchcase(text, pattern) for text in _texts(value))


class Preferences:
    """What the user asked for, applied to values one by one.

    **Arguments:** `pin` maps patterns to the one decision that is left for what they
    match; later pins win. `forbid` holds decisions (`"offload"`), or a decision and a
    pattern with a colon between (`"recompute:*attention*"`).

    **Raises:** `ArgumentError` for words that are no decisions.
    """

    def __init__(self, pin: Mapping[str, str], forbid: tuple[str, ...] = ()):
        self._pins = [
            _Rule(
                argument="pin", pattern=pattern, decision=_decision(word, "pin", pattern)
            )
            for pattern, word in pin.items()
        ]
        self._bans = []
        for text in (forbid,) if isinstance(forbid, str) else forbid:
            word, _, pattern = text.partition(":")
            decision = _decision(word, "forbid", text)
            self._bans.append(
                _Rule(argument="forbid", pattern=pattern or _ANY, decision=decision)
            )
        self._counts: dict[_Rule, int] = {}
        self._seen: dict[str, None] = {}

    def allow(self, value: Value) -> frozenset[Decision]:
        """The decisions left open for `value`.

        **Raises:** `ArgumentError` for a pin that asks for what the value cannot do.
        """
        if value.available:
            return value.allowed
        self._seen.update(dict.fromkeys(_texts(value)))
        allowed = value.allowed
        for rule in self._bans:
            if rule.matches(value):
                self._count(rule)
                allowed -= {rule.decision}
        pin = self._pin_of(value)
        if pin is None:
            return allowed
        for rule in self._pins:
            if rule.matches(value):
                self._count(rule)
        if pin.decision not in value.allowed:
            # What surrounds the value matched as well: only what the backward pass reads
            # was surely meant.
            if not value.needed or pin.decision == "offload":
                return allowed
            raise ArgumentError(
                "pin",
                f"{pin.pattern!r}: {pin.decision!r}, which matches {value.name} "
                f"({value.source or 'no source line'}), and it {_why_not(value, pin)}",
                f"It can be: {', '.join(sorted(value.allowed))}.",
            )
        return frozenset({pin.decision})

    def matched(self, value: Value) -> str | None:
        """The pattern of the pin that decides about `value`, if one does."""
        if value.available:
            return None
        pin = self._pin_of(value)
        return pin.pattern if pin and pin.decision in value.allowed else None

    def check_matched(self) -> None:
        """**Raises:** `ArgumentError` for a pattern that has matched no value so far."""
        for rule in (*self._pins, *self._bans):
            if rule in self._counts or rule.pattern == _ANY:
                continue
            wanted = rule.pattern.lower().strip("*")
            near = difflib.get_close_matches(wanted, list(self._seen), n=5, cutoff=0.3)
            raise ArgumentError(
                rule.argument,
                f"{rule.pattern!r}, which matches no value",
                f"Near names: {'; '.join(near)}." if near else "Print a plan for names.",
            )

    def patterns(self) -> list[tuple[str, str]]:
        """The pins, as pattern and decision."""
        return [(r.pattern, r.decision) for r in self._pins]

    def without(self, pattern: str, decision: str) -> "Preferences":
        """The same preferences less one pin."""
        left = {
            r.pattern: r.decision
            for r in self._pins
            if (r.pattern, r.decision) != (pattern, decision)
        }
        bans = tuple(f"{r.decision}:{r.pattern}" for r in self._bans)
        return Preferences(pin=left, forbid=bans)

    def count(self, pattern: str, decision: str) -> int:
        """How many values a pin matched."""
        rules = [r for r in self._pins if (r.pattern, r.decision) == (pattern, decision)]
        return sum(self._counts.get(r, 0) for r in rules)

    def _pin_of(self, value: Value) -> _Rule | None:
        return next((r for r in reversed(self._pins) if r.matches(value)), None)

    def _count(self, rule: _Rule) -> None:
        self._counts[rule] = self._counts.get(rule, 0) + 1


def _decision(word: str, argument: str, given: str) -> Decision:
    for decision in DECISIONS:
        if word == decision:
            return decision
    raise ArgumentError(
        argument, f"{word!r} in {given!r}", f"Write one of {', '.join(DECISIONS)}."
    )


def _texts(value: Value) -> list[str]:
    source = value.source.lower()
    return [value.name.lower(), value.role, source, pathlib.Path(source).name]


def _why_not(value: Value, rule: _Rule) -> str:
    if rule.decision == "recompute":
        return "is given to the layer and cannot be computed again"
    return f"cannot be {rule.decision}"
