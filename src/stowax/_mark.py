"""`stow`, the mark on the function that is differentiated, and what needs no mark.

A marked function is the function: with no plan being made or applied, the call goes
straight through. `plan` and `Plan.apply` install a handler for the time of their own
trace (`handling`), and the handler gets the call instead. Where nothing is marked, it
gets what JAX differentiates.

What goes silently wrong without care: a `jax.jit` (or a scan) around a marked function
keeps what it has traced, and would hand the trace of one plan to the next. So every
handler has a context of its own, which JAX's caches see.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import jax

from ._errors import ArgumentError
from ._jax_autodiff import see_differentiated, wrapped_in

_P = ParamSpec("_P")
_R = TypeVar("_R")


@runtime_checkable
class Handler(Protocol):
    """What is called in place of a marked function while a plan is made or applied."""

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...


@dataclasses.dataclass(slots=True)
class Handling:
    """What handles marked functions in a context, and what it has met.

    With `unmarked` it gets whatever is differentiated, too. `marked` and `found` say
    whether a marked function was called, and one that is not.
    """

    handler: Handler
    unmarked: bool
    marked: bool = False
    found: bool = False


_MARK = "__stowed__"

_handling: contextvars.ContextVar[Handling | None] = contextvars.ContextVar(
    "stowax_handling", default=None
)

# Part of the key of JAX's trace caches; `None` outside of `handling`.
_trace_context: Any = jax.make_user_context(None)  # pyright: ignore[reportUnknownMemberType]


def stow(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks `fn`, the function that the training step differentiates.

    **Arguments:** `fn` is any function that `jax.grad` or `jax.value_and_grad` is
    applied to (or a part of it, such as the model's forward pass).

    **Returns:** a function that behaves as `fn`. Under a plan (`Plan.apply`) its
    repeated layers are evaluated as the plan says.

    **Raises:** `ArgumentError` if `fn` is not callable.

    ```python
    @stowax.stow
    def loss_fn(params, batch):
        ...
    ```
    """
    if not callable(fn):
        raise ArgumentError(
            "fn",
            f"{fn!r}, which cannot be called",
            "Write @stowax.stow above a function.",
        )

    @functools.wraps(fn)
    def stowed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        here = _handling.get()
        if here is None:
            return fn(*args, **kwargs)
        here.marked = True
        return here.handler(fn, args, kwargs)

    setattr(stowed, _MARK, True)
    return stowed


def current() -> Handling | None:
    """What handles marked functions here, if anything does."""
    return _handling.get()


@contextlib.contextmanager
def handling(handler: Handler, *, unmarked: bool = False) -> Generator[Handling]:
    """Marked functions called in here go to `handler`, whatever was traced before.

    **Arguments:** with `unmarked`, so does every other function that is differentiated
    in reverse.
    """
    here = Handling(handler, unmarked)
    if unmarked:
        see_differentiated(_differentiated)
    token = _handling.set(here)
    try:
        with _trace_context(handler):
            yield here
    finally:
        _handling.reset(token)


@contextlib.contextmanager
def noticing() -> Generator[Handling]:
    """Says whether anything that is traced in here is differentiated; changes nothing.

    What was traced elsewhere is traced again.
    """
    here = Handling(lambda function, args, kwargs: function(*args, **kwargs), True)
    see_differentiated(_differentiated)
    token = _handling.set(here)
    try:
        with _trace_context("noticing"):
            yield here
    finally:
        _handling.reset(token)


def _differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is differentiated in the place of `function`."""
    here = _handling.get()
    if here is None or not here.unmarked:
        return function
    if any(hasattr(inner, _MARK) for inner in wrapped_in(function)):
        return function  # its mark is met when it is called
    here.found = True

    @functools.wraps(function)
    def handled(*args: Any) -> Any:
        return here.handler(function, args, {})

    return handled
