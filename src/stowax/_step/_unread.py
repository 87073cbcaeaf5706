"""What a differentiated function returns and the step never reads.

`jax.value_and_grad(loss, has_aux=True)` hands out whatever the loss returns: logits
that only some steps measure, a state that is not kept. JAX drops what nobody reads. So
does this, before anything is planned: what has to come out whole cannot run in blocks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _jax
from .._layers._calls import Call
from ._marked import BACKWARD, FORWARD, PLAIN, TICKET


def without_unread(jaxpr: Any, calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls of a recorded step; what it does not read of one is a zero in place.

    What is read for nothing counts as read: it is evaluated, and would meet the zero.
    It stays, as `_checks` looks there for steps that learn nothing.
    """
    read: dict[int, set[int]] = {}
    _note_read(_jax.open_jaxpr(jaxpr), read)
    return tuple(
        _without(call, read[number]) if number in read else call
        for number, call in enumerate(calls)
    )


def _note_read(jaxpr: Any, read: dict[int, set[int]]) -> None:
    """Takes note of what is read of the results of each call, here and inside."""
    variables = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, _jax.Var)}
    variables.update(v for v in jaxpr.outvars if isinstance(v, _jax.Var))
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in (PLAIN, FORWARD):
            found = read.setdefault(params["number"], set())
            found.update(k for k, v in enumerate(equation.outvars) if v in variables)
        elif name == BACKWARD:
            read.setdefault(params["number"], set()).update(params["given"])
        for inner in _jax.jaxprs_in(params):
            _note_read(inner, read)


def _without(call: Call, read: set[int]) -> Call:
    """The call without results that are not `read`; those that are inputs stay.

    Where one was there is a scalar: its place counts, its type does not.
    """
    opened = _jax.open_jaxpr(call.jaxpr)
    stay = read | call.handed_through().keys()
    if stay.issuperset(range(len(opened.outvars))) or _jax.consts_of(call.jaxpr):
        return call
    zero = _jax.Literal(np.float32(0), TICKET)
    outputs = [v if k in stay else zero for k, v in enumerate(opened.outvars)]
    needed = _jax.needed_part(_jax.with_outputs(call.jaxpr, outputs))
    return dataclasses.replace(call, jaxpr=_jax.ClosedJaxpr(needed, []), known={})
