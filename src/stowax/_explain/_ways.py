"""What each way of treating arrays leaves of a step's peak, as predicted.

For a step that does not fit, before anything is planned: one line per way, in the words
of the plan's own decisions. Each is a hand-written policy of the survey, lowered and
walked; nothing is compiled.
"""

from collections.abc import Iterator

from .._planner import baselines
from .._records._peak import Treatment
from .._records._stages import Decisions
from .._search._space import Space
from .._survey._survey import predict

_WAYS = {
    "recompute all": "recompute every layer",
    "offload layer inputs": "recompute every layer, offload its input",
    "offload state": "offload state",
}
_DONATED = "donate the state"
_WORTH_SAYING = 0.01
"""Part of the peak below which donating is not worth a line."""


def treatments(space: Space, budget: int, written_bytes: int) -> tuple[Treatment, ...]:
    """What the ways that are open for a step leave of its peak.

    **Arguments:** `space` is the step, surveyed for `budget`; `written_bytes` is what
    it is predicted to need as it is written.
    """
    return tuple(
        Treatment(what=what, needs_bytes=needed, frees_bytes=written_bytes - needed)
        for what, needed in _ways(space, budget, written_bytes)
    )


def _ways(space: Space, budget: int, written: int) -> Iterator[tuple[str, int]]:
    donated = ""
    if space.may_donate:
        needed = predict(space.survey, None).device_total
        if written - needed > _WORTH_SAYING * written:
            yield _DONATED, needed
            donated = ", and donate it" if needed else ""
    if not space.survey.bodies:
        return
    found = baselines(space.problem(budget))
    for name, what in _WAYS.items():
        decisions = found.get(name)
        if decisions is None or not _does_something(name, decisions):
            continue
        what += donated if name == "offload state" else ""
        yield what, space.memory.expected(decisions)


def _does_something(name: str, decisions: Decisions) -> bool:
    """Whether any value is treated so: on a CPU nothing is offloaded."""
    word = "offload" if "offload" in name else "recompute"
    return any(word in chosen for chosen in decisions)
