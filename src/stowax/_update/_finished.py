"""What has to be finished before a backward pass goes on.

The gradient of what stands behind the layers, of a head say, waits for nothing but its
update. XLA's scheduler for GPUs, once it hides copies, computes such products as late
as it can, and keeps what they read: an array of logits' gradients (4 GiB, a vocabulary
of 32,768) stayed through the whole backward pass of twelve layers, 20.0 GiB instead of
16.0 on an H200. So such gradients stand behind a barrier with what the next backward
loop starts from, and behind the barriers of layers that are no loop.
"""

from collections.abc import Collection, Iterable, Mapping

import jax

from .._jaxprs._elementwise import ELEMENTWISE
from .._jaxprs._jaxpr import Node, Program
from .._jaxprs._wide import bytes_of
from .._layers._boundary import Emission
from .._layers._early_gradients import PRODUCTS
from ._feed import emission_of
from ._record import Group, Streamed

_SUMS = PRODUCTS | {"reduce_sum"}
_ON = ELEMENTWISE | {"transpose", "reshape", "squeeze"}


def finished_before(
    streamed: Streamed, boundary: Mapping[str, Emission]
) -> dict[int, list[int]]:
    """The values that go through a barrier, by the position of what comes after it.

    That is a backward loop, then with its cotangents, or a barrier, with what it has.
    What else there is was made outside of loops, is read behind, and is smaller than
    what it is summed of: what would stay for it takes more than it does itself.
    """
    program, last = streamed.program, _last_reads(streamed)
    found: dict[int, list[int]] = {}
    waiting: list[int] = []
    for at, item in enumerate(streamed.schedule):
        if isinstance(item, Group):
            continue
        node = program.nodes[item]
        emission = emission_of(node, boundary)
        through = _goes_through(node, emission)
        if through is None:
            waiting += node.outputs if _is_less(program, node, waiting) else ()
            continue
        mine = [n for n in through if n in program.maker]
        left = [n for n in waiting if last.get(n, 0) > at and n not in node.inputs]
        if mine and left:
            found[item] = [*dict.fromkeys([*mine, *left])]
        waiting = []
    return found


def _last_reads(streamed: Streamed) -> dict[int, int]:
    """Where in the schedule each value is read last."""
    last: dict[int, int] = {}
    for at, item in enumerate(streamed.schedule):
        if isinstance(item, Group):
            read = item.needs
        else:
            read = streamed.program.nodes[item].inputs
        last.update((n, at) for n in read if n is not None)
    end = len(streamed.schedule)
    last.update((n, end) for n in streamed.program.outputs if isinstance(n, int))
    return last


def _goes_through(node: Node, emission: Emission | None) -> Iterable[int | None] | None:
    """What of a node's inputs stands behind the barrier; `None`: there is none."""
    if emission is None:
        is_barrier = node.equation.primitive.name == "optimization_barrier"
        return node.inputs if is_barrier else None
    if emission.kind != "backward":
        return ()
    *_, cotangents = jax.tree.unflatten(emission.structure, node.inputs)
    return jax.tree.leaves(cotangents)


def _is_less(program: Program, node: Node, waiting: Collection[int]) -> bool:
    """Whether a node sums up what takes more, or takes no more than such sums do."""

    def size(numbers: Iterable[int]) -> int:
        return sum(bytes_of(program, number) for number in numbers)

    read = {n for n in node.inputs if n is not None and n in program.maker}
    name = node.equation.primitive.name
    if name in _SUMS:
        return size(node.outputs) < size(read)
    return name in _ON and 0 < size(node.outputs) <= size(read & {*waiting})
