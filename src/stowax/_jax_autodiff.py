"""Where JAX differentiates a function in reverse.

`jax.grad`, `value_and_grad`, `vjp`, `linearize`, `jacrev`, and what frameworks build on
them, all call `linearize` of one module. `see_differentiated` puts a function before it
that may replace what is differentiated.

Served: JAX 0.10 to 0.12.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jax._src.interpreters import ad as _ad

_linearize: Any = _ad.linearize
_see: Callable[[Any], Any] | None = None


def see_differentiated(see: Callable[[Any], Any]) -> None:
    """From now on, what JAX differentiates is what `see` makes of it."""
    global _see
    _see = see
    _ad.linearize = _seeing


def _seeing(traceable: Any, *args: Any, **kwargs: Any) -> Any:
    assert _see is not None
    return _linearize(_see(traceable), *args, **kwargs)


def users_function(function: Any) -> Any:
    """The function that `jax.grad` was given, of the one that it differentiates.

    For messages only: where nothing is found, the answer is `function` itself.
    """
    *_, last = wrapped_in(function)
    return last


def wrapped_in(function: Any) -> Iterator[Any]:
    """`function`, what it is a wrapper of, what that is a wrapper of, and so on.

    The one that JAX differentiates closes over the arguments that are not
    differentiated; frameworks put theirs around the user's in the same way.
    """
    yield function
    for _ in range(8):
        cells = getattr(function, "__closure__", None) or ()
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        held: dict[str, Any] = dict(zip(names, cells, strict=False))
        if function.__module__ == "jax._src.api_util" and "f" in held:
            inner = held["f"].cell_contents
        else:
            inner = getattr(function, "__wrapped__", None)
            inner = inner or getattr(function, "f", None)
        if not callable(inner):
            return
        function = inner
        yield function
