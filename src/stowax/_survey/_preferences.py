"""The user has the last word: pinned decisions and forbidden ones.

`plan` builds one `Preferences` from its arguments `pin` and `forbid`, lets it narrow
what is open for every value (`narrow`), and asks afterwards whether every pattern met
something (`check_matched`): a pattern with a typing error would else pin nothing, and
nobody would notice. Nor would anybody notice a pin on a value that the backward pass
does not read: there the backward pass starts from it (`_pin_starts`).

Patterns are those of the shell (`*`, `?`, `[...]`), in upper or lower case alike, and
are compared with a value's name (`"*attention*"`), its role (`"activation"`) and its
source line, with or without folders (`"model.py:41"`, `"*/model.py:*"`). One pattern,
then the decision:

- `pin={"*attention*": "keep"}`; on the command line `--pin "*attention*=keep"`;
- `forbid=("offload", "recompute:*dropout*")`: a decision, alone or with a pattern after
  a colon; on the command line `--forbid "recompute:*dropout*"`. `"host update"` forbids
  that the host's processor updates state that is offloaded, `"tile"` that a loss over
  a large vocabulary, or a wide product within layers, runs in blocks. Pinned, `"tile"`
  asks for a loss in blocks.

Later pins win over earlier ones. A pattern such as `"*attention*"` meets large arrays
and small ones, weights and masks; a pin holds for those of them that it is possible
for. If it is possible for none, that is an error that says why (`check_matched`).
"""

import dataclasses
import fnmatch
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from .._errors import ArgumentError
from .._records._stages import (
    DECISIONS,
    GROUPED,
    OFFLOAD_LEAST_BYTES,
    TILE,
    Body,
    Decision,
    Value,
)
from .._units import format_bytes
from ._near_names import near_names
from ._pin_starts import start_from


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """One pin or one forbidden decision; `text` is what the user wrote."""

    text: str
    pattern: str
    decision: str
    pinned: bool
    on_host: bool = False  # of "host update", which is no decision

    @property
    def argument(self) -> str:
        return f"pin[{self.text!r}]" if self.pinned else f"forbid {self.text!r}"

    def holds_for(self, value: Value) -> bool:
        """Whether what the rule is about can be done with a value."""
        return value.tiled if self.decision == TILE else self.decision in value.allowed

    def matches(self, value: Value) -> bool:
        # A bracket is one: `args[0]['moments']*` is not about sets of letters.
        pattern = self.pattern.lower().replace("[", "[[]")
        return any(fnmatch.fnmatchcase(w.lower(), pattern) for w in _words(value))


