"""What the arguments of any jitted step are for, by what becomes of them.

A planned step knows its roles (`_roles` finds them while it is traced under marks). Any
other step tells them too, in the names that JAX's transformations leave in its jaxpr:
what a differentiated function reads stands under `jvp(...)`. An argument that is read
there and comes back in its own type, updated or as a gradient, is a parameter; one that
does not come back is the batch; one that comes back and is not read there is optimizer
state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _jax
from .._jaxprs._reach import reach

_DIFFERENTIATED = "jvp("


def argument_roles(traced: Any, planned: Sequence[str] = ()) -> Mapping[str, str]:
    """Role of every argument of a traced step by its name; nothing if none is known.

    **Arguments:** `traced` is what `jitted.trace(...)` returned; `planned` are the
    roles that a plan has for the step's arguments, in their order.
    """
    jaxpr = _jax.open_jaxpr(traced.jaxpr)
    names = _jax.argument_names(traced.jaxpr)
    if planned and len(planned) == len(names):
        return dict(zip(names, planned, strict=True))
    read = 0

    def tell(equation: Any, reached: int) -> None:
        nonlocal read
        if _DIFFERENTIATED in _jax.name_stack(equation):
            read |= reached

    inputs = [1 << i for i in range(len(jaxpr.invars))]
    outputs = reach(traced.jaxpr, inputs, choices=True, tell=tell)
    if not read or len(names) != len(jaxpr.invars):
        return {}
    returned = [
        ((variable.aval.shape, variable.aval.dtype), reached)
        for variable, reached in zip(jaxpr.outvars, outputs, strict=True)
    ]
    roles = {}
    for i, (name, variable) in enumerate(zip(names, jaxpr.invars, strict=True)):
        kind, bit = (variable.aval.shape, variable.aval.dtype), 1 << i
        comes_back = any(kind == other and bit & reached for other, reached in returned)
        if read & bit:
            roles[name] = "parameter" if comes_back else "batch"
        elif comes_back:
            roles[name] = "optimizer state"
    return roles
