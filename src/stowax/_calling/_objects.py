"""Objects that a step is given and changes in place: Flax NNX's.

They are taken apart before a call, put together inside of it, and what they have become
comes out as arrays, which are written into the caller's own objects: what `nnx.jit`
does, by NNX's own public means. Objects that the step makes and returns come back as
objects, too.

Nothing is imported here: a program that has not imported `flax.nnx` has no such
objects. Equinox's modules are pytrees that nobody changes, and need none of this.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_TAG = "stowax"
_inside = contextvars.ContextVar("stowax_together", default=False)


def nnx() -> Any:
    """`flax.nnx`, or `None` where nobody imported it."""
    return sys.modules.get("flax.nnx")


def is_object(leaf: Any) -> bool:
    """Whether this is changed in place, and not a value."""
    module = nnx()
    if module is None or isinstance(leaf, module.State):
        return False
    return isinstance(leaf, module.Pytree | module.Variable)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around a call: what is taken apart in here is known when it comes back."""
    module = nnx()
    if module is None or _inside.get():
        yield
        return
    token = _inside.set(True)
    try:
        with module.update_context(_TAG):
            yield
    finally:
        _inside.reset(token)


def split(objects: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """`(definition, pieces)`: what the objects are, hashable, and each one's arrays.

    An array that several of them share is in the first one's piece. Inside of
    `together`.
    """
    if not objects:
        return None, ()
    with nnx().split_context(_TAG) as context:
        definition, state = context.split(tuple(objects))
    kind = type(state)
    empty = kind({})
    return definition, tuple(state.get(k, empty) for k in range(len(objects)))


def merge(definition: Any, pieces: Sequence[Any], *, inside: bool) -> tuple[Any, ...]:
    """The objects of a `definition`; outside of the call the caller's own, updated."""
    if definition is None:
        return ()
    state = _state(pieces)
    with nnx().merge_context(_TAG, inside) as context:
        return context.merge(definition, state)


def update(objects: Sequence[Any], pieces: Sequence[Any]) -> None:
    """Writes arrays into the caller's own objects, in the order of `split`."""
    if objects:
        nnx().update(tuple(objects), _state(pieces))


def _state(pieces: Sequence[Any]) -> Any:
    kind = nnx().State
    there = lambda piece: not isinstance(piece, kind) or len(piece)
    return kind({k: piece for k, piece in enumerate(pieces) if there(piece)})
