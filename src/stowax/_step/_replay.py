"""A recording evaluated again, its marked calls given a meaning.

At a "forward" equation a replay runs `jax.vjp` of the call, with its layers as a
`Rewriter` decides. The pull-back goes on in the place of the equation's last result,
the ticket, and the "backward" equation that takes the ticket runs it. JAX cannot carry
it through a loop: where the two stand in different scopes, nothing is planned.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._jax_primitives import Unplannable
from .._jaxprs._control_flow import Run, is_control_flow, rebuild
from .._jaxprs._jaxpr import bind, evaluate, is_checkpoint, is_float
from .._layers._calls import Call
from .._layers._rewrite import Rewriter
from ._marked import (
    APART,
    BACKWARD,
    FORWARDS,
    NO_TICKET,
    OWN,
    PLAIN,
    TANGENTS,
    holds_marks,
)


class _PullBack:
    """What stands for a ticket in a replay: the pull-back of a call."""

    def __init__(self, outputs: Sequence[Any], floats: Sequence[int], pull: Any):
        self._types = {k: _jax.aval_of(outputs[k]) for k in floats}
        self._pull = pull

    def __call__(self, given: Mapping[int, Any]) -> list[Any]:
        """Cotangents of the active inputs, from those of some of the outputs."""
        cotangents = [
            given[k] if k in given else _jax.zeros(aval)
            for k, aval in self._types.items()
        ]
        return list(self._pull(cotangents))


class Replay:
    """The evaluation of a recording, with its marked calls as `rewriter` decides."""

    def __init__(self, calls: Sequence[Call], rewriter: Rewriter):
        self.calls, self.rewriter = calls, rewriter

    def run(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """The results of `jaxpr`, which may have marked calls anywhere inside."""
        out = evaluate(jaxpr, values, keep_checkpoint=always, visit=self._visit)
        # A ticket that nobody in here takes: whoever does is in another scope.
        return [NO_TICKET if isinstance(v, _PullBack) else v for v in out]

    def _visit(self, equation: Any, values: list[Any]) -> list[Any] | None:
        name, params = equation.primitive.name, equation.params
        if name in OWN:
            # The names of the derivative come from `jax.vjp` below, not twice.
            where = _jax.source_of if name == PLAIN else _jax.context_of
            with where(equation):
                return self._marked(name, params, values)
        if not holds_marks(equation):
            if any(isinstance(v, _PullBack) for v in values):
                raise Unplannable(FORWARDS if name == TANGENTS else APART)
            return bind(equation, values)
        if name in _CALLS:
            return None  # opened by `evaluate`: tickets pass
        with _jax.source_of(equation):
            if name in _DERIVATIVE_RULES:  # nothing differentiates it any more
                inner = params.get("call_jaxpr", params.get("jaxpr"))
                return evaluate(
                    inner, values, keep_checkpoint=always, visit=self._visit
                )
            values = [NO_TICKET if isinstance(v, _PullBack) else v for v in values]
            if name == _SOLVE:
                return self._solve(params, values)
            if is_checkpoint(equation):
                return _checkpoint(equation, values, self.run)
            if is_control_flow(equation):
                return rebuild(equation, values, self.run)
        raise Unplannable(f"it is called inside of an operation of JAX's, {name}")

    def _solve(self, params: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
        """What `lax.custom_linear_solve` computes (conjugate gradients, say).

        It is given what its four functions close over, then the right-hand side.
        """
        lengths = params["const_lengths"]
        before = lengths.matvec + lengths.vecmat
        behind = before + lengths.solve
        given = [*values[before:behind], *values[behind + lengths.transpose_solve :]]
        return self.run(params["jaxprs"].solve, given)

    def _marked(
        self, name: str, params: Mapping[str, Any], values: list[Any]
    ) -> list[Any]:
        if name == BACKWARD:
            ticket, *given = values
            if not isinstance(ticket, _PullBack):
                raise Unplannable(APART)
            return ticket(dict(zip(params["given"], given, strict=True)))
        if any(isinstance(v, _PullBack) for v in values):
            raise Unplannable(APART)
        call = self.calls[params["number"]]
        # The step's own arrays again: who updates them sees what becomes of which.
        same = {k: values[i] for k, i in call.handed_through().items()}
        if name == PLAIN:
            out = self.rewriter.run(dataclasses.replace(call, inputs=tuple(values)))
            return [same.get(k, value) for k, value in enumerate(out)]
        active, floats = (
            params["active"],
            [k for k, aval in enumerate(params["results"][:-1]) if is_float(aval)],
        )

        def differentiated(*chosen: Any) -> tuple[list[Any], list[Any]]:
            inputs = list(values)
            for i, value in zip(active, chosen, strict=True):
                inputs[i] = value
            out = self.rewriter.run(dataclasses.replace(call, inputs=tuple(inputs)))
            return [out[k] for k in floats], out

        chosen = [values[i] for i in active]
        made, pull, out = jax.vjp(differentiated, *chosen, has_aux=True)
        made = dict(zip(floats, made, strict=True))
        out = [*(dict(enumerate(out)) | made | same).values()]
        return [*out, _PullBack(out, floats, pull)]


def always(_: Any) -> bool:
    """Of every `jax.checkpoint`: it stays."""
    return True


def as_is(equation: Any, values: list[Any]) -> list[Any]:
    """The equation as it stands, calls not opened."""
    return bind(equation, values)


_SOLVE = "custom_linear_solve"
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_DERIVATIVE_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def _checkpoint(equation: Any, values: Sequence[Any], run: Run) -> list[Any]:
    params = equation.params
    inner = jax.checkpoint(
        lambda *inputs: run(params["jaxpr"], inputs),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return inner(*values)
