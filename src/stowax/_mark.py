"""`stow`, the mark on the function that is differentiated.

A marked function is the function: with no plan being made or applied, the call goes
straight through. `plan` and `Plan.apply` install a handler for the time of their own
trace (`handling`), and the handler gets the call instead.

What goes silently wrong without care: a `jax.jit` (or a scan) around a marked function
keeps what it has traced, and would hand the trace of one plan to the next. So every
handler has a context of its own, which JAX's caches see.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, Protocol, TypeVar

import jax

from ._errors import ArgumentError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Handler(Protocol):
    """What is called in place of a marked function while a plan is made or applied."""

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...


_handler: contextvars.ContextVar[Handler | None] = contextvars.ContextVar(
    "stowax_handler", default=None
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
        handler = _handler.get()
        if handler is None:
            return fn(*args, **kwargs)
        return handler(fn, args, kwargs)

    return stowed


def current_handler() -> Handler | None:
    """What handles marked functions here, if anything does."""
    return _handler.get()


@contextlib.contextmanager
def handling(handler: Handler) -> Generator[None]:
    """Marked functions called in here go to `handler`, whatever was traced before."""
    token = _handler.set(handler)
    try:
        with _trace_context(handler):
            yield
    finally:
        _handler.reset(token)
