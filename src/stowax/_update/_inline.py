"""A step as one flat list of equations, branches around optimizer state included.

`_find` looks for what is done element by element, and a `jit` or a branch hides
that. Calls are opened, `jax.checkpoint` stays (opened, it would no longer be one). A
`lax.cond` that touches host leaves is turned into both branches and a choice between
their results: optimizers that skip a step (`optax.apply_if_finite`) are written so. The
numbers are the same, and the leaf streams through either way; a step that is skipped
copies its state for nothing, which happens rarely. Branches with loops or effects stay.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax

from .. import _jax
from .._jaxprs._jaxpr import Program, bind, evaluate, spec_of, trace

_DERIVATIVE_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
_LOOPS = frozenset({"scan", "while", "pallas_call", "shard_map"})


def inline_update(
    jaxpr: Any, host_inputs: Iterable[int], closed: Collection[str] = ()
) -> Program:
    """The program of a step with its calls opened, and branches on host leaves.

    Calls whose names are in `closed` stay: the loops of stacks.
    """
    flat = _flatten(jaxpr, frozenset(), closed)
    while True:
        program = Program(flat)
        chosen = frozenset(_branches_on(program, host_inputs))
        if not chosen:
            return program
        flat = _flatten(flat, chosen, closed)


def _flatten(jaxpr: Any, chosen: frozenset[int], closed: Collection[str]) -> Any:
    """`jaxpr` with calls opened; `chosen` are the ids of equations to be selections."""

    def visit(equation: Any, values: list[Any]) -> list[Any] | None:
        name, params = equation.primitive.name, equation.params
        if params.get("name") in closed and "jaxpr" in params:
            return bind(equation, values)
        if name in _DERIVATIVE_RULES:
            inner = params.get("call_jaxpr", params.get("jaxpr"))
            if inner is None:
                return None
            with _jax.source_of(equation):
                return run(inner, values)
        if name != "cond":
            return None
        index = equation.invars[0]
        if isinstance(index, _jax.Literal):
            with _jax.source_of(equation):
                return run(params["branches"][int(index.val)], values[1:])
        if id(equation) in chosen:
            with _jax.source_of(equation):
                return _select(
                    values[0], [run(b, values[1:]) for b in params["branches"]]
                )
        return None

    def run(inner: Any, values: Sequence[Any]) -> list[Any]:
        return evaluate(inner, values, keep_checkpoint=lambda _: True, visit=visit)

    opened = _jax.open_jaxpr(jaxpr)
    specs = [spec_of(v.aval) for v in opened.invars]
    return trace(lambda *inputs: run(jaxpr, inputs), *specs)


def _select(index: Any, results: Sequence[Sequence[Any]]) -> list[Any]:
    """Of each result the one of the branch that `index` chooses, as `cond` would."""
    if len(results) == 2:
        which = index != 0
    else:
        which = jax.lax.clamp(
            jax.numpy.int32(0), index, jax.numpy.int32(len(results) - 1)
        )
    return [
        same[0] if all(v is same[0] for v in same) else jax.lax.select_n(which, *same)
        for same in zip(*results, strict=True)
    ]


def _branches_on(program: Program, host_inputs: Iterable[int]) -> Iterable[int]:
    """Ids of the `cond` equations that host leaves reach and that may be choices."""
    reached = set(host_inputs)
    for node in program.nodes:
        if reached.isdisjoint(node.inputs):
            continue
        reached.update(node.outputs)
        equation = node.equation
        if equation.primitive.name != "cond" or _jax.has_effects(equation):
            continue
        if not any(_loops(branch) for branch in equation.params["branches"]):
            yield id(equation)


def _loops(jaxpr: Any) -> bool:
    """Whether anything in here is too dear, or not safe, to run without being asked."""
    for equation in _jax.open_jaxpr(jaxpr).eqns:
        if equation.primitive.name in _LOOPS:
            return True
        if any(map(_loops, _jax.jaxprs_in(equation.params))):
            return True
    return False
