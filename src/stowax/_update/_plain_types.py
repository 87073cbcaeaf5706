"""A group's loop where types say how arrays are spread, run without these types.

That is so over the axes that `jax.make_mesh` makes. JAX refuses to slice a part of a
spread axis, whose type it cannot tell. The compiler can, and what comes out of the loop
has the types that the step gives it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._jaxprs._jaxpr import Program
from .._layers._host_layers import first_element
from ._record import Group

Begin = tuple[Sequence[Any], bool]
Results = tuple[dict[int, Any], list[Any]]


def in_plain_types(
    run: Callable[[Mapping[int, Any], dict[int, Any], Begin], Results],
    program: Program,
    group: Group,
    env: Mapping[int, Any],
    host: dict[int, Any],
    begin: Begin,
) -> Results:
    """What `run(env, host, begin)` gives for a group: results by number, and signs.

    **Arguments:** `env` has values by number, `host` buffers by leaf, and gets what
    becomes of them; `begin` has the signs to begin after, and whether they are those of
    the loop before.
    """
    leaves = {*(i for i in group.reads if i in host), *(i for _, i in group.writes)}
    mine = {i: host[i] for i in leaves}
    if not any(_jax.aval_of(v).sharding.mesh.explicit_axes for v in mine.values()):
        return run(env, host, begin)
    signs, follows = begin
    wanted = [
        *(*group.others, *group.sliced, *group.spread),
        *(v.whole for v in group.views),
        *(v.made for v in group.gradients),
        *(i for i in group.reads if i in env),
    ]

    def loop(buffers: Any, values: Any, signs: Any) -> Any:
        own = dict(buffers)
        results, done = run(values, own, (signs, follows))
        return own, results, [first_element(v) for v in done]

    made = [*(number for number, _ in group.gives), *group.totals]
    types = (
        {i: _sharding_of(_jax.aval_of(v)) for i, v in mine.items()},
        {n: _sharding_of(program.avals[n]) for n in made},
        [jax.sharding.PartitionSpec()],
    )
    values = {n: env[n] for n in dict.fromkeys(wanted)}
    run_loop = _jax.partitioned_by_compiler(loop, types)
    buffers, results, done = run_loop(mine, values, list(signs))
    host.update(buffers)
    return results, done


def _sharding_of(aval: Any) -> Any:
    return _jax.explicit_sharding(aval) or jax.sharding.PartitionSpec()
