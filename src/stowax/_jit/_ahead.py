"""What a planned step is traced and lowered to, compiled and called ahead of time.

JAX's `Traced`, `Lowered` and `Compiled` of a program of arrays know nothing of what the
step takes besides: objects, names, what is static. These do, and are JAX's own in all
else.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._calling._known import Known


class Ahead:
    """One of JAX's stages, of a program that is called as the step is.

    `call(compiled, args, kwargs)` calls a compiled one.
    """

    def __init__(self, stage: Any, call: Callable[[Any, Any, Any], Any]):
        self._stage, self._call = stage, call

    def lower(self, *args: Any, **kwargs: Any) -> "Ahead":
        """As `lower` of JAX's `Traced`."""
        return Ahead(self._stage.lower(*args, **kwargs), self._call)

    def compile(self, *args: Any, **kwargs: Any) -> "Ahead":
        """As `compile` of JAX's `Lowered`."""
        return Ahead(self._stage.compile(*args, **kwargs), self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's results; what is static is as it was lowered for."""
        return self._call(self._stage, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def with_static(
    known: Known,
    lowered_for: tuple[Sequence[Any], Mapping[str, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, those that are static as in the call that was lowered."""
    first, named = lowered_for
    static = {n + len(first) if n < 0 else n for n in known.static}
    whole = list(args)
    for k in sorted(static & {*range(len(first))}):
        whole.insert(k, first[k])
    kept = {k: v for k, v in named.items() if k in known.named}
    return tuple(whole), {**kept, **kwargs}
