"""A planned step that takes what the user's own takes: objects, names, anything."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

from .._calling._calling import Flat, Taken, take
from .._calling._known import known
from .._calling._objects import together


class Applied:
    """What `jax.jit` is for a step of arrays: called, lowered and traced alike.

    **Arguments:** `jit` makes a jitted function of one that takes and returns arrays.
    """

    def __init__(self, step: Callable[..., Any], jit: Callable[[Flat], Any]):
        functools.update_wrapper(self, step)
        self._step, self._jit, self.known = step, jit, known(step)
        self._made: dict[Hashable, tuple[Flat, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the step returns; objects among its arguments are updated."""
        with together():
            taken = take(args, kwargs, self.known)
            flat, jitted = self._for(taken)
            return flat.give(jitted(*taken.arrays))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `lower` of `jax.jit`'s functions."""
        with together():
            taken = take(args, kwargs, self.known)
            return self._for(taken)[1].lower(*taken.arrays)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `trace` of `jax.jit`'s functions."""
        with together():
            taken = take(args, kwargs, self.known)
            return self._for(taken)[1].trace(*taken.arrays)

    def _for(self, taken: Taken) -> tuple[Flat, Any]:
        key = taken.key
        if key not in self._made:
            flat = Flat(self._step, taken)
            self._made[key] = flat, self._jit(flat)
        return self._made[key]
