"""Makes a body smaller before it becomes a matrix; every reduction keeps an optimum.

Called by `_model`. Each reduction with its proof:

1. *Ancestors only.* An operation from which no needed value descends never runs again
   in a minimal closure; it and its values are left out.
2. *Not worth storing.* Let v be not needed and read by one operation f that could run
   again, and let f have one output u (among those that matter) of at most v's bytes and
   seconds of storing, for which every decision is open that is open for v. In any plan
   that stores v, store u instead, the same way: f and whatever made v stop running
   again, the bytes stored and the seconds of storing do not grow, u's working bytes are
   not more than before and v's vanish. So v need not be storable. Chains compose,
   because each exchange moves forward. Bytes stored are those of all runs, with what
   programs were seen to need besides.
3. *Runs with its only reader.* If v cannot be stored, is not needed, is its operation's
   only output that matters and is read by one operation f, then v's operation runs
   again exactly when f does: both share one variable.

4. *Lesser moments.* A point whose live values and reserved bytes are both within
   another point's constrains nothing.
5. *Swaps.* Let i and j have equal bytes, those that were seen too, cross the link alike
   and have both decisions open, let offloading instead of keeping cost i no more
   seconds than j, and let j be alive at every point where i is. Keeping i and
   offloading j is no better than the other way round: the stacks and the bytes moved
   are the same, and the working bytes of i appear only where those of j vanish. One
   row, o_j + s_i <= 1, forbids it. Layers are full of values of equal size; without
   these rows the solver walks through their permutations (measured on a decoder layer
   beside an encoder layer: seconds instead of tenths).

One rule is no reduction but part of the model: *state goes in turn*. Of state that
crosses the link alike, the smaller arrays are offloaded before the larger ones. What a
byte of it saves and costs is the same in all of them, so little is lost, at most the
difference between two sizes; free to choose, the solver would look for the sum of sizes
that fills the budget to the byte (on 18 moments of a 13B model: half a second and more,
and nothing gained).

What goes silently wrong: a reduction that is right for time and wrong for memory. That
is why 2 compares bytes and why 3 leaves v's bytes in the points' rows.
"""

import dataclasses
import itertools

import numpy as np

