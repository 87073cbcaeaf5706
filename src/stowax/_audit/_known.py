"""What an audit knows of jitted functions and types, so that a call is cheap to note.

A call of a known function costs an audit some dozen microseconds; asked anew for names,
sizes and code it would be ten times as many. No function is kept alive for it: one that
is jitted anew in every step may hold arrays. Types of arrays are, JAX has one each.
"""

import functools
import weakref
from typing import Any, NamedTuple

from .._jax_hooks import Array
from ._arrays import code_of, compiled_ahead
from ._values import is_librarys, is_operation

_MOST = 1 << 14


class Function(NamedTuple):
    """What is known of a jitted function; `key` is the same for one made anew."""

    name: str
    operation: bool
    key: int
    library: bool = False


class Types(NamedTuple):
    """Bytes of arrays, one by one (0 for what is no array of JAX's) and altogether."""

    avals: Any  # keeps their ids their own
    sizes: tuple[int, ...]
    total: int
    largest: int


class ByIdentity:
    """What is known of objects, for as long as they are there; none is kept alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def get(self, thing: Any) -> Any:
        """What is known of `thing`, or None."""
        found = self._known.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def put(self, thing: Any, known: Any) -> Any:
        """Knows `known` of `thing` from now on, and returns it."""
        try:
            reference: Any = weakref.ref(thing)
        except TypeError:  # kept, then
            reference = functools.partial(_same, thing)
        self._known[id(thing)] = reference, known
        return known


def _same(thing: Any) -> Any:
    return thing


class Known:
    """Functions by their ids, types of results by those of their avals."""

    def __init__(self) -> None:
        self._functions = ByIdentity()
        self._keys: dict[Any, int] = {}
        self._types: dict[tuple[int, ...], Types] = {}
        self._made = ByIdentity()

    def function(self, function: Any) -> Function:
        """What is known of the function that a hook names."""
        inner = getattr(function, "_fun", None)
        key = function if inner is None else inner
        if (known := self._functions.get(key)) is None:
            known = self._functions.put(key, self._asked(function, inner))
        return known

    def _asked(self, function: Any, inner: Any) -> Function:
        library = False
        if inner is None and not hasattr(function, "__name__"):
            name, operation, code = compiled_ahead(function)
        else:
            inner = function if inner is None else inner
            name = getattr(inner, "__name__", type(inner).__name__)
            operation, code = is_operation(inner), code_of(inner)
            library = is_librarys(inner)
        key = self._keys.setdefault(code, len(self._keys))
        return Function(name, operation, key, library)

    def made(self, function: Any, leaves: list[Any]) -> Types:
        """Bytes of what a function made; of one compiled once they are the same."""
        once = _is_compiled_once(function)
        known = self._made.get(function) if once else None
        if known is None:
            known = self.types(leaves)
            if once:
                self._made.put(function, known)
        return known

    def types(self, leaves: list[Any]) -> Types:
        """Bytes of some leaves; asked once for each list of types."""
        avals = [leaf.aval if type(leaf) is Array else None for leaf in leaves]
        key = tuple(map(id, avals))
        if (known := self._types.get(key)) is None:
            if len(self._types) > _MOST:
                self._types.clear()
            sizes = tuple(
                0 if aval is None else leaf.size * leaf.dtype.itemsize
                for aval, leaf in zip(avals, leaves, strict=True)
            )
            known = Types(avals, sizes, sum(sizes), max(sizes, default=0))
            self._types[key] = known
        return known


def _is_compiled_once(function: Any) -> bool:
    count = getattr(function, "_cache_size", None)
    return count is not None and count() == 1
