"""What goes wrong in a compiled program without a word: the closed list.

Each hazard is found in the program itself, laid beside what the step asked for where
that is known, and not in the way the step was written: so it is found whoever wrote it.
`_inspect` is the caller. Knows no JAX.

One function per kind; a kind that cannot be looked for, because what was inspected does
not say enough, becomes an omission: it is said, not guessed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from .._records._inspection import Hazard, Omission
from ._arguments import donated_in_vain, not_donated, state_moved
from ._asked import cheaper_to_recompute, policy_names, vanished
from ._context import Context as Context
from ._context import Machine as Machine
from ._context import make_context as make_context
from ._copies import (
    misplaced_copies,
    small_copies,
    synchronous_copies,
    unaligned_offloads,
    unhidden_copies,
)
from ._duplicates import duplicate_copies
from ._host_compute import host_compute
from ._host_memory import host_memory, kinds_dropped
from ._kinds import KINDS
from ._known_bad import known_bad
from ._rematerialization import rematerialization
from ._stacks import kept_to_be_summed, stacked_again
from ._turned import turned_stacks

HAZARD_KINDS: Mapping[str, str] = {name: kind.what for name, kind in KINDS.items()}
"""Every kind of hazard with what it is, worst first."""


class Search(NamedTuple):
    """How a kind is looked for; `lacks` says why it cannot be, or nothing.

    That is for what was not given (a trace, options): every such inspection says it. So
    it is no place for what a platform never has.
    """

    find: Callable[[Context], Iterator[Hazard]]
    lacks: Callable[[Context], str] = lambda context: ""


def find_hazards(
    context: Context,
) -> tuple[tuple[Hazard, ...], tuple[Omission, ...]]:
    """Every hazard, by kind, and within a kind the costliest first.

    **Returns:** the hazards, and the kinds that could not be looked for, with why.
    """
    found: list[Hazard] = []
    left_out: dict[str, list[str]] = {}
    for kind in KINDS:
        search = SEARCHES[kind]
        if reason := search.lacks(context):
            left_out.setdefault(reason, []).append(kind)
            continue
        found += sorted(search.find(context), key=lambda hazard: -hazard.seconds)
    for reason in context.intent.opaque:
        left_out.setdefault(reason, []).append("policy-name-unmatched")
    return tuple(found), tuple(
        Omission(what=", ".join(kinds), reason=reason)
        for reason, kinds in left_out.items()
    )


def _untraced(context: Context) -> str:
    if context.intent.copies is not None:
        return ""
    return (
        "what was given is compiled already, and does not say what the step asked "
        "for: give the jitted function and its arguments"
    )


def _without_arguments(context: Context) -> str:
    return "" if context.intent.arguments is not None else _untraced(context)


def _no_host_memory(context: Context) -> str:
    if context.machine.platform == "cpu":
        return "on a CPU all memory is the host's, and the compiler books none as such"
    if context.intent.without_memories:
        return (
            "it was compiled for devices that have no memories, which drop what specs "
            "say of them: let stowax.target(name).compile(jitted, *specs) do it"
        )
    return ""


def _both(*reasons: Callable[[Context], str]) -> Callable[[Context], str]:
    return lambda context: next((r for f in reasons if (r := f(context))), "")


def _undecided(context: Context) -> str:
    return "the plan decides on donation" if context.intent.planned else ""


def _spread(context: Context) -> str:
    if context.intent.devices > 1:
        return "how the compiler spreads the operations over devices is not known"
    return ""


def _options(context: Context) -> str:
    if context.intent.all_options:
        return ""
    return (
        "the options that it was compiled with are not known: give the jitted function "
        "and its arguments"
    )


SEARCHES: Mapping[str, Search] = {
    "misplaced-copy": Search(misplaced_copies),
    "host-compute": Search(host_compute),
    "known-bad-version": Search(known_bad, _options),
    "memory-kinds-dropped": Search(
        kinds_dropped, _both(_no_host_memory, _without_arguments)
    ),
    "offload-vanished": Search(vanished, _both(_no_host_memory, _untraced)),
    "policy-name-unmatched": Search(policy_names, _untraced),
    "state-moved": Search(state_moved, _untraced),
    "host-memory-exceeded": Search(host_memory, _no_host_memory),
    "synchronous-copy": Search(synchronous_copies),
    "unhidden-copy": Search(unhidden_copies),
    "argument-not-donated": Search(not_donated, _both(_untraced, _undecided)),
    "donated-in-vain": Search(donated_in_vain, _without_arguments),
    "stacked-again": Search(stacked_again, _untraced),
    "kept-to-be-summed": Search(kept_to_be_summed, _untraced),
    "turned-stack": Search(turned_stacks),
    "rematerialization": Search(rematerialization),
    "duplicate-copy": Search(duplicate_copies),
    "cheaper-to-recompute": Search(
        cheaper_to_recompute, _both(_no_host_memory, _untraced, _spread)
    ),
    "small-copy": Search(small_copies),
    "unaligned-offload": Search(unaligned_offloads),
}
