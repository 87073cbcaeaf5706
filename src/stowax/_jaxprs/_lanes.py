"""Along which axes an operation works on parts of its arrays, each by itself.

A *lane* is one such axis: which axis of each operand, and of each result, is cut with
it. Blocks of the results are then the operation on blocks of the operands; operands
without an axis in the lane are read whole. A lane may be `summed`: the results have no
axis of it, and are the sum of what the operation makes of the blocks. (Shardy's
sharding rules call a lane a factor.)

>>> from stowax._jaxprs._lanes import lanes_of
>>> jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((4, 8)), jnp.ones((8, 2)))
>>> for lane in lanes_of(jaxpr.eqns[0]):
...     print(lane.ins, lane.outs, lane.summed)
(1, 0) (None,) True
(0, None) (0,) False
(None, 1) (1,) False

An axis is cut in parts, one after the other, in the same proportion in every array.
Where a reshape splits an axis or joins several, that holds for the first of them alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from .. import _jax
from ._elementwise import ELEMENTWISE

Axis = int | None
"""An axis of an array; none for an array that is read whole."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One axis of an operation: by operand and by result, the axis that is cut."""

    ins: tuple[Axis, ...]
    outs: tuple[Axis, ...]
    summed: bool = False


def lanes_of(equation: Any) -> list[Lane]:
    """All lanes of an equation; none where its operation is not known or has effects.

    **Arguments:** `equation` is one of a jaxpr's.
    """
    name = equation.primitive.name
    if _jax.has_effects(equation):
        return []
    rule = _elementwise if name in ELEMENTWISE else _RULES.get(name)
    return list(rule(equation)) if rule else []


def on_blocks(equation: Any, lane: Lane, part: int, whole: int) -> Any:
    """The equation with the parameters it has on a block: `part` of a `whole` lane."""
    key, axis = _SIZED.get(equation.primitive.name), lane.outs[0]
    if equation.primitive.name == "gather":
        axis = lane.ins[0] if lane.ins[1] is None else None
    if key is None or axis is None:
        return equation
    sizes = list(equation.params[key])
    sizes[axis] = sizes[axis] * part // whole
    return equation.replace(params={**equation.params, key: tuple(sizes)})


def is_spread(aval: Any, axis: Axis) -> bool:
    """Whether an axis of an array is spread over devices by its type."""
    sharding = getattr(aval, "sharding", None)
    spec = () if sharding is None else tuple(sharding.spec)
    return axis is not None and axis < len(spec) and spec[axis] is not None


_SIZED = {
    "broadcast_in_dim": "shape",
    "gather": "slice_sizes",
    "iota": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}
"""The parameters that have the sizes of a result, or of a slice."""


