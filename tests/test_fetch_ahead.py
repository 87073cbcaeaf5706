"""What is fetched for the next layer holds nothing up in this one.

A compiler moves a fetched value aside as soon as its own book has the copy done; what
it does not know of is the queue on the link. So the move needs what the layer ends
with.
"""

import re

import jax
import pytest

from planned_models import arguments, target_or_skip, train
from planned_steps import offload_inputs, planned
from stowax._step._trace import store_all


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


@pytest.mark.parametrize("name", ["v5e-4", "h200x8"])
def test_places_of_kept_values_are_written_once_on_a_mesh_of_tpus(name):
    """A GPU's partitioner would allocate what is empty whole on every device."""
    target = target_or_skip(name)
    mesh = target.mesh((target.device_count,), ("data",))
    params, x = arguments()
    rows = jax.NamedSharding(mesh, jax.P("data"))
    args = params, x.update(sharding=rows)
    step = jax.jit(planned(train, args, store_all))
    text = target.lower(step, *target.specs(*args)).as_text()
    filled = re.findall(r"broadcast_in_dim .*-> tensor<(\d+x\d+x\d+)xf32>", text)
    layers = next(iter(jax.tree.leaves(params))).shape[0]
    stacks = [shape for shape in filled if shape.startswith(f"{layers}x{x.shape[0]}x")]
    assert bool(stacks) == (target.platform == "gpu")
