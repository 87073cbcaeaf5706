"""The step as it is traced: once, with each marked call as one opaque equation.

`record_step` runs the user's code a single time, under the circumstances in which the
step will run (shardings, mesh, context). A marked function leaves up to three kinds of
equations in the jaxpr: "plain" where nothing differentiates it, else "forward" and
"backward". None of them has a meaning to JAX. `Recording.replay` gives them one: it
evaluates the jaxpr again, and at a "forward" equation runs `jax.vjp` of the call with
its layers as a `Rewriter` decides. So every program of a plan is a replay of one and
the same recording, and the user's code cannot trace to something else on the way.

A forward equation's last result is a *ticket*, and the backward equation takes it. In a
replay the ticket is the pull-back itself (`_PullBack`), which JAX cannot carry through
a loop. So both have to stand in one scope. Where they do not (a mark in a scan that is
differentiated as a whole, the gradient under `jax.vmap`), the call is `Unplannable`,
and the step is recorded again with its marked functions called as they are written.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax
from .._jax_primitives import (
    Unplannable,
    effects_of,
    in_manual_mesh,
    is_ordered,
    opaque_primitive,
    tangent_type,
    type_of,
)
from .._jaxprs._control_flow import Run, is_control_flow, rebuild
from .._jaxprs._jaxpr import bind, evaluate, is_checkpoint, is_float, spec_of
from .._layers._calls import Call, name_of, trace_call
from .._layers._objects import without_objects
from .._layers._rewrite import Rewriter
from .._mark import handling
from ._roles import observe

_UNDER_VMAP = "its gradient is taken under jax.vmap (example by example, say)"
_AGAIN = "it is differentiated in another way than once, in reverse"
_APART = (
    "its forward and its backward pass stand in different loops: the mark is inside of "
    "a loop that is differentiated as a whole. Mark the function around that loop"
)
_MANUAL = "it is called inside of jax.shard_map, where every device has a program"
_ORDERED = "it has effects in a fixed order, which nothing may be moved across"

_PLAIN, _FORWARD, _BACKWARD = "stowax_plain", "stowax_forward", "stowax_backward"
_OWN = frozenset({_PLAIN, _FORWARD, _BACKWARD})
_bind_plain = opaque_primitive(_PLAIN, _UNDER_VMAP, _AGAIN)
_bind_forward = opaque_primitive(_FORWARD, _UNDER_VMAP, _AGAIN)
_bind_backward = opaque_primitive(_BACKWARD, _UNDER_VMAP, _AGAIN)

_TICKET = type_of((), np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A step's one trace; `calls` are its marked calls in the order of the trace.

    `inputs` and `outputs` are the trees of the step's arguments and results. `left`
    says why marked functions run as they are written, if they do; then `calls` is
    empty. Of a `bare` recording nothing is planned at all. `names` are those of all
    marked functions that were called.
    """

    name: str
    jaxpr: Any
    calls: tuple[Call, ...]
    inputs: Any
    outputs: Any
    names: tuple[str, ...]
    left: tuple[str, ...] = ()
    bare: bool = False

    def replay(self, rewriter: Rewriter, values: Sequence[Any]) -> list[Any]:
        """The step's flat results, each marked call run as `rewriter` decides.

        **Raises:** `Unplannable` where a call's backward pass is out of reach of its
        forward pass.
        """
        if not self.calls:
            return evaluate(self.jaxpr, values, keep_checkpoint=_always, visit=_as_is)
        return _Replay(self.calls, rewriter).run(self.jaxpr, values)


def record_step(
    step: Callable[..., Any],
    leaves: Sequence[Any],
    structure: Any,
    *,
    read: bool = True,
) -> Recording:
    """Traces `step` on arguments of these types.

    **Arguments:** `leaves` are `ShapeDtypeStruct`s or values, flat, `structure` is
    their tree. Without `read`, marked functions are called as they are written; the
    trace still says what they are given (`observe`).

    **Raises:** what the step raises; `Unplannable`.
    """
    recorder = _Recorder() if read else _Observer()
    seen: dict[str, Any] = {}

    def flat(*values: Any) -> list[Any]:
        with handling(recorder):
            out = step(*jax.tree.unflatten(structure, values))
        results, seen["outputs"] = jax.tree.flatten(out)
        return results

    specs = [_spec(leaf) for leaf in leaves]
    jaxpr = _jax.retype(lambda: jax.jit(flat).trace(*specs).jaxpr)()
    return Recording(
        name=_name(step),
        jaxpr=jaxpr,
        calls=tuple(recorder.calls),
        inputs=structure,
        outputs=seen["outputs"],
        names=tuple(dict.fromkeys(recorder.names)),
    )


