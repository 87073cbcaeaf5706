"""Loops and branches made anew, their bodies evaluated by somebody else.

A jaxpr is run equation by equation (`_jaxpr.evaluate`). What stands inside of a loop is
reached by writing the loop again with JAX's own functions: `rebuild` does it for those
that a training step has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax

Run = Callable[[Any, Sequence[Any]], list[Any]]
"""Evaluates a jaxpr on values."""


def is_control_flow(equation: Any) -> bool:
    """Whether `rebuild` knows the equation as a loop or a branch."""
    return equation.primitive.name in _CONTROL_FLOW


def rebuild(equation: Any, values: Sequence[Any], run: Run) -> list[Any]:
    """The results of a loop or branch whose bodies are run by `run`."""
    return list(_CONTROL_FLOW[equation.primitive.name](equation, values, run))


def _scan(equation: Any, values: Sequence[Any], run: Run) -> Sequence[Any]:
    params = equation.params
    consts, carried = _jax.scan_counts(equation)
    first = consts + carried

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        out = run(params["jaxpr"], [*values[:consts], *carry, *xs])
        return out[:carried], out[carried:]

    carry, ys = jax.lax.scan(
        body,
        list(values[consts:first]),
        list(values[first:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(equation: Any, values: Sequence[Any], run: Run) -> Sequence[Any]:
    params = equation.params
    a = params["cond_nconsts"]
    b = a + params["body_nconsts"]

    def more(carry: Sequence[Any]) -> Any:
        return run(params["cond_jaxpr"], [*values[:a], *carry])[0]

    def body(carry: Sequence[Any]) -> list[Any]:
        return run(params["body_jaxpr"], [*values[a:b], *carry])

    def body_of_some(carry: Sequence[Any]) -> list[Any]:
        going = more(carry)
        return [
            jnp.where(
                jnp.expand_dims(going, tuple(range(going.ndim, old.ndim))), new, old
            )
            for new, old in zip(body(carry), carry, strict=True)
        ]

    # Under `jax.vmap` each example says whether it goes on, and otherwise it waits.
    if _jax.open_jaxpr(params["cond_jaxpr"]).outvars[0].aval.ndim:
        some = lambda carry: jnp.any(more(carry))
        return jax.lax.while_loop(some, body_of_some, list(values[b:]))
    return jax.lax.while_loop(more, body, list(values[b:]))


def _cond(equation: Any, values: Sequence[Any], run: Run) -> Sequence[Any]:
    branches = [
        lambda *operands, branch=branch: run(branch, operands)
        for branch in equation.params["branches"]
    ]
    return jax.lax.switch(values[0], branches, *values[1:])


def _shard_map(equation: Any, values: Sequence[Any], run: Run) -> Sequence[Any]:
    params = equation.params
    mapped = jax.shard_map(
        lambda *inputs: tuple(run(params["jaxpr"], inputs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*values)


_CONTROL_FLOW = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}
