"""When a layer's weights are fetched, and its gradients written, within the loop.

While a layer computes, the weights that it will still need, or that the next layer
needs, are in flight. Fetching everything one layer ahead would hold two layers' weights
and two layers' gradients. But the link brings one array after the other, and a weight
is read in a part of the layer's time only: so a weight is fetched

- *within* the iteration that reads it, where the work before its first reader takes as
  long as its share of the bytes does;
- *in turn*, in the iteration before, after its last reader there: the copy lands in the
  buffer that was just read;
- *ahead*, in the iteration before, from its beginning: a second buffer.

Gradients mirror it: written in the iteration that makes them where enough work is left,
else in the next one. With two products per layer, both passes hold one layer's weights
and one layer's gradients and still have a copy under way in each direction all the
time.

Where the link sets the pace, nothing of that saves time, and memory can be had: in a
*lean* loop each fetch waits until the weights before it have been read, and gradients
are written at once.

Work is counted as `work` does: roughly, from shapes alone. It decides when a copy
starts, not what is right.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import _jax
from .._jaxprs._jaxpr import Node
from ._host_layers import can_order

# Below this part of a layer's streamed bytes, an array is fetched ahead: a second
# buffer is cheaper than a wait.
_SMALL = 0.02
# Work is known roughly: a window that is nearly long enough is taken.
_ENOUGH = 0.8
# Floating-point operations in the time in which one element is read or written: chips
# do 200 to 300 per byte, elements have two or four, and fusion saves most of it.
_PER_ELEMENT = 200.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """When one weight is fetched: `ahead`, and there `after` that value is made."""

    ahead: bool
    after: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation of an iteration: its work, and the values that it reads and makes.

    `moves` is true of operations that only pass their operand on, in another form.
    """

    work: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    moves: bool


_MOVES = frozenset(
    {
        "convert_element_type",
        "copy",
        "reduce_precision",
        "reshape",
        "squeeze",
        "transpose",
        "sharding_constraint",
    }
)


def step_of(node: Node, reads: Iterable[int | None], makes: Iterable[int]) -> Step:
    """An operation, its values called by the numbers in `reads` and `makes`."""
    return Step(
        work=work(node.equation),
        reads=tuple(i for i in reads if i is not None),
        makes=tuple(makes),
        moves=node.equation.primitive.name in _MOVES,
    )


def fetch_turns(
    steps: Sequence[Step],
    sizes: Mapping[int, int],
    avals: Sequence[Any],
    *,
    lean: bool = False,
) -> dict[int, Turn]:
    """When each weight is fetched.

    **Arguments:** `sizes` has the bytes of every weight, by value number; `avals` the
    types of all values. With `lean`, each fetch waits until
    the weights before it have been read.
    """
    total = sum(s.work for s in steps) or 1.0
    whole = sum(sizes.values()) or 1
    readers = _readers(steps, sizes)
    done = [0.0]
    for step in steps:
        done.append(done[-1] + step.work)

    def mark(positions: Sequence[int]) -> int | None:
        """A value that is there when the last of the steps at `positions` is done."""
        made = [o for k in positions for o in steps[k].makes if _known(avals, o)]
        return made[-1] if made else None

    reading = sorted({k for found in readers.values() for k in found})
    turns = {}
    for number, size in sizes.items():
        share, found = _ENOUGH * size / whole, readers[number]
        first = done[found[0]] / total if found else 0.0
        left = 1 - done[found[-1] + 1] / total if found else 0.0
        before = [k for k in reading if found and k < found[0]]
        if lean and found:
            turns[number] = Turn(ahead=False, after=mark(before[-1:]))
        elif size < _SMALL * whole or not found:
            turns[number] = Turn(ahead=True)
        elif first >= share:
            turns[number] = Turn(ahead=False)
        elif left >= share and (wait := mark(found)) is not None:
            turns[number] = Turn(ahead=True, after=wait)
        else:
            turns[number] = Turn(ahead=True)
    return turns


def late_gradients(
    steps: Sequence[Step], made: Mapping[int, int], sizes: Mapping[int, int]
) -> list[int]:
    """Which gradients are written one iteration later than they are made.

    **Arguments:** `made` says which value is the gradient, `sizes` has its bytes, both
    by whatever number the caller gives a gradient.
    """
    total = sum(s.work for s in steps) or 1.0
    whole = sum(sizes.values()) or 1
    late, left = [], {}
    rest = total
    for step in steps:
        rest -= step.work
        left.update(dict.fromkeys(step.makes, rest / total))
    for number, value in made.items():
        if left.get(value, 0.0) < _ENOUGH * sizes[number] / whole:
            late.append(number)
    return late


def _known(avals: Sequence[Any], number: int) -> bool:
    return can_order(avals[number])


def _readers(steps: Sequence[Step], weights: Iterable[int]) -> dict[int, list[int]]:
    """Positions of the steps that read each weight, or another form of it alone."""
    forms = {number: number for number in weights}
    found: dict[int, list[int]] = {number: [] for number in forms}
    for position, step in enumerate(steps):
        read = dict.fromkeys(forms[i] for i in step.reads if i in forms)
        for number in read:
            found[number].append(position)
        if step.moves and len(read) == 1:
            forms.update(dict.fromkeys(step.makes, next(iter(read))))
    return found


def work(equation: Any) -> float:
    """Floating-point operations, or what takes as long, of one run of `equation`."""
    if inner := [*_jax.jaxprs_in(equation.params)]:
        times = equation.params.get("length", 1)
        return times * sum(work(e) for jaxpr in inner for e in jaxpr.eqns)
    elements = sum(getattr(v.aval, "size", 0) for v in equation.outvars)
    if equation.primitive.name == "dot_general":
        left = equation.invars[0].aval.shape
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * elements * math.prod(left[k] for k in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        outputs = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * elements * kernel.size / max(outputs, 1)
    return _PER_ELEMENT * elements