def record(
    step: Callable[..., Any], leaves: Sequence[Any], structure: Any
) -> Recording:
    """`record_step`, with marked functions as they are written where that must be.

    **Raises:** what the step itself raises, with or without stowax.
    """
    try:
        return record_step(step, leaves, structure)
    except Unplannable as error:
        plain = as_written(step, leaves, structure)
        return dataclasses.replace(plain, left=(why_not(error),))
    except Exception as error:
        # Is it the step's own error? Then it comes again, as it would without stowax.
        plain = as_written(step, leaves, structure)
        return dataclasses.replace(plain, left=(why_not(error),))


def as_written(
    step: Callable[..., Any], leaves: Sequence[Any], structure: Any
) -> Recording:
    """The recording of a step whose marked functions run as they are written."""
    return record_step(step, leaves, structure, read=False)


def why_not(error: Exception) -> str:
    """Why marked functions are left as they are written, after an error."""
    if isinstance(error, Unplannable):
        return str(error)
    line = (str(error).strip().splitlines() or ["no message"])[0][:200]
    return f"stowax cannot read it ({type(error).__name__}: {line})"


def _name(step: Any) -> str:
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__qualname__", None) or type(step).__qualname__


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return spec_of(_jax.aval_of(leaf))


class _Observer:
    """The handler that leaves marked functions as they are, and sees their inputs."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.names: list[str] = []

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.names.append(name_of(function))
        args, kwargs = jax.tree.map(_observed, (args, kwargs))
        return function(*args, **kwargs)


def _observed(leaf: Any) -> Any:
    return observe(leaf) if _jax.is_tracer(leaf) else leaf


class _Recorder:
    """The handler that turns marked calls into equations."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.names: list[str] = []
        # Inside of a marked function a mark adds nothing: its layers are found already.
        self.tracing = False

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.tracing:
            return function(*args, **kwargs)
        self.names.append(name_of(function))
        if in_manual_mesh():
            raise Unplannable(_MANUAL)
        with without_objects(function, args, kwargs) as pure:
            self.tracing = True
            try:
                call = trace_call(pure.function, pure.given, name_of(function))
            finally:
                self.tracing = False
            out = call.map_batch(self.bind) if _jax.under_vmap() else self.bind(call)
            return pure.finish(call.assemble(out))

    def bind(self, call: Call) -> list[Any]:
        """The outputs of a call, which is equations of ours in the jaxpr."""
        number, effects = len(self.calls), effects_of(call.jaxpr)
        if any(is_ordered(effect) for effect in effects):
            raise Unplannable(_ORDERED)
        self.calls.append(dataclasses.replace(call, inputs=()))
        results = [v.aval for v in _jax.open_jaxpr(call.jaxpr).outvars]

        @jax.custom_vjp
        def called(*inputs: Any) -> list[Any]:
            return _bind_plain(inputs, results, effects, number=number)

        def forward(*primals: Any) -> Any:
            active = tuple(i for i, p in enumerate(primals) if p.perturbed)
            values = [p.value for p in primals]
            *out, mine = _bind_forward(
                values, [*results, _TICKET], effects, number=number, active=active
            )
            return out, (
                mine,
                [values[i] for i in active],
                _Active(active, len(values)),
            )

        def backward(left: Any, cotangents: Any) -> Any:
            mine, values, active = left
            given = [None if _is_zero(ct) else ct for ct in cotangents]
            there = tuple(k for k, ct in enumerate(given) if ct is not None)
            types = [tangent_type(v) for v in values]
            found = _bind_backward(
                [mine, *(given[k] for k in there)],
                types,
                (),
                number=number,
                given=there,
            )
            grads: list[Any] = [None] * active.count
            for i, grad in zip(active.numbers, found, strict=True):
                grads[i] = grad
            return tuple(grads)

        called.defvjp(forward, backward, symbolic_zeros=True)
        return called(*call.inputs)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Active:
    """Which of a call's inputs are differentiated, and how many there are in all."""

    numbers: tuple[int, ...]
    count: int


