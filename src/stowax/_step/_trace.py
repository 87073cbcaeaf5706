"""The training step, traced once: its arguments with their roles, and its stacks.

`plan` calls `trace_step` with what the user gave it. The step runs under a `Rewriter`
that stores everything the backward passes read, and writes down every stack that it
meets with its linearized body. The roles come from the same trace (`_roles`).
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._errors import ArgumentError, StepError, StowaxError
from .._jaxprs._jaxpr import spec_of, trace
from .._layers._boundary import Emission
from .._layers._linearize import Linearized, LinearizedBody
from .._layers._pipeline import Stack
from .._layers._rewrite import Options, Rewriter
from .._records._stages import Role
from ._recording import Recording, as_written, record, why_not
from ._roles import find_roles, observe

_STATE: frozenset[Role] = frozenset({"parameter", "optimizer state"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One array among the step's arguments; `path` reads like the user's code.

    `position` is that of the argument it belongs to.
    """

    path: str
    position: int
    spec: jax.ShapeDtypeStruct
    role: Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedStack:
    """A stack as found in the step, with the two programs of its body."""

    stack: Stack
    body: LinearizedBody


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step as stowax sees it.

    `donate` are the positions of the arguments whose every array is state and comes
    back with the same type: what a training loop replaces by the step's own result.
    `updates` says of each array of the state which output takes its place (both flat
    positions); parameters without one are read only. `differentiated` are the
    parameters that have gradients.
    `jaxpr` is the step's, with everything that backward passes read stored; `boundary`
    has the loops of stacks in it. `recording` is what every program of a plan replays,
    and `linearized` are the bodies that it was read with.
    """

    name: str
    arguments: tuple[Argument, ...]
    stacks: Mapping[str, TracedStack]
    donate: tuple[int, ...]
    updates: Mapping[int, int]
    differentiated: frozenset[int]
    boundary: Mapping[str, Emission]
    jaxpr: Any
    recording: Recording
    linearized: Linearized


def available(stack: Stack, body: LinearizedBody) -> frozenset[int]:
    """Values that the backward pass has at hand anyway.

    Constants, weights, and what depends on constants alone (masks, tables of angles):
    that is the same in every layer, and XLA computes it once, outside of the loop.
    """
    program = body.forward
    first = program.input_count
    invariant = {
        *range(stack.const_count),
        *range(first, first + program.const_count),
    }
    for node in program.nodes:
        if all(i is None or i in invariant for i in node.inputs):
            invariant.update(node.outputs)
    weights = range(stack.carry_inputs.stop, first)
    return frozenset({*invariant, *weights})


def store_all(stack: Stack, body: LinearizedBody) -> dict[int, str]:
    """Every value that the backward pass reads, kept: what plain JAX does."""
    at_hand = available(stack, body)
    return {n: "keep" for n in body.residuals if n not in at_hand}


def record_for(step: Callable[..., Any], args: Sequence[Any]) -> Recording:
    """The recording of `step` on `args`, of which nothing is traced but their types.

    **Raises:** `ArgumentError` for a step that is already jitted or an argument that is
    no array; what the step itself raises.
    """
    check_step(step)
    leaves, structure = jax.tree.flatten_with_path(tuple(args))
    return record(
        step, [check_leaf(_path(path), leaf) for path, leaf in leaves], structure
    )


def reading_less(
    step: Callable[..., Any],
    args: Sequence[Any],
    recording: Recording,
    error: Exception,
) -> Recording | None:
    """The step to be planned after an `error` that is no fault of the user's.

    First without reading marked functions, then without reading anything; `None` where
    nothing was read.
    """
    if recording.bare:
        return None
    leaves, structure = jax.tree.flatten(tuple(args))
    left = (*recording.left, why_not(error))
    less = recording
    if recording.calls:
        less = as_written(
            step, [check_leaf("args", leaf) for leaf in leaves], structure
        )
    return dataclasses.replace(less, left=left, bare=not recording.calls)


def trace_step(
    step: Callable[..., Any] | Recording, args: Sequence[Any], options: Options
) -> Step:
    """Finds roles and stacks of `step` on `args`.

    A step that is recorded already is not run again; `args` are then those that it was
    recorded on. Where marked functions cannot be read, they are left as they are
    written, and `Recording.left` says why.

    **Raises:** `StepError` for a step without a marked function, or whose mark is on
    something that is never differentiated; what `record_for` does.
    """
    leaves, _ = jax.tree.flatten_with_path(tuple(args))
    specs = [check_leaf(_path(path), leaf) for path, leaf in leaves]
    if isinstance(step, Recording):
        return _read(step, leaves, specs, options)
    recording = record_for(step, args)
    while True:
        try:
            return _read(recording, leaves, specs, options)
        except StowaxError:
            raise
        except Exception as error:
            less = reading_less(step, args, recording, error)
            if less is None:
                raise
            recording = less


def _read(
    recording: Recording, leaves: Sequence[Any], specs: Sequence[Any], options: Options
) -> Step:
    """The step of a recording, every marked call replayed with everything stored."""
    if recording.bare:
        return _unread(recording, leaves, specs)
    found: dict[str, tuple[Stack, LinearizedBody]] = {}

    def choose(stack: Stack, body: LinearizedBody) -> dict[int, str]:
        found[stack.name] = (stack, body)
        return store_all(stack, body)

    boundary: dict[str, Emission] = {}
    linearized: Linearized = {}
    rewriter = Rewriter(
        choose,
        options,
        prepare=lambda call: [observe(v) for v in call.inputs],
        boundary=boundary,
        linearized=linearized,
    )
    jaxpr = trace(
        lambda *values: recording.replay(rewriter, values),
        *[spec_of(v.aval) for v in _jax.open_jaxpr(recording.jaxpr).invars],
    )
    positions = [path[0].idx for path, _ in leaves]
    found_roles = find_roles(jaxpr, positions, boundary)
    _check_traced(jaxpr, recording, found_roles.differentiated is not None)
    arguments = tuple(
        Argument(path=_path(path), position=path[0].idx, spec=spec, role=role)
        for (path, _), spec, role in zip(leaves, specs, found_roles.roles, strict=True)
    )
    return Step(
        name=recording.name,
        recording=recording,
        arguments=arguments,
        stacks={
            name: TracedStack(stack=stack, body=body)
            for name, (stack, body) in found.items()
        },
        donate=_donatable(arguments, jaxpr, found_roles.updates),
        updates=found_roles.updates,
        differentiated=found_roles.differentiated or frozenset(),
        boundary=boundary,
        jaxpr=jaxpr,
        linearized=linearized,
    )


def _unread(recording: Recording, leaves: Sequence[Any], specs: Sequence[Any]) -> Step:
    """The step of a recording of which nothing is known but what it is given."""
    return Step(
        name=recording.name,
        recording=recording,
        arguments=tuple(
            Argument(path=_path(path), position=path[0].idx, spec=spec, role="other")
            for (path, _), spec in zip(leaves, specs, strict=True)
        ),
        stacks={},
        donate=(),
        updates={},
        differentiated=frozenset(),
        boundary={},
        jaxpr=recording.jaxpr,
        linearized={},
    )


def _check_traced(jaxpr: Any, recording: Recording, differentiated: bool) -> None:
    """Refuses a step in which there is nothing to plan."""
    if not recording.names:
        raise StepError(
            "step: no function marked with @stowax.stow was called. Write @stowax.stow "
            "above the function that jax.value_and_grad or jax.grad is applied to."
        )
    if not _jax.open_jaxpr(jaxpr).outvars:
        raise StepError(
            "step: it returns no array, so nothing that it computes is used. Return "
            "the new state and the loss."
        )
    if _backward_is_dead(jaxpr):
        raise StepError(
            "step: its gradients reach none of its outputs, so the compiler would "
            "leave out the backward pass, and nothing would be learned. Return the new "
            "parameters and optimizer state. A model that is updated in place inside "
            "(an nnx.Module, say) is not returned: split it into arrays before the "
            "step (nnx.split), merge it inside, and return the new arrays."
        )
    if not differentiated:
        names = ", ".join(sorted(recording.names))
        raise StepError(
            f"step: {names} is marked with @stowax.stow, but nothing differentiates "
            "it. Move the mark to the function that jax.value_and_grad or jax.grad is "
            "applied to."
        )


def _backward_is_dead(jaxpr: Any) -> bool:
    """Whether there is a backward pass, and no output needs any of it.

    JAX writes `transpose(` into the name stack of what a backward pass does.
    """
    opened = _jax.open_jaxpr(jaxpr)
    needed = {v for v in opened.outvars if not isinstance(v, _jax.Literal)}
    found = False
    for equation in reversed(opened.eqns):
        backward = _is_backward(equation)
        if _jax.has_effects(equation) or not needed.isdisjoint(equation.outvars):
            if backward:
                return False
            inputs = (v for v in equation.invars if not isinstance(v, _jax.Literal))
            needed.update(inputs)
        found |= backward
    return found


def _is_backward(equation: Any) -> bool:
    """Whether an equation, or one inside of it (a loop over microbatches), is one."""
    if "transpose(" in _jax.name_stack(equation):
        return True
    inner = [x for p in equation.params.values() for x in (p if _many(p) else (p,))]
    jaxprs = [_jax.open_jaxpr(x) for x in inner if hasattr(x, "eqns")]
    return any(_is_backward(e) for jaxpr in jaxprs for e in jaxpr.eqns)


def _many(parameter: Any) -> bool:
    return isinstance(parameter, tuple | list)


def check_step(step: Any) -> None:
    """Refuses what cannot be planned: not a function, or one that is jitted already."""
    if not callable(step):
        raise ArgumentError(
            "step",
            f"{step!r}, which cannot be called",
            "Pass the training step itself.",
        )
    if hasattr(step, "lower") and hasattr(step, "trace"):
        name = getattr(step, "__name__", "train_step")
        raise ArgumentError(
            "step",
            f"{name}, which is already jitted",
            f"Pass the function without jax.jit (for example {name}.__wrapped__); "
            "Plan.apply returns it jitted.",
        )


def check_leaf(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """The spec of one argument, or an error that names it."""
    if isinstance(leaf, bool | int | float | complex):
        dtype = jax.dtypes.canonicalize_dtype(type(leaf))
        weak = not isinstance(leaf, bool)
        return jax.ShapeDtypeStruct((), dtype, weak_type=weak)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ArgumentError(
            path,
            f"{type(leaf).__name__} {leaf!r:.60}, which is no array",
            "Give arrays or jax.ShapeDtypeStruct; close over anything else, for "
            "example functools.partial(step, config).",
        )
    sharding = getattr(leaf, "sharding", None)
    committed = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(
        leaf, "committed", False
    )
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=sharding if committed else None,
        weak_type=getattr(leaf, "weak_type", False),
    )


def _path(path: Sequence[Any]) -> str:
    first, *rest = path
    return f"args[{first.idx}]{jax.tree_util.keystr(tuple(rest))}"


def _donatable(
    arguments: Sequence[Argument], jaxpr: Any, updates: Mapping[int, int]
) -> tuple[int, ...]:
    """Arguments made of state that all comes back, each array to a type of its own.

    A parameter comes back only if an output takes its place: of a gradient, which has
    its type, a caller still needs the parameter.
    """

    def kind(value: Any) -> tuple[tuple[int, ...], str]:
        return tuple(value.shape), str(value.dtype)

    out = [v.aval for v in _jax.open_jaxpr(jaxpr).outvars]
    taken = {*updates.values()}
    returned = collections.Counter(kind(a) for k, a in enumerate(out) if k not in taken)
    chosen = []
    for position in sorted({a.position for a in arguments}):
        own = [(i, a) for i, a in enumerate(arguments) if a.position == position]
        roles = {a.role for _, a in own}
        left = [a for i, a in own if i not in updates]
        wanted = collections.Counter(kind(a.spec) for a in left)
        lost = "batch" in roles or "parameter" in {a.role for a in left}
        if not _STATE.isdisjoint(roles) and not lost and wanted <= returned:
            returned -= wanted
            chosen.append(position)
    return tuple(chosen)
