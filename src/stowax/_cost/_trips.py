"""How often a `while` loop runs, where its jaxpr says so.

`lax.fori_loop` with bounds known at trace time is a `scan` when it is differentiated
and a `while` over a literal bound otherwise; only loops that test data have no count.
"""

import math
from collections.abc import Callable
from typing import Any

from .. import _jax


def trip_count(equation: Any) -> int | None:
    """Trips of `while counter < bound: counter += step`, if all three are literals."""
    params = equation.params
    test = _jax.open_jaxpr(params["cond_jaxpr"])
    body = _jax.open_jaxpr(params["body_jaxpr"])
    skipped = params["cond_nconsts"] + params["body_nconsts"]
    start = equation.invars[skipped:]
    carried = test.invars[params["cond_nconsts"] :]

    def initial(atom: Any) -> Any:
        """The literal behind an atom of the condition, if it never changes."""
        if isinstance(atom, _jax.Literal):
            return atom.val
        if atom not in carried:
            return None
        index = carried.index(atom)
        same = body.outvars[index] is body.invars[params["body_nconsts"] + index]
        fixed = same and isinstance(start[index], _jax.Literal)
        return start[index].val if fixed else None

    makers = {e.outvars[0]: e for e in test.eqns}
    compare = makers.get(test.outvars[0])
    if compare is None or compare.primitive.name not in _REACHED:
        return None
    counter, bound = compare.invars[0], initial(compare.invars[1])
    if bound is None or isinstance(counter, _jax.Literal) or counter not in carried:
        return None
    index = carried.index(counter)
    steps = {e.outvars[0]: e for e in body.eqns if e.primitive.name in ("add", "sub")}
    step = steps.get(body.outvars[index])
    if step is None or not isinstance(start[index], _jax.Literal):
        return None
    inside = body.invars[params["body_nconsts"] + index]
    if step.invars[0] is not inside or not isinstance(step.invars[1], _jax.Literal):
        return None
    change = float(step.invars[1].val)
    change = -change if step.primitive.name == "sub" else change
    distance = float(bound) - float(start[index].val)
    return _REACHED[compare.primitive.name](distance, change)


def _upwards(distance: float, change: float, *, including: bool) -> int | None:
    if change <= 0:
        return None
    trips = (
        math.floor(distance / change) + 1 if including else math.ceil(distance / change)
    )
    return max(0, trips)


_REACHED: dict[str, Callable[[float, float], int | None]] = {
    "lt": lambda d, c: _upwards(d, c, including=False),
    "le": lambda d, c: _upwards(d, c, including=True),
    "gt": lambda d, c: _upwards(-d, -c, including=False),
    "ge": lambda d, c: _upwards(-d, -c, including=True),
}