from .._records._stages import Body, Decision
from ._tables import BodyTable, may_recompute, storing_decisions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What is left of a body to decide.

    `keep` and `offload` are the values for which that variable exists; `operations`
    those that may run again, with `leader[f]` the operation whose variable stands for
    f; `obtain` the values that need a row (needed ones); `points` the rows that can
    bind; `swaps` the pairs (i, j) of which i must not be kept while j is offloaded.
    """

    keep: tuple[int, ...]
    offload: tuple[int, ...]
    operations: tuple[int, ...]
    leader: dict[int, int]
    outputs: dict[int, tuple[int, ...]]
    inputs: dict[int, tuple[int, ...]]
    obtain: tuple[int, ...]
    points: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...]


def reduce_body(table: BodyTable) -> Reduced:
    """The reductions above, in order."""
    body = table.body
    values, operations = _ancestors(body)
    readers: dict[int, list[int]] = {i: [] for i in values}
    outputs: dict[int, list[int]] = {f: [] for f in operations}
    inputs: dict[int, tuple[int, ...]] = {}
    for i in values:
        if (f := body.values[i].operation) in outputs and may_recompute(
            body, body.values[i]
        ):
            outputs[f].append(i)
    for f in operations:
        inputs[f] = tuple(
            i
            for i in dict.fromkeys(body.operations[f].inputs)
            if not body.values[i].available
        )
        for i in inputs[f]:
            readers[i].append(f)
    open_for = {i: storing_decisions(body, body.values[i]) for i in values}
    storing = {
        i: frozenset()
        if _not_worth_storing(table, i, readers, outputs, open_for)
        else open_for[i]
        for i in values
    }
    points = _points(table, values)
    both = [i for i in values if len(storing[i]) == 2]
    return Reduced(
        keep=tuple(i for i in values if "keep" in storing[i]),
        offload=tuple(i for i in values if "offload" in storing[i]),
        operations=tuple(operations),
        leader=_leaders(body, operations, readers, outputs, storing),
        outputs={f: tuple(o) for f, o in outputs.items()},
        inputs=inputs,
        obtain=tuple(i for i in values if body.values[i].needed),
        points=points,
        swaps=_in_turn(table.body, both)
        if body.phase == "update"
        else _swaps(table, both, points),
    )


def _ancestors(body: Body) -> tuple[list[int], list[int]]:
    """Values and operations that some needed value may be recomputed from, in order."""
    waiting = [v.index for v in body.values if v.needed and not v.available]
    values: set[int] = set()
    operations: set[int] = set()
    while waiting:
        i = waiting.pop()
        value = body.values[i]
        if i in values or value.available:
            continue
        values.add(i)
        if value.operation is not None and may_recompute(body, value):
            operations.add(value.operation)
            waiting += body.operations[value.operation].inputs
    return sorted(values), sorted(operations)


def _not_worth_storing(
    table: BodyTable,
    i: int,
    readers: dict[int, list[int]],
    outputs: dict[int, list[int]],
    open_for: dict[int, frozenset[Decision]],
) -> bool:
    body = table.body
    value = body.values[i]
    if value.needed or len(readers[i]) != 1 or not may_recompute(body, value):
        return False
    made = outputs[readers[i][0]]
    if len(made) != 1:
        return False
    (u,) = made
    other = body.values[u]
    return bool(
        other.bytes <= value.bytes
        and table.kept[u] <= table.kept[i]
        and table.offloaded[u] <= table.offloaded[i]
        and other.keep_seconds <= value.keep_seconds
        and other.offload_seconds <= value.offload_seconds
        and open_for[i] <= open_for[u]
    )


def _leaders(
    body: Body,
    operations: list[int],
    readers: dict[int, list[int]],
    outputs: dict[int, list[int]],
    storing: dict[int, frozenset[Decision]],
) -> dict[int, int]:
    leader = {f: f for f in operations}
    for f in reversed(operations):
        if len(outputs[f]) != 1:
            continue
        (i,) = outputs[f]
        alone = len(readers[i]) == 1 and not storing[i] and not body.values[i].needed
        if alone:
            leader[f] = leader[readers[i][0]]
    return leader


def _points(table: BodyTable, values: list[int]) -> tuple[int, ...]:
    """The points that no other point covers; of equal ones, the first."""
    if not len(table.reserved):
        return ()
    live = table.live.toarray()[:, values].astype(bool)
    reserved = table.reserved
    outside = live.astype(np.float32) @ (~live).astype(np.float32).T
    covered = (outside == 0) & (reserved[:, None] <= reserved[None, :])
    equal = covered & covered.T
    before = np.tri(len(reserved), k=-1, dtype=bool)
    lesser = (covered & ~equal) | (equal & before)
    np.fill_diagonal(lesser, False)
    return tuple(int(p) for p in np.flatnonzero(~lesser.any(axis=1)))


def _in_turn(body: Body, both: list[int]) -> tuple[tuple[int, int], ...]:
    """Pairs by the rule for state: of neighbours in size, the smaller goes first."""
    pairs = []
    lines: dict[tuple, list[int]] = {}
    for i in both:
        value = body.values[i]
        through = tuple(passage.body for passage in value.passages)
        on_host = any(i in part.values for part in body.host_updates)
        lines.setdefault((value.role, through, on_host), []).append(i)
    for line in lines.values():
        line.sort(key=lambda i: (body.values[i].bytes, i))
        pairs += list(itertools.pairwise(line))
    return tuple(pairs)


def _swaps(
    table: BodyTable, both: list[int], points: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Pairs by reduction 5; of values alive at the same points, by index."""
    live = table.live.toarray()[list(points)].astype(bool)
    traffic = [(v.update_in, v.update_out, v.passages) for v in table.body.values]
    more = [v.offload_seconds - v.keep_seconds for v in table.body.values]
    bytes_more = table.offloaded - table.kept
    pairs = []
    for place, i in enumerate(both):
        for j in both[place + 1 :]:
            if table.bytes[i] != table.bytes[j] or traffic[i] != traffic[j]:
                continue
            if bytes_more[i] != bytes_more[j]:
                continue
            if more[i] <= more[j] and not (live[:, i] & ~live[:, j]).any():
                pairs.append((i, j))
            elif more[j] <= more[i] and not (live[:, j] & ~live[:, i]).any():
                pairs.append((j, i))
    return tuple(pairs)
