"""What each argument of a training step is for, found from the data flow alone.

The step is traced with every input of a marked function passed through an observer: an
identity that leaves a name in the jaxpr, and whose derivative rule leaves another name
when the input is differentiated. Which arguments reach which names says the rest:

- a *parameter* reaches a differentiated input;
- the *batch* reaches other inputs of the marked function, and no parameter does;
- *optimizer state* reaches no marked input, but an output that parameters reach too;
- anything else is *other*.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from . import _jax
from ._jaxpr import is_float
from ._stages import Role

_DIFFERENTIATED, _CONSTANT = "stowax.differentiated", "stowax.constant"


def observe(value: Any) -> Any:
    """`value`, with a name in the jaxpr that says whether it is differentiated."""
    if not is_float(_jax.aval_of(value)):
        return checkpoint_name(value, _CONSTANT)

    @jax.custom_jvp
    def observed(x: Any) -> Any:
        return checkpoint_name(x, _CONSTANT)

    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        zero = isinstance(t, jax.custom_derivatives.SymbolicZero)
        return checkpoint_name(x, _CONSTANT if zero else _DIFFERENTIATED), t

    observed.defjvp(rule, symbolic_zeros=True)
    return observed(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The role of every input of a step, and what becomes of its state.

    `differentiated` says whether anything is at all. `updates` has, for parameters and
    optimizer state, the output that takes an input's place (both flat positions).
    """

    roles: tuple[Role, ...]
    differentiated: bool
    updates: Mapping[int, int]


def find_roles(jaxpr: Any, input_count: int) -> Roles:
    """The roles of a step's inputs.

    The jaxpr is that of a step in which marked inputs went through `observe`.
    """
    reached = {_DIFFERENTIATED: 0, _CONSTANT: 0}
    differentiated = False

    def on_equation(equation: Any, arguments: int) -> None:
        nonlocal differentiated
        name = equation.params["name"] if equation.primitive.name == "name" else ""
        differentiated |= name == _DIFFERENTIATED  # perhaps a constant, by no argument
        if name in reached:
            reached[name] |= arguments

    outputs = flow_of(jaxpr, [1 << i for i in range(input_count)], on_equation)
    parameters = reached[_DIFFERENTIATED]
    updated = 0
    for arguments in outputs:
        if arguments & parameters:
            updated |= arguments
    roles: list[Role] = []
    for i in range(input_count):
        bit = 1 << i
        if parameters & bit:
            roles.append("parameter")
        elif reached[_CONSTANT] & bit:
            roles.append("batch")
        elif updated & bit:
            roles.append("optimizer state")
        else:
            roles.append("other")
    return Roles(
        roles=tuple(roles),
        differentiated=differentiated,
        updates=_pair(jaxpr, roles, outputs),
    )


def _pair(jaxpr: Any, roles: Sequence[Role], reached: Sequence[int]) -> dict[int, int]:
    """State → the first output of its type that is made of it and not yet taken.

    So a training loop's own order decides between arrays of one type: state goes in and
    comes out as a tree of one structure.
    """
    opened = _jax.open_jaxpr(jaxpr)
    free = list(range(len(opened.outvars)))
    pairs: dict[int, int] = {}
    for i, (role, variable) in enumerate(zip(roles, opened.invars, strict=True)):
        if role not in ("parameter", "optimizer state"):
            continue
        kind = (variable.aval.shape, variable.aval.dtype)
        for k in free:
            aval = opened.outvars[k].aval
            if (aval.shape, aval.dtype) == kind and reached[k] & 1 << i:
                pairs[i] = k
                free.remove(k)
                break
    return pairs


OnEquation = Callable[[Any, int], None]
"""What is told of every equation on the way: itself, and which arguments reach it."""


def flow_of(jaxpr: Any, inputs: Sequence[int], on_equation: OnEquation) -> list[int]:
    """Which arguments (as bits) reach each output, given what reaches the inputs."""
    opened = _jax.open_jaxpr(jaxpr)
    env: dict[Any, int] = dict.fromkeys(opened.constvars, 0)
    env.update(zip(opened.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, _jax.Literal) else env[atom]

    for equation in opened.eqns:
        values = [read(v) for v in equation.invars]
        on_equation(equation, _union(values))
        out = _flow_equation(equation, values, on_equation)
        env.update(zip(equation.outvars, out, strict=True))
    return [read(v) for v in opened.outvars]


def _flow_equation(
    equation: Any, values: list[int], on_equation: OnEquation
) -> list[int]:
    params, name = equation.params, equation.primitive.name
    if name == "name":
        return values
    if name == "scan":
        a, carried = _jax.scan_counts(equation)
        return _flow_loop(params["jaxpr"], values, a, a + carried, on_equation)
    if name == "while":
        a, b = params["cond_nconsts"], params["body_nconsts"]
        body = [*values[a : a + b], *values[a + b :]]
        condition = 0
        for v in values[:a]:
            condition |= v
        out = _flow_loop(params["body_jaxpr"], body, b, len(body), on_equation)
        return [v | condition for v in out]
    if name == "cond":
        branches = [flow_of(b, values[1:], on_equation) for b in params["branches"]]
        return [values[0] | _union(column) for column in zip(*branches, strict=True)]
    for inner in (params.get("jaxpr"), params.get("call_jaxpr")):
        if inner is not None and len(_jax.open_jaxpr(inner).invars) == len(values):
            return flow_of(inner, values, on_equation)
    return [_union(values)] * len(equation.outvars)


def _union(sets: Sequence[int]) -> int:
    total = 0
    for one in sets:
        total |= one
    return total


def _flow_loop(
    body: Any,
    values: list[int],
    start: int,
    stop: int,
    on_equation: OnEquation,
) -> list[int]:
    """A loop whose carry is `values[start:stop]`, until nothing more flows."""
    while True:
        out = flow_of(body, values, on_equation)
        carried = [
            v | o for v, o in zip(values[start:stop], out[: stop - start], strict=True)
        ]
        if carried == values[start:stop]:
            return out
        values = [*values[:start], *carried, *values[stop:]]
