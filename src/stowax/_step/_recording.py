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
differentiated as a whole), the call is `Unplannable`,
and the step is recorded again with its marked functions called as they are written.
"""

import dataclasses
import functools
import pathlib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._jax_primitives import (
    Unplannable,
    effects_of,
    is_ordered,
    tangent_type,
)
from .._jaxprs._jaxpr import evaluate, is_checkpoint, is_loop, spec_of, typed_as
from .._layers._calls import Call, name_of, trace_call
from .._layers._objects import without_objects
from .._layers._rewrite import Rewriter
from .._mark import handling
from .._target._specs import ONE_DEVICE
from ._drawn_in import draw_in
from ._lineage import is_backward
from ._marked import (
    ORDERED,
    TICKET,
    Over,
    Pushed,
    bind_backward,
    bind_forward,
    bind_plain,
    recorded_by,
)
from ._replay import Replay, always, as_is
from ._roles import observe
from ._unread import without_unread


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A step's one trace; `calls` are its marked calls in the order of the trace.

    `inputs` is the tree of its arguments, `outputs` that of its results, and `paths`
    are those of the results' leaves. `left`
    says why marked functions run as they are written, if they do; then `calls` is
    empty. Of a `bare` recording nothing is planned at all. `names` are those of all
    marked functions that were called. `changed` are the arguments, by flat position,
    that the step replaces in place by something that it does not return. `donated` are
    the positions of all arguments that may be given away, if the user says so.
    """

    name: str
    jaxpr: Any
    calls: tuple[Call, ...]
    inputs: Any
    outputs: Any
    paths: tuple[tuple[Any, ...], ...]
    names: tuple[str, ...]
    changed: Sequence[int]
    left: tuple[str, ...] = ()
    bare: bool = False
    donated: Collection[int] | None = None

    @property
    def nested(self) -> bool:
        """Whether a gradient is taken in what is differentiated, without checkpoints.

        A loss with a penalty on a gradient, say.
        """
        inside = self._differentiated
        checkpoints = any(_has(equation, is_checkpoint) for equation in inside)
        return any(map(is_backward, inside)) and not checkpoints

    @property
    def manual(self) -> bool:
        """Whether a loop of what is differentiated is inside of `jax.shard_map`."""
        return any(_has(equation, _is_manual) for equation in self._differentiated)

    @property
    def _differentiated(self) -> list[Any]:
        return [e for call in self.calls for e in _jax.open_jaxpr(call.jaxpr).eqns]

    def replay(self, rewriter: Rewriter, values: Sequence[Any]) -> list[Any]:
        """The step's flat results, each marked call run as `rewriter` decides.

        **Raises:** `Unplannable` where a call's backward pass is out of reach of its
        forward pass.
        """
        if self.calls:
            out = Replay(self.calls, rewriter).run(self.jaxpr, values)
        else:
            out = evaluate(self.jaxpr, values, keep_checkpoint=always, visit=as_is)
        variables = _jax.open_jaxpr(self.jaxpr).outvars
        return [
            typed_as(value, variable.aval)
            for value, variable in zip(out, variables, strict=True)
        ]