class Preferences:
    """What the user pinned and forbade, and what it has met so far.

    **Arguments:** `pin` maps patterns to `"keep"`, `"offload"` or `"recompute"`;
    `forbid` lists decisions, alone or as `"decision:pattern"`. Arrays under
    `least_bytes` are not offloaded (errors say so).

    **Raises:** `ArgumentError` for an unknown decision or an empty pattern.

    >>> preferences = Preferences(pin={"*attention*": "keep"}, forbid=("offload",))
    >>> preferences.patterns()
    (('*attention*', 'keep'),)
    """

    def __init__(
        self,
        *,
        pin: Mapping[str, str],
        forbid: Collection[str] = (),
        least_bytes: int = OFFLOAD_LEAST_BYTES,
    ):
        if isinstance(forbid, str):
            forbid = (forbid,)
        self._rules = (
            *(_pin(pattern, decision) for pattern, decision in pin.items()),
            *(_forbidden(text) for text in forbid),
        )
        tiles = {rule.pinned: rule for rule in self._rules if rule.decision == TILE}
        if len(tiles) > 1:
            raise ArgumentError(
                tiles[True].argument,
                f"{TILE!r}, which is forbidden by {TILE!r}",
                "Leave out one of the two.",
            )
        self._least_bytes = least_bytes
        self._met: dict[_Rule, dict[Value, bool]] = {r: {} for r in self._rules}
        self._seen: dict[str, None] = {}
        self._decided: dict[_Rule, list[Value]] = {r: [] for r in self._rules}
        self._started: set[_Rule] = set()

    def narrow(self, bodies: Sequence[Body]) -> tuple[Body, ...]:
        """All bodies of a step, with what the user wants of them.

        That is what is open for every value, and which parts of the update the host's
        processor may do. What is pinned to be stored, and is not read by the backward
        pass, is made what it starts from, if its pin comes to nothing else.
        """
        found = []
        for body in bodies:
            values = [self._narrowed(value) for value in body.values]
            parts = [
                part
                for part in body.host_updates
                if not any(self.keeps_off_host(body.values[i]) for i in part.values)
            ]
            found.append(
                dataclasses.replace(
                    body, values=tuple(values), host_updates=tuple(parts)
                )
            )
        return tuple(self._started_from(body) for body in found)

    def _narrowed(self, value: Value) -> Value:
        """The value with what is open for it; one pinned to be kept is an array."""
        allowed = self.allow(value)
        if value.virtual and allowed == {"keep"} and self._pin_of(value):
            return dataclasses.replace(
                value, allowed=allowed, virtual=False, needed=True
            )
        return dataclasses.replace(value, allowed=allowed, stays=self._why(value))

    def _why(self, value: Value) -> str:
        """Why it stays. Groups do not keep there what was not to leave anyway."""
        if value.stays != GROUPED:
            return value.stays
        forbids = (r for r in self._rules if not (r.pinned or r.on_host))
        own = (r for r in forbids if r.decision == "offload" and r.matches(value))
        rule = next(own, None)
        return value.stays if rule is None else f"forbid has {rule.text!r}"

    def _started_from(self, body: Body) -> Body:
        unread = {rule for rule in self._rules if self._is_unread(rule)}
        pins = {
            value.index: rule
            for value in body.values
            if not value.available
            and (rule := self._pin_of(value)) in unread
            and rule.decision in value.allowed
        }
        body, starts = start_from(body, pins)
        self._started.update(pins[i] for i in starts)
        return body

    def _is_unread(self, rule: _Rule) -> bool:
        """Whether a pin to store met nothing that the backward pass reads."""
        storing = rule.pinned and rule.decision != "recompute"
        decided = self._decided[rule]
        return storing and bool(decided) and not any(v.needed for v in decided)

    def allow(self, value: Value) -> frozenset[Decision]:
        """`value.allowed`, narrowed; remembers which rules met the value.

        Values for which nothing is decided (weights, constants) are left as they are,
        and so is what depends on constants alone: it is computed wherever it is read,
        which no prohibition can change. Neither counts as met.

        **Raises:** `ArgumentError` if a pin asks for what is forbidden.
        """
        if value.available:
            return value.allowed
        self._seen.update(dict.fromkeys(_words(value)))
        met = [rule for rule in self._rules if rule.matches(value)]
        for rule in met:
            self._met[rule].setdefault(value, rule.holds_for(value))
        forbidden = {r.decision: r for r in met if not (r.pinned or r.on_host)}
        pin = self._pin_of(value)
        if pin is None:
            return value.allowed.difference(forbidden) or value.allowed
        if pin.decision in forbidden:
            raise ArgumentError(
                pin.argument,
                f"{pin.decision!r} for {_called(value)}, which is forbidden by "
                f"{forbidden[pin.decision].text!r}",
                "Leave out one of the two, or narrow its pattern.",
            )
        self._decided[pin].append(value)
        return frozenset({cast(Decision, pin.decision)})

    def keeps_off_host(self, value: Value) -> bool:
        """Whether the host's processor must not update this part of the state."""
        return any(rule.on_host and rule.matches(value) for rule in self._rules)

    @property
    def tiles(self) -> bool | None:
        """Whether blocks of tokens are asked for, or forbidden; `None` for neither."""
        asked = {rule.pinned for rule in self._rules if rule.decision == TILE}
        return asked.pop() if asked else None

    def matched(self, value: Value) -> str | None:
        """The pattern of the pin that decides for `value`, if one does."""
        pin = None if value.available else self._pin_of(value)
        return None if pin is None else pin.pattern

    def patterns(self) -> tuple[tuple[str, str], ...]:
        """The pins, in the order given: pattern and decision."""
        return tuple((r.pattern, r.decision) for r in self._rules if r.pinned)

    def forbidden(self) -> tuple[str, ...]:
        """What is forbidden, as it was given."""
        return tuple(r.text for r in self._rules if not r.pinned)

    def count(self, pattern: str, decision: str) -> int:
        """How many values a pin has met and is possible for (a later one may win)."""
        return sum(
            sum(met.values())
            for rule, met in self._met.items()
            if rule.pinned and (rule.pattern, rule.decision) == (pattern, decision)
        )

    def without(self, pattern: str, decision: str) -> "Preferences":
        """The same preferences but for one pin, to see what the pin costs."""
        pins = {p: d for p, d in self.patterns() if (p, d) != (pattern, decision)}
        return Preferences(pin=pins, forbid=self.forbidden())

    def check_matched(self) -> None:
        """To be called when every value went through `allow`.

        **Raises:** `ArgumentError` for a pattern that met nothing, with the names and
        source lines nearest to it, and for a pin that is possible for nothing that it
        met, or means nothing there, with the reason.
        """
        for rule, met in self._met.items():
            if rule.pinned and met and not any(met.values()):
                raise _impossible(rule, tuple(met), self._least_bytes)
            if self._is_unread(rule) and rule not in self._started:
                raise _unread(rule, self._decided[rule])
            if not met and (rule.pinned or rule.pattern != "*"):
                raise _unmatched(rule, tuple(self._seen))

    def _pin_of(self, value: Value) -> _Rule | None:
        pins = [
            rule
            for rule in self._rules
            if rule.pinned and rule.decision in value.allowed and rule.matches(value)
        ]
        return pins[-1] if pins else None


