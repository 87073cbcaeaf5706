"""Which values reach which, through a jaxpr with all its calls, loops and branches.

Values are bits of an integer: what stands in one for a result is what it is made of.
`_roles`, `_argument_roles` and `_lineage` ask, each with its own rule for what one
operation hands on. What goes silently wrong with a walk of one's own: a loop's carry
that is looked at once, so that what arrives in the second trip is not seen.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .. import _jax

Rule = Callable[[Any, list[int]], list[int]]
"""An operation without insides and what reaches its operands → its results."""


def union(sets: Sequence[int]) -> int:
    """All that is in any of `sets`."""
    total = 0
    for one in sets:
        total |= one
    return total


def everything(equation: Any, values: list[int]) -> list[int]:
    """The plainest rule: every result is made of every operand."""
    return [union(values)] * len(equation.outvars)


def reach(
    jaxpr: Any,
    inputs: Sequence[int],
    rule: Rule = everything,
    *,
    choices: bool = False,
    first: bool = False,
    tell: Callable[[Any, int], None] | None = None,
) -> list[int]:
    """For each output, as bits, what among `inputs` it is made of under a rule.

    **Arguments:** with `choices`, what a branch is chosen by and what ends a loop is
    part of the results, too; with `first`, loops are looked at as if their first trip
    were the only one; `tell` hears of every operation, those with insides
    before what is in them, and of all that reaches it.
    """
    return _Walk(rule, choices, first, tell).run(jaxpr, inputs)


class _Walk:
    """See `reach`."""

    def __init__(
        self,
        rule: Rule,
        choices: bool,
        first: bool,
        tell: Callable[[Any, int], None] | None,
    ):
        self.rule, self.choices, self.first, self.tell = rule, choices, first, tell

    def run(self, jaxpr: Any, inputs: Sequence[int]) -> list[int]:
        opened = _jax.open_jaxpr(jaxpr)
        env: dict[Any, int] = dict.fromkeys(opened.constvars, 0)
        env.update(zip(opened.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            return 0 if isinstance(atom, _jax.Literal) else env[atom]

        for equation in opened.eqns:
            values = [read(v) for v in equation.invars]
            if self.tell is not None:
                self.tell(equation, union(values))
            out = self._equation(equation, values)
            env.update(zip(equation.outvars, out, strict=True))
        return [read(v) for v in opened.outvars]

    def _equation(self, equation: Any, values: list[int]) -> list[int]:
        params, name = equation.params, equation.primitive.name
        if name == "scan":  # `xs` reach what is stacked as whole arrays
            consts, carried = _jax.scan_counts(equation)
            return self._loop(params["jaxpr"], values, consts, consts + carried)
        if name == "while":
            a, b = params["cond_nconsts"], params["body_nconsts"]
            body = [*values[a : a + b], *values[a + b :]]
            out = self._loop(params["body_jaxpr"], body, b, len(body))
            return self._chosen(values[:a], out)
        if name == "cond":
            branches = [self.run(b, values[1:]) for b in params["branches"]]
            out = [union(column) for column in zip(*branches, strict=True)]
            return self._chosen(values[:1], out)
        for inner in (params.get("jaxpr"), params.get("call_jaxpr")):
            if inner is not None and len(_jax.open_jaxpr(inner).invars) == len(values):
                return self.run(inner, values)
        return self.rule(equation, values)

    def _chosen(self, by: Sequence[int], out: list[int]) -> list[int]:
        return [v | union(by) for v in out] if self.choices else out

    def _loop(self, body: Any, values: list[int], start: int, stop: int) -> list[int]:
        """A loop whose carry is `values[start:stop]`, until nothing more is added."""
        while True:
            out = self.run(body, values)
            carry = [
                v | o
                for v, o in zip(values[start:stop], out[: stop - start], strict=True)
            ]
            if self.first or carry == values[start:stop]:
                return out
            values = [*values[:start], *carry, *values[stop:]]
