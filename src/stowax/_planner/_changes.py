"""Decisions that differ from others in one value, and whether a user allows decisions.

The search compiles single changes of its best program where a user lets it go on.
"""

from collections.abc import Iterable, Iterator, Sequence

from .._records._stages import Body, Decision, Decisions
from ._evaluate import recomputed_values


def allowed(bodies: Iterable[Body], decisions: Decisions) -> bool:
    """Whether each value may be treated as decided."""
    return all(
        decision is None or decision in value.allowed
        for body, chosen in zip(bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        if not value.available
    )


def single_changes(bodies: Sequence[Body], decisions: Decisions) -> Iterator[Decisions]:
    """All decisions that differ in one value: one that is stored, or could be."""
    for b, (body, chosen) in enumerate(zip(bodies, decisions, strict=True)):
        for value in body.values:
            for decision in sorted(value.allowed):
                if value.available or decision == (chosen[value.index] or "recompute"):
                    continue
                mine = (*chosen[: value.index], decision, *chosen[value.index + 1 :])
                if _makes_sense(body, mine, value.index):
                    yield (*decisions[:b], mine, *decisions[b + 1 :])


def _makes_sense(body: Body, chosen: Sequence[Decision | None], index: int) -> bool:
    """Whether decisions can be carried out, and what is stored is read."""
    try:
        _, read = recomputed_values(body, chosen)
    except ValueError:  # something cannot be computed again
        return False
    return chosen[index] == "recompute" or index in read
