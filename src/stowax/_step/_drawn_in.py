"""What a step makes of the large results of what it differentiates, computed in there.

Steps measure what their loss hands out: logits come back beside the loss, and the step
takes an accuracy of them. So they are a result, and whole. Computed within the
differentiated function that accuracy is one more of its scalars, and the logits, which
nobody reads any more, may be there in blocks (`_unread`, `_jaxprs._tiles`). The step
computes what it did, from the same values; nothing is differentiated that was not.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from .. import _jax
from .._cost._record import bytes_of
from .._jaxprs._elementwise import ELEMENTWISE
from .._jaxprs._jaxpr import bind, evaluate, spec_of, trace
from .._layers._calls import Call
from ._marked import FORWARD, OWN, PLAIN, holds_marks
from ._replay import always

_PART = 1 / 8
"""Part of a result's bytes that what is made of it may have."""

_CALLS = frozenset({"jit", "scan"})
"""What is looked into: its equations are those of its parameter `jaxpr`."""

_SIMPLE = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "squeeze"}
"""What makes large arrays of little, and goes along with what reads these."""


def draw_in(jaxpr: Any, calls: Sequence[Call]) -> tuple[Any, list[Call]]:
    """A recorded step and its calls, what can be drawn into these in there.

    Calls that stand in several places stay as they are.
    """
    calls = list(calls)
    standing = collections.Counter(_numbers(jaxpr))
    once = {number for number, places in standing.items() if places == 1}
    return _drawn_in(jaxpr, calls, once), calls


def _numbers(jaxpr: Any) -> Iterator[int]:
    """The calls that are made in a jaxpr and in those inside, by number."""
    for equation in _jax.open_jaxpr(jaxpr).eqns:
        if equation.primitive.name in (PLAIN, FORWARD):
            yield equation.params["number"]
        for inner in _jax.jaxprs_in(equation.params):
            yield from _numbers(inner)


def _drawn_in(jaxpr: Any, calls: list[Call], once: Collection[int]) -> Any:
    equations = list(_jax.open_jaxpr(jaxpr).eqns)
    own = [e for e in equations if e.primitive.name == FORWARD]
    for forward in own:
        if forward.params["number"] in once:
            outputs = _jax.open_jaxpr(jaxpr).outvars
            equations = _around(equations, outputs, forward, calls) or equations
    for k, equation in enumerate(equations):
        if equation.primitive.name in _CALLS and holds_marks(equation):
            inner = _drawn_in(equation.params["jaxpr"], calls, once)
            equations[k] = equation.replace(params={**equation.params, "jaxpr": inner})
    return _jax.with_equations(jaxpr, equations)


def _around(
    equations: Sequence[Any], outputs: Sequence[Any], forward: Any, calls: list[Call]
) -> list[Any] | None:
    """The equations of one scope with what `forward` can take in there."""
    scope = _Scope(equations, outputs, forward)
    drawn: set[int] = set()
    for result in forward.outvars[:-1]:
        drawn |= scope.made_of(result)
    before = scope.needed_before(drawn)
    if not drawn or before is None:
        return None
    place, inside = equations.index(forward), [equations[k] for k in sorted(drawn)]
    number = forward.params["number"]
    calls[number], new = _with(calls[number], forward, inside, scope.read(drawn))
    taken = drawn | {*before}
    return [
        *(e for k, e in enumerate(equations[:place]) if k not in drawn),
        *(equations[k] for k in before),
        new,
        *(e for k, e in enumerate(equations) if k > place and k not in taken),
    ]


