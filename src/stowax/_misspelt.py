"""Functions that name the nearest option where one is misspelt: all public ones."""

import functools
from collections.abc import Callable
from typing import Any

from ._errors import CallError, did_you_mean


def naming_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, naming the nearest option where it is called with one it has not.

    **Returns:** it itself where it is no function, or takes any name.

    **Raises:** `CallError`, when it is called so.

    >>> naming_options(lambda budget=None: budget)(budgt=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    stowax._errors.CallError: budgt: got 1. Did you mean budget=? ...
    """
    import inspect

    if not inspect.isfunction(function):
        return function
    options = inspect.signature(function).parameters.values()
    names = [
        o.name for o in options if o.kind in (o.POSITIONAL_OR_KEYWORD, o.KEYWORD_ONLY)
    ]
    if not names or any(o.kind == o.VAR_KEYWORD for o in options):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if name not in names:
                near = did_you_mean(name, names)
                raise CallError(name, f"{value!r:.60}", f"{near}Write one of {names}.")
        return function(*args, **kwargs)

    return call
