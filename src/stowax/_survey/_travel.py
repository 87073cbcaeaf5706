"""How offloaded values travel: written at once or later, fetched in time or ahead.

*Out.* A value that arises in a layer's first half is written in the iteration that
makes it, one that arises later in the next. XLA's scheduler begins with what is written
at once when the last of it is made (read off two programs for TPUs; by it, plans for
GPUs were 3 % faster to 2 % slower). Where the link could not bring all of it out in
what is left of a layer then, the next iteration begins with some of it, too. What is
written later is fetched a layer ahead.

*Back.* What is written at once would have the whole backward iteration to come back in,
as it is read late there, unless something that the backward pass begins with is
computed again from it: then it is read at once. So for each such value it is asked when
it is first read, and whether the link has brought it by then, with everything that is
in line before it; if not, it is fetched a layer ahead, too. So is what is small beside
the other copies and what something is computed again from: the compiler may begin with
that, and then the small copy is waited for as long as the large ones before it take.

On a v5p, by the compiled schedules: Llama2-13B, four values of a layer offloaded and
its second half computed again from them, 7.3 s a step, and 6.5 with what is read at
once fetched ahead; Gemma2-27B, three values made in the first half of a layer, 7.4 s,
and 6.6 with one of them written in the next iteration; PaliGemma2-28B, 64 to 288 MiB
beside 2304 MiB a layer, 19.0 s, and 15.2 with the small ones fetched ahead. There, five
values made from 3 % of a body on all began to leave at 49 %, when the last was made:
17.2 s; 15.9 with that one written in the next iteration, and 15.3 with the 2304 MiB,
too. Of four values of Llama2-13B the first is the layer's input, and there is time for
all of them if that leaves at once: 5.85 s a step, and 6.09 with it a layer later.

`_pipeline` says what becomes of each way.
"""

import math
from collections.abc import Mapping, Sequence

from .._planner import operations_run_again, recomputed_values
from .._records._stages import Body, Decision, Link

_WORTH_LEAVING = 0.02
"""Part of a layer's forward pass that has to be saved for a value to be written a layer
later, which takes its bytes once or twice more: assumed."""

_SMALL_IN_LINE = 0.125
"""Part of a layer's copies below which one is cheap to fetch ahead: assumed."""


def is_early(body: Body, index: int) -> bool:
    """Whether a value arises in the first half of a layer's forward pass."""
    maker = body.values[index].operation
    before = 0.0 if maker is None else sum(o.seconds for o in body.operations[:maker])
    return before < 0.5 * body.forward_seconds


def ways_to_store(
    body: Body, chosen: Sequence[Decision | None], link: Link, *, tight: bool = False
) -> dict[int, str]:
    """Value number → how it is stored, for the values that are.

    **Arguments:** `chosen`, one decision per value of `body`. Where it is `tight`, what
    is written at once is waited for instead of lying on the device a layer early.
    """
    stored: dict[int, str] = {
        i: str(decision)
        for i, decision in enumerate(chosen)
        if decision in ("keep", "offload")
    }
    offloaded = [i for i, way in stored.items() if way == "offload"]
    early = [i for i in offloaded if is_early(body, i)]
    if not tight:
        early = _in_time(body, offloaded, early, link)
    seconds = {i: body.values[i].bytes / link.host_to_device for i in offloaded}
    ahead = [] if tight else _in_line(body, tuple(chosen), early, seconds)
    stored |= dict.fromkeys(early, "offload early")
    return stored | dict.fromkeys(ahead, "offload ahead")


def _in_line(
    body: Body,
    chosen: tuple[Decision | None, ...],
    early: Sequence[int],
    seconds: Mapping[int, float],
) -> list[int]:
    """Those of `early` that would come too late in the iteration that reads them.

    What is fetched for the next layer stands in line before what is read here. And what
    is small beside all that is in line had better be there if something is computed
    again from it: the compiler may well begin with that.
    """
    again = operations_run_again(body, recomputed_values(body, chosen)[0])
    inputs = {i for f in again for i in body.operations[f].inputs}
    small = _SMALL_IN_LINE * sum(seconds.values())
    ahead = [i for i in early if i in inputs and seconds[i] < small]
    first_read = _first_read(body, chosen)
    here = sorted((i for i in early if i not in ahead), key=lambda i: first_read[i])
    waited_for = True
    while waited_for:
        arrival = sum(seconds.values()) - sum(seconds[i] for i in here)
        waited_for = False
        for i in here:
            arrival += seconds[i]
            if arrival > first_read[i]:
                here.remove(i)
                ahead.append(i)
                waited_for = True
                break
    return ahead


def _in_time(
    body: Body, offloaded: Sequence[int], early: Sequence[int], link: Link
) -> list[int]:
    """Those of `early` that may go in the iteration that makes them.

    Copies of one direction go one after the other: first what the iteration before
    left, then, once all of the others are made, those. Where the last would be waited
    for, the next iteration begins with one of them, and with another, as long as that
    ends markedly sooner.
    """
    made = {i: _made(body, i) for i in early}
    seconds = {i: body.values[i].bytes / link.device_to_host for i in offloaded}
    # What is there from the start, by itself or left by the iteration before, need not
    # wait for the others if that is soon enough.
    first = sum(s for i, s in seconds.items() if not made.get(i))
    end = max(first, max(made.values(), default=0.0)) + sum(seconds.values()) - first
    if end <= body.forward_seconds:
        return list(early)

    def cost(staying: Sequence[int]) -> tuple[float, float]:
        before = sum(seconds[i] for i in offloaded if i not in staying)
        begin = max((made[i] for i in staying), default=0.0)
        end = max(before, begin) + sum(seconds[i] for i in staying)
        return max(end, body.forward_seconds), before  # what waits takes memory

    staying = list(early)
    while staying:
        others = [[i for i in staying if i != left] for left in staying]
        fewer = min(others, key=cost)
        if cost(staying)[0] - cost(fewer)[0] <= _WORTH_LEAVING * body.forward_seconds:
            break
        staying = fewer
    return staying


def _made(body: Body, index: int) -> float:
    """Seconds into a layer's forward pass at which a value is there."""
    maker = body.values[index].operation
    return sum(o.seconds for o in body.operations[: 0 if maker is None else maker + 1])


def _first_read(body: Body, chosen: tuple[Decision | None, ...]) -> list[float]:
    """Seconds into a layer's backward pass at which each value is first read.

    The backward pass goes through the operations from the last to the first; what is
    computed again is needed when what is made of it is.
    """
    recomputed, _ = recomputed_values(body, chosen)
    again = operations_run_again(body, recomputed)
    whole = sum(o.seconds for o in body.operations) or 1.0
    ends, sofar = [], 0.0
    for operation in body.operations:
        sofar += operation.seconds
        ends.append(sofar / whole)
    latest = [0.0] * len(body.values)
    for operation in body.operations:
        for i in (*operation.inputs, *operation.outputs):
            latest[i] = max(latest[i], ends[operation.index])
    backward = body.backward_seconds + sum(body.operations[f].seconds for f in again)
    read = [
        (1.0 - latest[v.index]) * backward if v.needed else math.inf
        for v in body.values
    ]
    for operation in reversed(body.operations):
        if operation.index in again:
            made = min(read[o] for o in operation.outputs)
            for i in operation.inputs:
                read[i] = min(read[i], made)
    return read
