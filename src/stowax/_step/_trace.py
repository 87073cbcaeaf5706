"""The training step, traced once: its arguments with their roles, and its stacks.

`plan` calls `trace_step` with what the user gave it. The step runs under a `Rewriter`
that stores everything the backward passes read, and writes down every stack that it
meets with its linearized body. The roles come from the same trace (`_roles`).
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._errors import ArgumentError, StowaxError
from .._jax import argument_path
from .._jaxprs._jaxpr import spec_of, trace
from .._layers._boundary import Emission
from .._layers._linearize import Linearized, LinearizedBody
from .._layers._pipeline import Stack
from .._layers._rewrite import Rewriter
from .._records._stages import Options, Role
from ._checks import check_traced
from ._donation import find_donated
from ._recording import Recording, as_written, record, why_not
from ._roles import Places, find_roles, observe


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

    `donate` are the positions of the arguments with state of which every array comes
    back: what a training loop replaces by the step's own result. `lost` names, for
    other arguments with state, an array that does not (`_donation`).
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
    lost: Mapping[int, str]
    updates: Mapping[int, int]
    differentiated: frozenset[int]
    boundary: Mapping[str, Emission]
    jaxpr: Any
    recording: Recording
    linearized: Linearized


def available(stack: Stack, body: LinearizedBody) -> frozenset[int]:
    """Values that the backward pass has at hand anyway.

    Constants, weights, and what depends on constants alone (masks, tables of angles):
    that is the same in every layer, and XLA computes it once, outside of the loop. Of a
    segment all that it reads, and what others read of it.
    """
    program = body.forward
    first = program.input_count
    if stack.segment:
        given = range(first + program.const_count)
        return frozenset({*given, *body.output_numbers})
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

    **Raises:** `ArgumentError` for an argument that is no array; what the step itself
    raises.
    """
    leaves, structure = jax.tree.flatten_with_path(tuple(args))
    return record(
        step,
        [check_leaf(argument_path(path), leaf) for path, leaf in leaves],
        structure,
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
    return dataclasses.replace(
        less, left=left, bare=not recording.calls, donated=recording.donated
    )


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
    specs = [check_leaf(argument_path(path), leaf) for path, leaf in leaves]
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
    found_roles = find_roles(jaxpr, _places(leaves, recording.paths), boundary)
    arguments = tuple(
        Argument(path=argument_path(path), position=path[0].idx, spec=spec, role=role)
        for (path, _), spec, role in zip(leaves, specs, found_roles.roles, strict=True)
    )
    check_traced(jaxpr, recording, arguments, found_roles)
    donated, lost = find_donated(
        arguments, jaxpr, recording.paths, found_roles, recording.donated
    )
    return Step(
        name=recording.name,
        recording=recording,
        arguments=arguments,
        stacks={
            name: TracedStack(stack=stack, body=body)
            for name, (stack, body) in found.items()
        },
        donate=donated,
        lost=lost,
        updates=found_roles.updates,
        differentiated=found_roles.differentiated or frozenset(),
        boundary=boundary,
        jaxpr=jaxpr,
        linearized=linearized,
    )


def _places(leaves: Sequence[Any], results: Sequence[Any]) -> Places:
    return Places(
        arguments=tuple(tuple(path) for path, _ in leaves),
        results=tuple(tuple(path) for path in results),
    )


def _unread(recording: Recording, leaves: Sequence[Any], specs: Sequence[Any]) -> Step:
    """The step of a recording of which nothing is known but what it is given."""
    return Step(
        name=recording.name,
        recording=recording,
        arguments=tuple(
            Argument(
                path=argument_path(path), position=path[0].idx, spec=spec, role="other"
            )
            for (path, _), spec in zip(leaves, specs, strict=True)
        ),
        stacks={},
        donate=(),
        lost={},
        updates={},
        differentiated=frozenset(),
        boundary={},
        jaxpr=recording.jaxpr,
        linearized={},
    )


def in_order(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """All arguments of the step by position, some given by their names.

    **Raises:** `ArgumentError` for a name that the step does not have, or can only be
    called with by that name.
    """
    if not kwargs:
        return args
    name = next(iter(kwargs))
    try:
        bound = inspect.signature(step).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            name,
            f"an argument that neither stowax nor the step takes so ({error})",
            "Write the step's arguments as the step is called.",
        ) from None
    if bound.kwargs:
        name = next(iter(bound.kwargs))
        raise ArgumentError(
            name,
            "an argument that the step takes by its name alone",
            f"Plan functools.partial(step, {name}=...), with {name} fixed.",
        )
    return bound.args


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
        _jax.dtype_in_jit(leaf.dtype),
        sharding=sharding if committed else None,
        weak_type=getattr(leaf, "weak_type", False),
    )
