"""A group of an update that the host's processor works on: nothing crosses the link.

Where all that a group reads and writes is in host memory, gradients included, the
device need not see it: `run_on_host` runs the group's equations there, on whole arrays,
in place of the loop over blocks. `_state` says for which groups that may be, and what
it costs; the plan, whether it is done.

What the compilers do with it (JAX 0.10.2 and 0.12):

- All computations on the host that do not wait for one another become one, whatever
  scopes they are in: it would begin when the last gradient is there, and be one name
  for all. So each group waits for all results of the one before, by a number that is
  never positive (`select` keeps every operand as it is, and no compiler can know).
- A TPU updates in place what is in host memory and donated. What is on the device it
  lays out anew for the host, whole, on the way in and out: with parameters and
  gradients there the tutorial's Adam step took 3.06 GiB of a v5p instead of 2.49. So
  groups with arrays on the device stream.
- A GPU does not update in place: the results are copied over the state, in host memory,
  by copies that the device waits for. So no GPU is offered this (`PLATFORMS`).
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._hlo._host_calls import update_scope
from .._jaxprs._jaxpr import Node, Program, bind, spec_of, trace
from .._layers._axis_order import lying
from .._layers._host_layers import not_positive
from .._layers._host_slots import to_host
from ._record import Group

PLATFORMS = frozenset({"tpu"})
"""Where an update on the host is done in place."""


def can_run_on_host(group: Group) -> bool:
    """Whether all arrays that a group works on are in host memory.

    Groups of leaves that have no gradient are left out: two of them may share a loop
    without having anything to do with one another. So are those that read what they do
    not write, a parameter that is frozen.
    """
    given = {value.number for value in group.gradients}
    given |= {leaf for _, leaf in group.writes}
    on_device = (*group.sliced, *group.views, *group.spread, *group.gives)
    other = bool(on_device or group.totals or {*group.reads} - given)
    return bool(group.writes and group.gradients) and not other


def written(group: Group) -> tuple[int, ...]:
    """The leaves that a group writes."""
    return tuple(leaf for _, leaf in group.writes)


def host_bytes(program: Program, group: Group) -> int:
    """Bytes that the host's processor reads and writes for a group.

    XLA's CPU compiler makes one loop for each result, which reads what the result is
    made of: other results, else the arrays that come in. Adam's three, in float32, are
    40 bytes an element.
    """
    results = {value for value, _ in group.writes}
    inside = {
        o: program.nodes[p] for p in group.nodes for o in program.nodes[p].outputs
    }

    def size(number: int) -> int:
        aval = program.avals[number]
        return aval.size * aval.dtype.itemsize

    total = 0
    for result in results & inside.keys():
        read: set[int] = set()
        waiting, seen = [*inside[result].inputs], set()
        while waiting:
            number = waiting.pop()
            if number is None or number in seen:
                continue
            seen.add(number)
            if number in inside and number not in results:
                waiting += inside[number].inputs
            else:
                read.add(number)
        total += size(result) + sum(size(number) for number in read)
    return total


def run_on_host(
    program: Program,
    group: Group,
    env: dict[int, Any],
    host: dict[int, Any],
    signs: Sequence[Any],
) -> list[Any]:
    """Runs a group on the host's processor: a sign that it is done, on the device.

    **Arguments:** `host` has the arrays in host memory by leaf, and gets what becomes
    of them. The group begins when `signs` are there.
    """
    gradients = {value.number: value for value in group.gradients}
    given = {
        n: env[gradients[n].made] if n in gradients else host[n] for n in group.reads
    }
    given |= {n: to_host(jnp.asarray(env[n])) for n in group.others}
    names = [*given]

    def work(order: Any, *arrays: Any) -> list[Any]:
        values = {}
        for number, array in zip(names, arrays, strict=True):
            value = gradients.get(number)
            if value is not None and value.index is not None:
                array = jax.lax.index_in_dim(array, value.index, keepdims=False)
            shape = program.avals[number].shape
            array = jnp.reshape(array, shape and lying(shape, group.cut.order))
            never = jax.lax.broadcast(order > 0, array.shape)
            values[number] = jax.lax.select(never, jnp.zeros_like(array), array)
        for position in group.nodes:
            node = program.nodes[position]
            out = _result(group, node, node.read(values))
            values.update(zip(node.outputs, out, strict=True))
        made = [values[number] for number, _ in group.writes]
        return [not_positive(made), *made]

    with jax.named_scope(update_scope(written(group))):
        inputs = [to_host(not_positive(signs)), *given.values()]
        jaxpr = trace(work, *(spec_of(_jax.aval_of(value)) for value in inputs))
        sign, *made = _jax.compute_on_host(jaxpr, inputs, on_device=1)
    host.update(zip(written(group), made, strict=True))
    return [sign]


def _result(group: Group, node: Node, values: list[Any]) -> list[Any]:
    """What a node makes of arrays as they lie in host memory."""
    order, params = group.cut.order, node.equation.params
    if order is None or node.equation.primitive.name != "broadcast_in_dim":
        return bind(node.equation, values)
    # Nothing but single numbers is spread out in such a group.
    number = jnp.asarray(values[0], node.equation.outvars[0].aval.dtype)
    return [jax.lax.broadcast(number, lying(params["shape"], order))]


def runs_on_host(group: Group, leaves: Collection[int]) -> bool:
    """Whether a group is to run on the host where `leaves` are updated there."""
    return can_run_on_host(group) and {*leaves}.issuperset(written(group))