def _has(equation: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether an equation is a wanted one, or has one inside."""
    inner = _jax.jaxprs_in(equation.params)
    return wanted(equation) or any(_has(e, wanted) for j in inner for e in j.eqns)


def _is_manual(equation: Any) -> bool:
    return equation.primitive.name == "shard_map" and _has(equation, is_loop)


def record_step(
    step: Callable[..., Any],
    leaves: Sequence[Any],
    structure: Any,
    *,
    read: bool = True,
    unmarked: bool = True,
) -> Recording:
    """Traces `step` on arguments of these types.

    **Arguments:** `leaves` are `ShapeDtypeStruct`s or values, flat, `structure` is
    their tree. Without `read`, marked functions are called as they are written; the
    trace still says what they are given (`observe`). With `unmarked`, whatever is
    differentiated counts as marked, unless the step has marks of its own.

    **Raises:** what the step raises; `Unplannable`.
    """
    recorder = _Recorder() if read else _Observer()
    seen: dict[str, Any] = {}

    def flat(*values: Any) -> Any:
        recorder.calls.clear()  # JAX may trace it once more
        recorder.names.clear()
        args = jax.tree.unflatten(structure, values)
        before = dict(jax.tree.leaves_with_path(args))
        with (
            recorded_by(recorder),
            handling(recorder, unmarked=unmarked) as seen["marks"],
        ):
            out = step(*args)
        found, seen["outputs"] = jax.tree.flatten_with_path(out)
        seen["paths"], results = zip(*found, strict=True) if found else ((), ())
        seen["changed"] = _changed(args, before, results)
        return out

    # JAX's errors about results name what it traces, and where that is written.
    named: Any = flat
    named.__name__, named.__wrapped__ = _name(step), step
    specs = [_spec(leaf) for leaf in leaves]
    jaxpr = _jax.retype(lambda: jax.jit(flat).trace(*specs).jaxpr)()
    if seen["marks"].marked and seen["marks"].found:
        return record_step(step, leaves, structure, read=read, unmarked=False)
    jaxpr, calls = draw_in(jaxpr, recorder.calls)
    return Recording(
        name=_name(step),
        jaxpr=jaxpr,
        calls=without_unread(jaxpr, calls),
        inputs=structure,
        outputs=seen["outputs"],
        paths=seen["paths"],
        names=tuple(dict.fromkeys(recorder.names)),
        changed=seen["changed"],
    )


def _changed(
    args: Sequence[Any], before: Mapping[Any, Any], results: Sequence[Any]
) -> tuple[int, ...]:
    """Which arrays of `args` are others than `before` the step, and not returned."""
    after = dict(jax.tree.leaves_with_path(args))
    returned = {id(result) for result in results}
    return tuple(
        i
        for i, (path, value) in enumerate(before.items())
        if (now := after.get(path, value)) is not value and id(now) not in returned
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


_PACKAGE = pathlib.Path(__file__).parents[1]
_ISSUES = "https://github.com/stowax/stowax/issues"

# What JAX 0.10 to 0.12 say.
_UNCHECKED = "a checkify.check which was not functionalized"
_ALL_THE_SAME = "got axis spec None but output was batched"


def why_not(error: Exception) -> str:
    """Why marked functions are left as they are written, after an error."""
    if isinstance(error, Unplannable):
        return str(error)
    if _UNCHECKED in str(error):
        return "it calls checkify.check, which stowax cannot read"
    if _ALL_THE_SAME in str(error):
        return (
            "it is called under a jax.vmap with out_axes=None for a gradient (as by "
            "jax.jacfwd): under a plan every gradient has the axis"
        )
    line = (str(error).strip().splitlines() or ["no message"])[0][:200]
    return (
        f"stowax cannot read it ({type(error).__name__}: {line}{_where(error)}). "
        f"Please report that: {_ISSUES}"
    )


def _where(error: Exception) -> str:
    """The innermost line of stowax that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if pathlib.Path(f.filename).is_relative_to(_PACKAGE)]
    if not own:
        return ""
    name = pathlib.Path(own[-1].filename).relative_to(_PACKAGE.parent)
    return f", at {name.as_posix()}:{own[-1].lineno}"


def _name(step: Any) -> str:
    inner = step
    while inner is not None and not hasattr(inner, "__qualname__"):
        partial = isinstance(inner, functools.partial)
        inner = inner.func if partial else getattr(inner, "__wrapped__", None)
    return (inner or type(step)).__qualname__


def _spec(leaf: Any) -> Any:
    """What to trace with in place of an argument, without a mesh that is only ours.

    With one JAX traces some derivatives otherwise than without: constants instead of
    literals. The user's meshes stay: the step may ask for them.
    """
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = spec_of(_jax.aval_of(leaf))
    mesh = getattr(leaf.sharding, "mesh", None)
    if mesh is not None and mesh.axis_names == (ONE_DEVICE,):
        return leaf.update(sharding=None)
    return leaf


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
        # What became of calls whose gradient is taken under `jax.vmap`, by number.
        self.over: dict[int, Over] = {}
        # The same for `jax.jvp`.
        self.pushed: dict[int, Pushed] = {}
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
            raise Unplannable(ORDERED)
        self.calls.append(dataclasses.replace(call, inputs=()))
        results = [v.aval for v in _jax.open_jaxpr(call.jaxpr).outvars]

        @jax.custom_vjp
        def called(*inputs: Any) -> list[Any]:
            return bind_plain(inputs, results, effects, number=number)

        def forward(*primals: Any) -> Any:
            active = tuple(i for i, p in enumerate(primals) if p.perturbed)
            values = [p.value for p in primals]
            *out, mine = bind_forward(
                values, [*results, TICKET], effects, number=number, active=active
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
            found = bind_backward(
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