def _shapes(equation: Any) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The shapes of the operands, and of the first result."""
    ins = [tuple(v.aval.shape) for v in equation.invars]
    return ins, tuple(equation.outvars[0].aval.shape)


def _elementwise(equation: Any) -> Iterator[Lane]:
    ins, out = _shapes(equation)
    for axis, size in enumerate(out):
        yield Lane(
            ins=tuple(axis if shape and shape[axis] == size else None for shape in ins),
            outs=(axis,) * len(equation.outvars),
        )


def _collective(equation: Any) -> Iterator[Lane]:
    """Of what devices hold at the same place; no lane along axes of `jax.vmap`."""
    named = all(isinstance(axis, str) for axis in equation.params["axes"])
    if named and len(equation.invars) == 1:
        yield from _elementwise(equation)


def _broadcast(equation: Any) -> Iterator[Lane]:
    ins, out = _shapes(equation)
    if len(ins) != 1:
        return  # sizes that are data
    places = equation.params["broadcast_dimensions"]
    came = {place: axis for axis, place in enumerate(places)}
    for axis, size in enumerate(out):
        mine = came.get(axis)
        if mine is None or ins[0][mine] == size:
            yield Lane(ins=(mine,), outs=(axis,))
        else:
            yield Lane(ins=(None,), outs=(axis,))


def _reduction(equation: Any) -> Iterator[Lane]:
    ins, _ = _shapes(equation)
    axes = equation.params["axes"]
    kept = [axis for axis in range(len(ins[0])) if axis not in axes]
    outs = len(equation.outvars)
    for place, axis in enumerate(kept):
        yield Lane(ins=(axis,) * len(ins), outs=(place,) * outs)
    if equation.primitive.name == "reduce_sum":
        for axis in axes:
            yield Lane(ins=(axis,), outs=(None,), summed=True)


def _product(equation: Any) -> Iterator[Lane]:
    (left, right), _ = _shapes(equation)
    (over_left, over_right), (batch_left, batch_right) = equation.params[
        "dimension_numbers"
    ]
    for pair in zip(over_left, over_right, strict=True):
        yield Lane(ins=pair, outs=(None,), summed=True)
    for place, pair in enumerate(zip(batch_left, batch_right, strict=True)):
        yield Lane(ins=pair, outs=(place,))
    place = itertools.count(len(batch_left))
    for axis in range(len(left)):
        if axis not in (*over_left, *batch_left):
            yield Lane(ins=(axis, None), outs=(next(place),))
    for axis in range(len(right)):
        if axis not in (*over_right, *batch_right):
            yield Lane(ins=(None, axis), outs=(next(place),))


def _transposition(equation: Any) -> Iterator[Lane]:
    for place, axis in enumerate(equation.params["permutation"]):
        yield Lane(ins=(axis,), outs=(place,))


def _reshape(equation: Any) -> Iterator[Lane]:
    ins, out = _shapes(equation)
    unusual = len(ins) != 1 or equation.params.get("dimensions") is not None
    if unusual or 0 in out:
        return
    starts = {math.prod(out[:axis]): axis for axis in reversed(range(len(out)))}
    before = 1
    for axis, size in enumerate(ins[0]):
        place = starts.get(before)
        if size > 1 and place is not None:
            while out[place] == 1:
                place += 1
            yield Lane(ins=(axis,), outs=(place,))
        before *= size


def _squeeze(equation: Any) -> Iterator[Lane]:
    ins, _ = _shapes(equation)
    gone = {axis % len(ins[0]) for axis in equation.params["dimensions"]}
    kept = [axis for axis in range(len(ins[0])) if axis not in gone]
    for place, axis in enumerate(kept):
        yield Lane(ins=(axis,), outs=(place,))


def _iota(equation: Any) -> Iterator[Lane]:
    ins, out = _shapes(equation)
    if not ins:
        for axis in range(len(out)):
            if axis != equation.params["dimension"]:
                yield Lane(ins=(), outs=(axis,))


def _along_others(key: str) -> Callable[[Any], Iterator[Lane]]:
    """Of what mixes places along an axis, or along axes, that a parameter names."""

    def lanes(equation: Any) -> Iterator[Lane]:
        ins, out = _shapes(equation)
        own = equation.params[key]
        own = own if isinstance(own, tuple) else (own,)
        for axis in range(len(out)):
            if axis not in own:
                count = len(equation.outvars)
                yield Lane(ins=(axis,) * len(ins), outs=(axis,) * count)

    return lanes


def _padding(equation: Any) -> Iterator[Lane]:
    for axis, wide in enumerate(equation.params["padding_config"]):
        if tuple(wide) == (0, 0, 0):
            yield Lane(ins=(axis, None), outs=(axis,))


def _slice(equation: Any) -> Iterator[Lane]:
    ins, out = _shapes(equation)
    for axis, size in enumerate(out):
        if size == ins[0][axis]:
            yield Lane(ins=(axis,), outs=(axis,))


def _gather(equation: Any) -> Iterator[Lane]:
    numbers, (ins, out) = equation.params["dimension_numbers"], _shapes(equation)
    batch = [axis for axis in range(len(out)) if axis not in numbers.offset_dims]
    operands = numbers.operand_batching_dims
    paired = dict(zip(numbers.start_indices_batching_dims, operands, strict=True))
    for axis in range(len(ins[1]) - 1):  # the last one counts the numbers of an index
        yield Lane(ins=(paired.get(axis), axis), outs=(batch[axis],))
    gone = {*numbers.collapsed_slice_dims, *operands}
    kept = [axis for axis in range(len(ins[0])) if axis not in gone]
    for place, axis in zip(numbers.offset_dims, kept, strict=True):
        whole = equation.params["slice_sizes"][axis] == ins[0][axis]
        if whole and axis not in numbers.start_index_map:
            yield Lane(ins=(axis, None), outs=(place,))


def _constraint(equation: Any) -> Iterator[Lane]:
    """Of a sharding constraint: the axes that are on every device whole."""
    spec = getattr(equation.params["sharding"], "spec", None)
    _, out = _shapes(equation)
    if spec is None:
        return
    for axis in range(len(out)):
        if axis >= len(spec) or spec[axis] is None:
            yield Lane(ins=(axis,), outs=(axis,))


_RULES: dict[str, Callable[[Any], Iterator[Lane]]] = {
    **dict.fromkeys(
        ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or"),
        _reduction,
    ),
    "reduce_prod": _reduction,
    "reduce_sum": _reduction,
    **dict.fromkeys(
        ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _along_others("axis")
    ),
    **dict.fromkeys(("pmax", "pmin", "psum", "psum_invariant", "pvary"), _collective),
    "broadcast_in_dim": _broadcast,
    "concatenate": _along_others("dimension"),
    "dot_general": _product,
    "gather": _gather,
    "iota": _iota,
    "pad": _padding,
    "reshape": _reshape,
    "rev": _along_others("dimensions"),
    "sharding_constraint": _constraint,
    "slice": _slice,
    "sort": _along_others("dimension"),
    "squeeze": _squeeze,
    "top_k": _along_others("axis"),
    "transpose": _transposition,
}