def _pin(pattern: str, decision: str) -> _Rule:
    if decision not in (*DECISIONS, TILE):
        raise ArgumentError(
            f"pin[{pattern!r}]", repr(decision), f"Write {_alternatives()}."
        )
    if not pattern:
        raise ArgumentError("pin", "an empty pattern", "Write '*' to mean every value.")
    return _Rule(text=pattern, pattern=pattern, decision=decision, pinned=True)


def _forbidden(text: str) -> _Rule:
    decision, colon, pattern = text.partition(":")
    on_host = decision == "host update"
    known = on_host or decision in ("offload", "recompute", TILE)
    if not known or (colon and not pattern):
        raise ArgumentError(
            "forbid",
            repr(text),
            "Write 'offload', 'recompute', 'host update' or 'tile', alone or with a "
            "pattern after a colon: 'recompute:*dropout*'. To forbid keeping, pin "
            "another decision.",
        )
    if decision == TILE and colon:
        raise ArgumentError("forbid", repr(text), "Write 'tile' alone.")
    return _Rule(
        text=text,
        pattern=pattern or "*",
        decision="offload" if on_host else decision,
        pinned=False,
        on_host=on_host,
    )


def _alternatives() -> str:
    *first, last = [repr(d) for d in (*DECISIONS, TILE)]
    return f"{', '.join(first)} or {last}"


def _words(value: Value) -> tuple[str, ...]:
    """What a pattern is compared with."""
    words = [value.name, value.role]
    if value.source:
        words += [value.source, pathlib.PurePath(value.source).name]
    return tuple(dict.fromkeys(words))


def _called(value: Value) -> str:
    where = f" ({value.source})" if value.source else ""
    shape = ",".join(str(n) for n in value.shape)
    return f"{value.name}{where}, {value.dtype}[{shape}]"


_WHY = {
    "recompute state": "it is given to the step, so it cannot be computed again",
    "recompute input": "it enters the layer from the one before, so it cannot be "
    "computed again inside of it",
    "effects": "running its operation again would be noticed (printing, a callback)",
    "small": "it is smaller than {small} on a device, where a copy costs more than its "
    "bytes say, so it is not offloaded",
    "kind": "it is no floating-point array of two axes or more, so it is not offloaded",
    "host": "the target has no host memory of its own, so nothing is offloaded",
    "tile": "no product there is far larger than what it reads, with a loss that works "
    "token by token",
    "keep": "it depends on constants alone and is computed again wherever it is read, "
    "so it is never kept",
}


def _impossible(pin: _Rule, met: Sequence[Value], least_bytes: int) -> ArgumentError:
    largest = max(met, key=lambda value: value.bytes)
    if pin.decision == TILE:
        why = _WHY[TILE]
    elif largest.allowed == {"recompute"}:
        why = _WHY["keep"]
    elif pin.decision == "recompute" and largest.role != "activation":
        why = _WHY["recompute state"]
    elif pin.decision == "recompute":
        why = _WHY["recompute input" if largest.operation is None else "effects"]
    else:
        why = largest.stays or _WHY[_not_offloaded(largest, least_bytes)].format(
            small=format_bytes(least_bytes)
        )
    others = f" and {len(met) - 1} more" if len(met) > 1 else ""
    possible = " or ".join(repr(d) for d in DECISIONS if d in largest.allowed)
    return ArgumentError(
        pin.argument,
        f"{pin.decision!r}, which is impossible for {_called(largest)}{others}: {why}",
        f"Pin it to {possible}, or leave the pin out.",
    )


def _unread(pin: _Rule, decided: Sequence[Value]) -> ArgumentError:
    others = f" and {len(decided) - 1} more" if len(decided) > 1 else ""
    return ArgumentError(
        pin.argument,
        f"{pin.decision!r} for {_called(decided[0])}{others}: the backward pass reads "
        "neither that nor anything that it may compute again from it",
        "Leave out the pin, or the one that keeps it from computing again.",
    )


def _not_offloaded(value: Value, least_bytes: int) -> str:
    """Which of the reasons of `_candidates` holds for a value."""
    if len(value.shape) < 2 or "float" not in value.dtype:
        return "kind"
    return "small" if value.bytes < least_bytes else "host"


def _unmatched(rule: _Rule, seen: Sequence[str]) -> ArgumentError:
    near, others = near_names(rule.pattern, seen)
    if near:
        known = f"Nearest: {', '.join(near)}."
    elif others:
        known = f"None is like it; some are: {', '.join(others)}."
    else:
        known = "The step has no repeated layers whose values could be named."
    return ArgumentError(
        rule.argument,
        "a pattern that matches no value's name, role or source line",
        f"{known} Patterns may hold * and ?, such as '*attention*' or 'model.py:4?'.",
    )
