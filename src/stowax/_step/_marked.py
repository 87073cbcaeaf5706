"""The equations that marked calls are in a recorded step, and why there may be none.

"plain" is a call that nothing differentiates, "forward" and "backward" are one that
something does. They have no meaning to JAX; a replay gives them one (`_replay`).

Where `jax.vmap` meets a forward equation, the gradient is taken example by example. The
equation becomes that of a call with all examples (`Call.over`), whose layers are stacks
like others. Each example has gradients of its own there. So what is differentiated and
the same for all examples, weights say, is repeated for each.

Where `jax.jvp` meets one, it becomes that of a call that also computes the derivative
along the tangents (`Call.pushed`). Of `x ↦ (f(x), f'(x) ẋ)` the backward pass is

    (p, q) ↦ (f'(x)ᵀ p + (∂ₓ f'(x) ẋ)ᵀ q,  f'(x)ᵀ q)       for x and for ẋ

With the cotangent `y` of `f(x)` and its tangent `ẏ`, `(ẏ, y)` gives the tangent of the
gradient, which is a product with the Hessian, and the gradient `f'(x)ᵀ y` itself. That
is so for second derivatives that are symmetric, and those of a rule that is no
derivative need not be. JAX's own rules are derivatives. (JAX 0.10 forgets them in
second derivatives of scans, such as that of `relu` at zero. JAX 0.12 does as is done
here.)
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Collection, Generator, Sequence
from typing import Any

import numpy as np

from .. import _jax
from .._jax_primitives import (
    Unplannable,
    effects_of,
    in_front,
    instantiated,
    is_zero,
    may_be_no_derivative,
    opaque_primitive,
    refuse,
    tangent_type,
    type_of,
    zero_of,
)
from .._jaxprs._jaxpr import is_float
from .._layers._calls import Call

UNDER_VMAP = "its gradient is taken once, and pulled back under jax.vmap (jax.jacrev)"
AGAIN = "it is differentiated in another way than once, in reverse"
APART = (
    "its forward and its backward pass stand in different loops: the mark is inside of "
    "a loop that is differentiated as a whole. Mark the function around that loop"
)
FORWARDS = (
    "its derivative is taken forwards (by the function that jax.linearize returns): "
    "nothing is stored for that. Take jax.vjp or jax.grad of it"
)
REVERSE = (
    "the gradient is differentiated forwards (by jax.jvp), and a jax.custom_vjp inside "
    "of it has a rule for reverse alone"
)
STILL = (
    "the gradient is differentiated forwards (by jax.jvp), and not all that it is by "
    "moves"
)
SKEW = (
    "the gradient is differentiated forwards (by jax.jvp), and a jax.custom_jvp inside "
    "of it may have a rule that is no derivative"
)
ORDERED = "it has effects in a fixed order, which nothing may be moved across"

PLAIN, FORWARD, BACKWARD = "stowax_plain", "stowax_forward", "stowax_backward"
TANGENTS = "custom_lin"  # what a custom rule for reverse becomes in `jax.jvp`
OWN = frozenset({PLAIN, FORWARD, BACKWARD})
# A float, so that it has a tangent, by which a backward equation knows its `jax.jvp`.
TICKET = type_of((), np.float32)
NO_TICKET = np.float32(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Over:
    """A call over an axis of `jax.vmap`: its number, and types of its gradients."""

    axis: Any
    number: int
    types: tuple[Any, ...]


def _forward_batched(
    axis: Any,
    values: Sequence[Any],
    dimensions: Sequence[int | None],
    *,
    number: int,
    active: Sequence[int],
    results: Sequence[Any],
    effects: Any,
) -> tuple[list[Any], list[int | None]]:
    """A forward equation under `jax.vmap`; the ticket is one for all examples."""
    if all(d is None for d in dimensions):
        same = bind_forward(values, results, effects, number=number, active=active)
        return same, [None] * len(same)
    recorder: Any = _recorder()
    axes = [None if d is None else 0 for d in dimensions]
    inputs = list(values)
    for i, dimension in enumerate(dimensions):
        if dimension is not None or i in active:
            inputs[i], axes[i] = in_front(values[i], dimension, axis), 0
    call = recorder.calls[number].over(axes, axis, inputs)
    types = tuple(tangent_type(inputs[i]) for i in active)
    recorder.over[number] = Over(axis, len(recorder.calls), types)
    out = _bind_call(recorder, call, active)
    return out, [*[0] * (len(out) - 1), None]


def _bind_call(recorder: Any, call: Call, active: Sequence[int]) -> list[Any]:
    """The forward equation of a call that another one became."""
    recorder.calls.append(dataclasses.replace(call, inputs=()))
    return bind_forward(
        call.inputs,
        [*(v.aval for v in _jax.open_jaxpr(call.jaxpr).outvars), TICKET],
        effects_of(call.jaxpr),
        number=len(recorder.calls) - 1,
        active=tuple(active),
    )


def _backward_batched(
    axis: Any,
    values: Sequence[Any],
    dimensions: Sequence[int | None],
    *,
    number: int,
    given: Sequence[int],
    results: Sequence[Any],
    effects: Any,
) -> tuple[list[Any], list[int | None]]:
    """A backward equation under `jax.vmap`: a gradient for every example."""
    over = _recorder().over.get(number)
    if over is None or over.axis is not axis:
        if any(d is not None for d in dimensions):
            raise Unplannable(UNDER_VMAP)
        same = bind_backward(values, results, effects, number=number, given=given)
        return same, [None] * len(same)
    ticket, *cotangents = values
    cotangents = [
        in_front(value, dimension, axis)
        for value, dimension in zip(cotangents, dimensions[1:], strict=True)
    ]
    out = bind_backward(
        [ticket, *cotangents], over.types, effects, number=over.number, given=given
    )
    return out, [0] * len(out)


@dataclasses.dataclass(frozen=True, slots=True)
class Pushed:
    """A call with its derivative: its number, and what the results are of its own.

    `along` are the results that have a tangent among the results, in that order, and
    `count` is how many results there are without tangents.
    """

    number: int
    count: int
    along: tuple[int, ...]


def _forward_pushed(
    values: Sequence[Any],
    tangents: Sequence[Any],
    *,
    number: int,
    active: Sequence[int],
    results: Sequence[Any],
    **_: Any,
) -> tuple[list[Any], list[Any]]:
    """A forward equation under `jax.jvp`."""
    recorder: Any = _recorder()
    moved = [i for i, t in enumerate(tangents) if i in active or not is_zero(t)]
    # Its gradient would be pulled back to zeros. Where a second derivative is infinite,
    # 0 * inf is a NaN that JAX, which knows of the zero, has not.
    if any(is_zero(tangents[i]) for i in active):
        raise Unplannable(STILL)
    given = [instantiated(tangents[i]) for i in moved]
    if any(map(_may_be_skew, _jax.open_jaxpr(recorder.calls[number].jaxpr).eqns)):
        raise Unplannable(SKEW)
    call = recorder.calls[number].pushed(values, moved, given)
    if _holds(call.jaxpr, {TANGENTS}):
        raise Unplannable(REVERSE)
    along = tuple(k for k, aval in enumerate(results[:-1]) if is_float(aval))
    count = len(results) - 1
    recorder.pushed[number] = Pushed(len(recorder.calls), count, along)
    own = [len(values) + moved.index(i) for i in active]
    *out, ticket = _bind_call(recorder, call, [*active, *own])
    tangent = [zero_of(value) for value in out[:count]]
    for k, found in zip(along, out[count:], strict=True):
        tangent[k] = found
    return [*out[:count], ticket], [*tangent, NO_TICKET]


def _may_be_skew(equation: Any) -> bool:
    """Whether second derivatives of what an equation does may not be symmetric."""
    inner = _jax.jaxprs_in(equation.params)
    return may_be_no_derivative(equation) or any(
        _may_be_skew(e) for jaxpr in inner for e in jaxpr.eqns
    )


def _backward_pushed(
    values: Sequence[Any],
    tangents: Sequence[Any],
    *,
    number: int,
    given: Sequence[int],
    results: Sequence[Any],
    effects: Any,
) -> tuple[list[Any], list[Any]]:
    """A backward equation under `jax.jvp`: the gradient and its tangent."""
    if is_zero(tangents[0]):
        raise Unplannable(AGAIN)  # a cotangent is moved, and not what is pulled back
    pushed = _recorder().pushed[number]
    ticket, *cotangents = values
    moving = {k: t for k, t in zip(given, tangents[1:], strict=True) if not is_zero(t)}
    own = [pushed.count + pushed.along.index(k) for k in given]
    out = bind_backward(
        [ticket, *moving.values(), *cotangents],
        [*results] * 2,
        effects,
        number=pushed.number,
        given=(*moving, *own),
    )
    return out[len(results) :], out[: len(results)]


_recorders: contextvars.ContextVar[Any] = contextvars.ContextVar("stowax_recorder")


@contextlib.contextmanager
def recorded_by(recorder: Any) -> Generator[None]:
    """Calls that others become in here are `recorder`'s."""
    token = _recorders.set(recorder)
    try:
        yield
    finally:
        _recorders.reset(token)


def _recorder() -> Any:
    return _recorders.get()


_again = refuse(AGAIN)
bind_plain = opaque_primitive(
    PLAIN, batched=refuse(UNDER_VMAP), forwards=_again, again=_again
)
bind_forward = opaque_primitive(
    FORWARD, batched=_forward_batched, forwards=_forward_pushed, again=_again
)
bind_backward = opaque_primitive(
    BACKWARD, batched=_backward_batched, forwards=_backward_pushed, again=_again
)


def holds_marks(equation: Any) -> bool:
    """Whether a marked call is in one of the jaxprs of an equation."""
    return any(_holds(jaxpr, OWN) for jaxpr in _jax.jaxprs_in(equation.params))


def _holds(jaxpr: Any, names: Collection[str]) -> bool:
    return any(
        equation.primitive.name in names
        or any(_holds(inner, names) for inner in _jax.jaxprs_in(equation.params))
        for equation in _jax.open_jaxpr(jaxpr).eqns
    )
