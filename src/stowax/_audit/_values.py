"""What is handed to a jitted function: which values are the host's, and how large.

Used by `_watch` and `_strict`, at every call; arrays of JAX's are passed by.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jax_hooks import Array
from .._where import is_jax, is_users

_HOSTS = (np.ndarray, np.generic, float, int, complex, bool)


# Of the last structure of a function's arguments: asked for at every call.
_names: dict[int, tuple[Any, Any, list[str]]] = {}
_MOST_NAMES = 1 << 10


class Sent(NamedTuple):
    """A value of the host's among the arguments of a call."""

    name: str
    kind: str  # the Python type's name
    shape: tuple[int, ...]
    bytes: int
    value: Any

    @property
    def described(self) -> str:
        """The value for a sentence: `a float`, `a NumPy array of float32[8, 2]`."""
        if self.kind == "ndarray":
            return _described(self.value.dtype, self.shape)
        article = "an" if self.kind[0] in "aeiou" else "a"
        return f"{article} {self.kind}"


@functools.lru_cache(maxsize=1 << 10)
def _described(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"a NumPy array of {dtype}[{', '.join(map(str, shape))}]"


def is_operation(inner: Any) -> bool:
    """Whether a jitted function is one of JAX's own, as `jax.numpy` consists of."""
    if getattr(inner, "_apply_primitive", False):
        return True
    code = _innermost(inner)
    return code is not None and is_jax(code)


def is_librarys(inner: Any) -> bool:
    """Whether a library wrote a jitted function, as some of optax's are."""
    code = _innermost(inner)
    return code is not None and not is_users(code)


def _innermost(inner: Any) -> Any:
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    return getattr(inner, "__code__", None)


def arguments_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """`args` and `kwargs` of a call of `function`, without what is static."""
    info = getattr(function, "_jit_info", None)
    if info is None or not (info.static_argnums or info.static_argnames):
        return args, kwargs
    count = len(args)
    static = {k % count for k in info.static_argnums if -count <= k < count}
    return (
        tuple(None if k in static else arg for k, arg in enumerate(args)),
        {k: v for k, v in kwargs.items() if k not in info.static_argnames},
    )


def sent_values(function: Any, args: Any, kwargs: Any) -> list[Sent]:
    """The host's values among the arguments of a call, with their bytes on the device.

    **Arguments:** `function` as the fast path knows it, with what is static in it.
    """
    arguments = arguments_of(function, args, kwargs)
    leaves, structure = jax.tree.flatten(arguments)
    return sent_leaves(leaves, lambda: names_of(function, arguments, structure))


def sent_leaves(leaves: list[Any], names: Callable[[], list[str]]) -> list[Sent]:
    """The host's values among some leaves; `names` is called if there are any."""
    found = [k for k, leaf in enumerate(leaves) if type(leaf) is not Array]
    if not found:
        return []
    called = names()
    return [sent(called[k], leaves[k]) for k in found if is_of_the_host(leaves[k])]


def names_of(function: Any, arguments: Any, structure: Any) -> list[str]:
    """Names of the leaves of a call's arguments, as JAX itself would give them."""
    known = _names.get(id(function))
    if known is None or known[0]() is not function or known[1] != structure:
        inner = getattr(function, "_fun", function)
        paths = jax.tree_util.tree_leaves_with_path(arguments)
        names = [argument_name(path, inner) for path, _ in paths]
        try:
            reference: Any = weakref.ref(function)
        except TypeError:
            return names
        if len(_names) > _MOST_NAMES:
            _names.clear()
        known = _names[id(function)] = reference, structure, names
    return known[2]


def is_of_the_host(leaf: Any) -> bool:
    """Whether `leaf` is a NumPy or Python value, exactly.

    Subclasses of these are JAX's own, for literals of a program.
    """
    return type(leaf) in _HOSTS or isinstance(leaf, np.generic)


def argument_name(path: Any, inner: Any) -> str:
    """`state['w']`, as JAX itself names what stands at 'w' in the argument `state`."""
    inside = jax.tree_util.keystr(path[2:])
    if path[0].idx == 1:
        return f"{path[1].key}{inside}"
    number = path[1].idx
    code = getattr(inner, "__code__", None)
    names: Any = () if code is None else code.co_varnames[: code.co_argcount]
    first = names[number] if number < len(names) else f"args[{number}]"
    return first + inside


def sent(name: str, leaf: Any) -> Sent:
    """The record of one value."""
    config: Any = jax.config
    itemsize = _itemsize(getattr(leaf, "dtype", type(leaf)), config.jax_enable_x64)
    if isinstance(leaf, np.ndarray | np.generic):
        kind = "ndarray" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        return Sent(name, kind, leaf.shape, leaf.size * itemsize, leaf)
    return Sent(name, type(leaf).__name__, (), itemsize, leaf)


@functools.lru_cache(maxsize=1 << 8)
def _itemsize(kind: Any, _x64: bool) -> int:
    """Bytes of an element on the device, which depends on the setting `_x64`."""
    return jax.dtypes.canonicalize_dtype(np.result_type(kind)).itemsize
