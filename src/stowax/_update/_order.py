"""The order in which loops over blocks and what is outside of them can run.

Two rules make it. What reads a value runs after what makes it. And what reads a leaf's
old value runs before the loop that writes the new one into the leaf's buffer: a later
reader would read the new value without anyone noticing. Levels (`_levels`) see to it
that both can be kept; where two loops of one level need one another's old values, they
become one loop (`needed_together`).
"""

import heapq
from collections.abc import Mapping, Sequence

from .._jaxprs._jaxpr import Program
from ._feed import Feeds
from ._record import Group


def readers_before(groups: Sequence[Group]) -> dict[int, set[int]]:
    """For each loop, the loops that read an old value which it writes over."""
    readers: dict[int, set[int]] = {}
    for k, group in enumerate(groups):
        for number in group.reads:
            readers.setdefault(number, set()).add(k)
    return {
        k: set().union(*(readers.get(leaf, set()) for _, leaf in group.writes)) - {k}
        for k, group in enumerate(groups)
    }


def needed_together(groups: Sequence[Group]) -> list[list[int]]:
    """Loops that have to be one: each writes over what another one reads."""
    before = {k: found for k, found in readers_before(groups).items() if found}

    def all_before(start: int) -> set[int]:
        seen: set[int] = set()
        waiting = [start]
        while waiting:
            more = before.get(waiting.pop(), set()) - seen
            seen |= more
            waiting += more
        return seen

    reached = {k: all_before(k) for k in before}
    circles = {k: found for k, found in reached.items() if k in found}
    parts: list[list[int]] = []
    for k, found in circles.items():
        if all(k not in part for part in parts):
            parts.append(sorted(j for j in circles if j in found and k in circles[j]))
    return parts


def in_order(
    program: Program, plain: Sequence[int], groups: Sequence[Group], feeds: Feeds
) -> list[int | Group]:
    """`plain` nodes and `groups` in an order in which they can run.

    What can run outside of loops runs first: so a leaf that is on the device as a whole
    is worked on and written back before the next one is fetched. Of the loops that are
    ready, those run first that give nothing to the device, then those whose inputs were
    all made first: of an unrolled model, those of the last layer's gradients.

    Where there is no such order, what is in the circle is left out (`_proof` sees it).
    """
    maker = {o: p for p in plain for o in program.nodes[p].outputs}
    given = {n: -1 - k for k, group in enumerate(groups) for n, _ in group.gives}
    given |= {n: -1 - k for k, group in enumerate(groups) for n in group.totals}
    maker.update(given)  # a group is a negative number: -1 is the first
    writer = {i: -1 - k for k, group in enumerate(groups) for _, i in group.writes}
    waiting: dict[int, set[int]] = {}
    for item in (*plain, *(-1 - k for k in range(len(groups)))):
        if item >= 0:
            read = program.nodes[item].inputs
        else:
            read = groups[-1 - item].needs
        waiting[item] = {maker[i] for i in read if i in maker} - {item}
    for k, found in readers_before(groups).items():
        waiting[-1 - k].update(-1 - j for j in found)
    for leaf, positions in _layers_reading(program, feeds).items():
        if leaf in writer:
            waiting[writer[leaf]].update(p for p in positions if p in waiting)

    def rank(item: int) -> tuple[int, int, int]:
        if item >= 0:
            return (0, item, 0)
        group = groups[-1 - item]
        ready = max((maker.get(i, -1) for i in group.needs), default=-1)
        return (1, max(ready, -1), -item) if group.gives else (1, -2, -item)

    order = _sorted(waiting, {item: rank(item) for item in waiting})
    return [item if item >= 0 else groups[-1 - item] for item in order]


def unawaited_readers(program: Program, group: Group, feeds: Feeds) -> list[int]:
    """Loops of layers that read what `group` writes over, and give it nothing.

    By what it computes with, it could run before them.
    """
    reading = _layers_reading(program, feeds)
    readers = {p for _, leaf in group.writes for p in reading.get(leaf, ())}
    seen, walk = set[int](), [n for n in group.needs if n in program.maker]
    while readers and walk:
        maker = program.maker[walk.pop()]
        if maker not in seen:
            seen.add(maker)
            inputs = program.nodes[maker].inputs
            walk += [n for n in inputs if n in program.maker]
    return sorted(readers - seen)


def _layers_reading(program: Program, feeds: Feeds) -> dict[int, set[int]]:
    """For each leaf that loops of layers are fed from, the positions of those loops."""
    found: dict[int, set[int]] = {}
    for position, numbers in feeds.served.items():
        for flat in numbers:
            fed = program.nodes[position].inputs[flat]
            leaf, _ = feeds.chains[-1 if fed is None else fed]
            found.setdefault(leaf, set()).add(position)
    return found


def _sorted(
    waiting: Mapping[int, set[int]], rank: Mapping[int, tuple[int, int, int]]
) -> list[int]:
    """What waits for nothing, the lowest rank first; that sets others free."""
    followers: dict[int, list[int]] = {}
    for item, needs in waiting.items():
        for need in needs:
            followers.setdefault(need, []).append(item)
    left = {item: len(needs) for item, needs in waiting.items()}
    ready = [(rank[item], item) for item, count in left.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, item = heapq.heappop(ready)
        order.append(item)
        for follower in followers.get(item, ()):
            left[follower] -= 1
            if not left[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    return order