def _is_zero(cotangent: Any) -> bool:
    """Whether nothing comes back to an output, or nothing could: it is no float."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return True
    return _jax.aval_of(cotangent).dtype == jax.dtypes.float0


class _PullBack:
    """What stands for a ticket in a replay: the pull-back of a call."""

    def __init__(self, outputs: Sequence[Any], floats: Sequence[int], pull: Any):
        self._types = {k: _jax.aval_of(outputs[k]) for k in floats}
        self._pull = pull

    def __call__(self, given: Mapping[int, Any]) -> list[Any]:
        """Cotangents of the active inputs, from those of some of the outputs."""
        cotangents = [
            given[k] if k in given else _zeros(aval) for k, aval in self._types.items()
        ]
        return list(self._pull(cotangents))


def _zeros(aval: Any) -> Any:
    sharding = _jax.explicit_sharding(aval)
    return jax.numpy.zeros(aval.shape, aval.dtype, device=sharding)


class _Replay:
    """The evaluation of a recording, with its marked calls as `rewriter` decides."""

    def __init__(self, calls: Sequence[Call], rewriter: Rewriter):
        self.calls, self.rewriter = calls, rewriter

    def run(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """The results of `jaxpr`, which may have marked calls anywhere inside."""
        out = evaluate(jaxpr, values, keep_checkpoint=_always, visit=self._visit)
        # A ticket that nobody in here takes: whoever does is in another scope.
        return [np.int32(0) if isinstance(v, _PullBack) else v for v in out]

    def _visit(self, equation: Any, values: list[Any]) -> list[Any] | None:
        name, params = equation.primitive.name, equation.params
        if name in _OWN:
            # The names of the derivative come from `jax.vjp` below, not twice.
            where = _jax.source_of if name == _PLAIN else _jax.context_of
            with where(equation):
                return self._marked(name, params, values)
        if not _holds_marks(equation):
            if any(isinstance(v, _PullBack) for v in values):
                raise Unplannable(_APART)
            return bind(equation, values)
        if name in _CALLS:
            return None  # opened by `evaluate`: tickets pass
        with _jax.source_of(equation):
            if name in _DERIVATIVE_RULES:  # nothing differentiates it any more
                inner = params.get("call_jaxpr", params.get("jaxpr"))
                return evaluate(
                    inner, values, keep_checkpoint=_always, visit=self._visit
                )
            values = [np.int32(0) if isinstance(v, _PullBack) else v for v in values]
            if is_checkpoint(equation):
                return _checkpoint(equation, values, self.run)
            if is_control_flow(equation):
                return rebuild(equation, values, self.run)
        raise Unplannable(f"it is called inside of an operation of JAX's, {name}")

    def _marked(
        self, name: str, params: Mapping[str, Any], values: list[Any]
    ) -> list[Any]:
        if name == _BACKWARD:
            ticket, *given = values
            if not isinstance(ticket, _PullBack):
                raise Unplannable(_APART)
            return ticket(dict(zip(params["given"], given, strict=True)))
        if any(isinstance(v, _PullBack) for v in values):
            raise Unplannable(_APART)
        call = self.calls[params["number"]]
        if name == _PLAIN:
            return self.rewriter.run(dataclasses.replace(call, inputs=tuple(values)))
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
        for k, value in zip(floats, made, strict=True):
            out[k] = value
        return [*out, _PullBack(out, floats, pull)]


def _always(_: Any) -> bool:
    return True


def _as_is(equation: Any, values: list[Any]) -> list[Any]:
    return bind(equation, values)


_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_DERIVATIVE_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def _holds_marks(equation: Any) -> bool:
    """Whether a marked call is in one of the jaxprs of an equation."""
    for parameter in equation.params.values():
        parts = parameter if isinstance(parameter, tuple | list) else (parameter,)
        for part in parts:
            opened = _jax.open_jaxpr(part)
            for inner in getattr(opened, "eqns", ()):
                if inner.primitive.name in _OWN or _holds_marks(inner):
                    return True
    return False


def _checkpoint(equation: Any, values: Sequence[Any], run: Run) -> list[Any]:
    params = equation.params
    inner = jax.checkpoint(
        lambda *inputs: run(params["jaxpr"], inputs),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return inner(*values)