class _Scope:
    """The equations around a forward equation, and what depends on what it makes."""

    def __init__(self, equations: Sequence[Any], outputs: Sequence[Any], forward: Any):
        self.equations, self.place = equations, equations.index(forward)
        self.outputs = {v for v in outputs if isinstance(v, _jax.Var)}
        self.maker = {v: k for k, e in enumerate(equations) for v in e.outvars}
        self.readers: dict[Any, list[int]] = {}
        for k, equation in enumerate(equations):
            for variable in _variables(equation):
                self.readers.setdefault(variable, []).append(k)
        made = {*forward.outvars}
        self.later: set[int] = set()  # equations that depend on the results
        for k in range(self.place + 1, len(equations)):
            if not made.isdisjoint(_variables(equations[k])):
                self.later.add(k)
                made.update(equations[k].outvars)

    def made_of(self, result: Any) -> set[int]:
        """The equations that make little of a large result; none if not all do."""
        large, drawn = bytes_of(result.aval), set[int]()
        if large * _PART < 1 or result not in self.readers:
            return set()
        waiting = list(self.readers[result])
        while waiting:
            k = waiting.pop()
            if k in drawn:
                continue
            equation = self.equations[k]
            if not self._may_be_inside(equation):
                return set()
            drawn.add(k)
            for variable in _variables(equation):
                maker = self.maker.get(variable)
                if maker in self.later:
                    waiting.append(maker)
            for made in equation.outvars:
                if bytes_of(made.aval) > large * _PART:
                    if made in self.outputs:
                        return set()
                    waiting.extend(self.readers.get(made, ()))
        little = sum(bytes_of(v.aval) for v in self.read(drawn))
        if result in self.outputs or little > large * _PART:
            return set()
        self._add_makers(drawn, int(large * _PART))
        return drawn

    def _add_makers(self, drawn: set[int], most: int) -> None:
        """Adds what makes large arrays of little for those that are drawn in alone."""
        waiting = list(drawn)
        while waiting:
            for variable in _variables(self.equations[waiting.pop()]):
                k = self.maker.get(variable, self.place)
                if k in (self.place, *drawn) or bytes_of(variable.aval) <= most:
                    continue
                maker = self.equations[k]
                if _is_simple(maker) and not self.read({k}, beside=drawn):
                    drawn.add(k)
                    waiting.append(k)

    def read(self, drawn: Collection[int], beside: Collection[int] = ()) -> list[Any]:
        """What others read of it, in order; what stands `beside` is none of them."""
        made = [v for k in sorted(drawn) for v in self.equations[k].outvars]
        own = {*drawn, *beside}
        return [
            v
            for v in made
            if v in self.outputs or not {*self.readers.get(v, ())} <= own
        ]

    def needed_before(self, drawn: Collection[int]) -> list[int] | None:
        """What has to be computed earlier, in order; none if that is not to be."""
        found: set[int] = set()
        waiting = [v for k in drawn for v in _variables(self.equations[k])]
        while waiting:
            k = self.maker.get(waiting.pop(), -1)
            if k <= self.place or k in found or k in drawn:
                continue
            if not self._may_be_inside(self.equations[k]):
                return None
            found.add(k)
            waiting.extend(_variables(self.equations[k]))
        return sorted(found)

    def _may_be_inside(self, equation: Any) -> bool:
        """Whether an equation may stand elsewhere: neither an effect nor a call."""
        return not (
            _jax.has_effects(equation)
            or equation.primitive.name in OWN
            or holds_marks(equation)
        )


def _is_simple(equation: Any) -> bool:
    """Whether an equation, or what it calls, works element by element."""
    inner = [e for jaxpr in _jax.jaxprs_in(equation.params) for e in jaxpr.eqns]
    simple = equation.primitive.name in _SIMPLE or bool(inner)
    return simple and all(map(_is_simple, inner))


def _variables(equation: Any) -> list[Any]:
    return [v for v in equation.invars if isinstance(v, _jax.Var)]


def _with(
    call: Call, forward: Any, inside: Sequence[Any], read: Sequence[Any]
) -> tuple[Call, Any]:
    """The call with equations more, and its equation, which has their results."""
    made = {v for e in inside for v in e.outvars} | {*forward.outvars}
    known = [v for v in forward.invars if isinstance(v, _jax.Var)]
    wanted = dict.fromkeys(v for e in inside for v in _variables(e))
    more = [v for v in wanted if v not in made and v not in known]

    def run(*values: Any) -> list[Any]:
        own = values[: len(forward.invars)]
        out = evaluate(call.jaxpr, own, keep_checkpoint=always)
        # What they read is not differentiated, whatever the function's inputs are.
        variables = (*forward.invars, *more, *forward.outvars[:-1])
        env = {
            variable: jax.lax.stop_gradient(value)
            for variable, value in zip(variables, (*values, *out), strict=True)
            if isinstance(variable, _jax.Var) and variable in wanted
        }
        for equation in inside:
            given = [
                v.val if isinstance(v, _jax.Literal) else env[v]
                for v in equation.invars
            ]
            env.update(zip(equation.outvars, bind(equation, given), strict=True))
        return [*out, *(env[v] for v in read)]

    inputs = [v.aval for v in _jax.open_jaxpr(call.jaxpr).invars]
    jaxpr = trace(run, *map(spec_of, (*inputs, *(v.aval for v in more))))
    *results, ticket = forward.params["results"]
    results = [*results, *(v.aval for v in read), ticket]
    new = forward.replace(
        invars=[*forward.invars, *more],
        outvars=[*forward.outvars[:-1], *read, forward.outvars[-1]],
        params={**forward.params, "results": tuple(results)},
    )
    return dataclasses.replace(call, jaxpr=jaxpr, known={}), new
