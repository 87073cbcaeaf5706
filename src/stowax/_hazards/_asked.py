"""What the step asked for and did not get, or should not have asked for.

The trace has every `device_put` to host memory, those of checkpoint policies among
them, and the names that policies mention. The compiled program has the copies. Names do
not survive the compiler everywhere (`_program`), so copies are matched by bytes, and by
source lines where bytes leave a choice.
"""

import collections
from collections.abc import Iterator

from .._records._inspection import Hazard
from .._records._intent import CopyAsked
from .._records._program import Transfer
from .._units import format_bytes, format_seconds
from ._context import Context, hazard, listed, of_a_plan
from ._copies import NOTABLE_BYTES, NOTABLE_PART

# XLA peels iterations off loops, and leaves away what is fetched at once: of two
# iterations one may stay on the device.
_PRESENT = 0.5


def policy_names(context: Context) -> Iterator[Hazard]:
    """Policies that mention names which no value carries."""
    named = context.intent.named
    for policy in context.intent.policies or ():
        missing = [name for name in policy.names if name not in named]
        if not missing:
            continue
        nothing = len(missing) == len(policy.names) and not policy.others
        effect = (
            "the policy stores nothing, and all of it is computed again"
            if nothing
            else "the policy does not do what it says"
        )
        known = listed(sorted(named)) if named else "none"
        yield hazard(
            "policy-name-unmatched",
            policy.source or "a jax.checkpoint of unknown origin",
            f"no value is called {listed(missing)} (names that are given: {known}): "
            f"{effect}, in {policy.times} place{'s' if policy.times > 1 else ''}",
            count=policy.times,
        )


def vanished(context: Context) -> Iterator[Hazard]:
    """Copies to the host that were asked for, and are not in the program.

    What is returned in host memory is there, whoever put it there: no copy is needed
    where the host itself makes it.
    """
    asked = [
        copy
        for copy in context.intent.copies or ()
        if copy.bytes >= NOTABLE_BYTES and not copy.returned
    ]
    pools = [
        [transfer, float(transfer.total_bytes)]
        for transfer in context.program.transfers
        if transfer.direction == "device-to-host"
    ]
    covered: dict[int, float] = collections.defaultdict(float)

    def take(copy: int, fits: bool) -> None:
        want = asked[copy].total_bytes
        for pool in pools:
            transfer, left = pool
            if left <= 0 or (fits and not _alike(asked[copy], transfer)):
                continue
            part = min(left, want - covered[copy])
            covered[copy] += part
            pool[1] = left - part

    order = sorted(range(len(asked)), key=lambda i: -asked[i].total_bytes)
    for fits in (True, False):
        for copy in order:
            take(copy, fits)
    for position, copy in enumerate(asked):
        if covered[position] >= _PRESENT * copy.total_bytes:
            continue
        yield hazard(
            "offload-vanished",
            f"{copy.source} ({copy.name})" if copy.source else copy.name,
            f"{format_bytes(copy.total_bytes)} per step were to go to the host, "
            f"{format_bytes(round(covered[position]))} do: the rest stays on the "
            "device",
            count=1 if copy.trips is None else copy.trips,
        )


def _alike(copy: CopyAsked, transfer: Transfer) -> bool:
    """Whether a copy of the program may be the one that was asked for."""
    return transfer.bytes == copy.bytes or (
        bool(copy.source) and copy.source == transfer.source
    )


def cheaper_to_recompute(context: Context) -> Iterator[Hazard]:
    """Offloaded values that are waited for longer than it takes to make them again.

    Every copy of a value's bytes in the program may be its own; where several values
    have as many, they share the waits evenly.
    """
    asked = [c for c in context.intent.copies or () if c.bytes >= NOTABLE_BYTES]
    for copy in asked:
        if copy.seconds_again is None or copy.trips is None or copy.returned:
            continue
        if of_a_plan(copy.name):
            continue
        sharing = sum(other.bytes == copy.bytes for other in asked)
        waiting = sum(
            context.exposed_seconds(transfer)
            for transfer in context.program.transfers
            if transfer.bytes == copy.bytes and transfer.direction != "host-to-host"
        )
        waiting /= sharing
        again = copy.seconds_again * copy.trips
        least = NOTABLE_PART * context.timeline.step_seconds
        if waiting <= again or waiting < least:
            continue
        yield hazard(
            "cheaper-to-recompute",
            f"{copy.source} ({copy.name})" if copy.source else copy.name,
            f"{format_bytes(copy.total_bytes)} per step go to the host and back: "
            f"{format_seconds(waiting)} of waiting, and computing it again would take "
            f"{format_seconds(again)}",
            count=copy.trips,
            seconds=waiting - again,
        )
