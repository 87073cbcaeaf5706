"""What is fetched for the next layer holds nothing up in this one.

A compiler moves a fetched value aside as soon as its own book has the copy done; what
it does not know of is the queue on the link. So the move needs what the layer ends
with.
"""

import jax
import pytest

from planned_models import arguments, train
from planned_steps import offload_inputs, planned


def loops(jaxpr):
    """Every scan of a jaxpr, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from loops(inner)


def needs(jaxpr, variable):
    """The primitives that `variable` is made with."""
    makers = {out: e for e in jaxpr.eqns for out in e.outvars}
    found, seen, left = set(), set(), [variable]
    while left:
        equation = makers.get(left.pop())
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            found.add(equation.primitive.name)
            left += [v for v in equation.invars if not hasattr(v, "val")]
    return found


@pytest.mark.parametrize("way", ["offload", "offload ahead"])
def test_what_is_fetched_ahead_is_moved_aside_when_the_layer_is_done(way):
    def choose(stack, body):
        return dict.fromkeys(offload_inputs(stack, body), way)

    step = planned(train, arguments(), choose)
    traced = jax.make_jaxpr(step)(*arguments())
    (backward,) = [e for e in loops(traced.jaxpr) if e.params["reverse"]]
    body = backward.params["jaxpr"].jaxpr
    moves = [
        e
        for e in body.eqns
        if e.primitive.name == "select_n"
        and any("device_put" in needs(body, v) for v in e.invars[1:])
    ]
    assert moves
    for move in moves:
        assert "dot_general" in needs(body, move.invars[0])
        assert "dot_general" not in needs(body, move.invars[-1])
