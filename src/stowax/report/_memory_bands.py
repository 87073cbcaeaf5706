"""What of the memory that a step reserves holds something, by role and moment."""

from collections.abc import Sequence

from .._records._memory import MEMORY_ROLES, Loop, MemoryCurve, held_part

RESERVED = "reserved, nothing in it"
"""The band of what stacks have reserved and do not hold yet, or no longer."""


def filled(curve: MemoryCurve, loops: Sequence[Loop]) -> list[dict[str, int]]:
    """Bytes by band at each moment, stacks without the part that holds nothing."""
    bodies = {loop.body: loop for loop in loops}
    stacks = [b for b in curve.blocks if b.filled_in or b.emptied_in]
    found = []
    for moment in curve.moments:
        here = dict(zip((*MEMORY_ROLES, RESERVED), (*moment.bytes, 0), strict=True))
        at = (moment.position, moment.loop, moment.trip, bodies)
        for block in stacks if moment.empty else ():
            if block.first <= moment.position <= block.last:
                empty = round(block.bytes * (1 - held_part(block, *at)))
                here[block.role] -= empty
                here[RESERVED] += empty
        found.append(here)
    return found
