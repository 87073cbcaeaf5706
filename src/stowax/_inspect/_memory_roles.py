"""What a place in memory is for, by what its arrays are called and how long they live.

JAX leaves its transformations in the names of operations (`_scopes`), and stowax's own
copies carry scopes. So a value that is made under `jvp` and still alive when the first
`transpose` runs is a kept activation, whoever wrote the program. Nothing is guessed
beyond that: what no rule knows is `workspace`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from .._records._memory import MEMORY_ROLES, Loop, MemoryRole
from .._records._memory_places import Layout, Member, Place, says_something
from .._records._program import HOST_SPACE
from .._records._scopes import phase_of

_COPIES = (
    "stowax.offload.",
    "stowax.fetch.",
    "stowax.weights.",
    "stowax.gradients.",
    "stowax.state.",
)
"""Scopes of what stowax moves between the memories."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a program as a whole.

    `arguments` has the roles of its arguments by name, as far as they are known.
    `crossing` are the instructions whose results or operands cross the host link.
    """

    arguments: Mapping[str, MemoryRole]
    crossing: Collection[str]
    weights: Collection[tuple[int, ...]]
    backward_computations: Collection[str]
    forward_loops: Collection[str]
    backward_from: int


def facts_of(
    layout: Layout,
    arguments: Mapping[str, str],
    crossing: Iterable[str],
    loops: Iterable[Loop],
) -> Facts:
    """What the roles of a program's places follow from."""
    known: dict[str, MemoryRole] = {
        name: role for name, role in arguments.items() if role in MEMORY_ROLES
    }
    backward = [
        member
        for place in layout.places
        for member in place.members
        if phase_of(member.framework_name) == "backward"
    ]
    entry = layout.schedule[-1][0] if layout.schedule else ""
    weights = set()
    for place in layout.places:
        if place.kind == "argument" and known.get(place.argument) == "parameter":
            for member in place.members[:1]:
                # A scan over layers takes one layer's part of a stacked parameter.
                weights |= {member.dimensions, member.dimensions[1:]}
    return Facts(
        arguments=known,
        crossing=frozenset(crossing),
        weights={shape for shape in weights if len(shape) > 1},
        backward_computations={m.computation for m in backward} - {entry},
        forward_loops={
            loop.body for loop in loops if phase_of(loop.framework_name) == "forward"
        },
        backward_from=min((m.position for m in backward), default=len(layout.schedule)),
    )


def telling(place: Place) -> Member | None:
    """The member that says most about a place: what is written into it, if anything."""
    named = [m for m in place.members if says_something(m)]
    return next(
        (m for m in named if m.updates),
        next(iter(named), next(iter(place.members), None)),
    )


def role_of(place: Place, facts: Facts) -> MemoryRole:
    """What `place` is for."""
    if place.kind == "argument":
        return facts.arguments.get(place.argument, "argument")
    if place.kind == "output":
        return "output"
    named = [m for m in place.members if says_something(m)]
    if place.space == HOST_SPACE:
        return "offloaded"
    crosses = any(m.instruction in facts.crossing for m in place.members)
    if crosses or any(scope in m.framework_name for m in named for scope in _COPIES):
        return "offload in flight"
    # A layer's input has no name of its own where it is written to its stack.
    phases = {_phase(m, facts) for m in place.members if m in named or m.updates}
    whole = {m.dimensions for m in place.members}
    if "backward" in phases and whole & set(facts.weights):
        return "gradient"
    if "forward" in phases and place.last >= facts.backward_from:
        return "kept activation"
    if "again" in phases:
        return "recomputed"
    return "workspace"


def _phase(member: Member, facts: Facts) -> str:
    found = phase_of(member.framework_name)
    if found == "forward" and member.computation in facts.backward_computations:
        return "again"
    if not found and member.updates and member.computation in facts.forward_loops:
        return "forward"
    return found
