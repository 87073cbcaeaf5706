"""Small questions about arrays and functions that an audit asks at every call."""

import sys
import traceback
import zlib
from typing import Any

import jax
import numpy as np

from .._jax_hooks import Array
from .._where import Place, is_users
from ._values import argument_name

_HASHED_BYTES = 1 << 16


_sizes: dict[int, tuple[Any, int]] = {}
_MOST_SIZES = 1 << 14


def bytes_of(leaf: Any) -> int:
    """Bytes of an array of JAX's; 0 of anything else.

    Results of one program share their type, and this is asked for each of them.
    """
    if type(leaf) is not Array:
        return 0
    aval = leaf.aval
    known = _sizes.get(id(aval))
    if known is not None and known[0] is aval:
        return known[1]
    if len(_sizes) > _MOST_SIZES:
        _sizes.clear()
    size = leaf.size * leaf.dtype.itemsize
    _sizes[id(aval)] = aval, size
    return size


def total_bytes(leaves: Any) -> int:
    """Bytes of all arrays of JAX's in a list."""
    return sum(map(bytes_of, leaves))


def token_of(value: Any) -> Any:
    """Equal for equal values: of an array its content, by a sample if it is large."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    flat = value.reshape(-1) if value.flags.c_contiguous else value.ravel()
    if value.nbytes > _HASHED_BYTES:
        flat = flat[:: value.nbytes // _HASHED_BYTES]
    return value.shape, str(value.dtype), zlib.crc32(np.ascontiguousarray(flat).data)


def code_of(inner: Any) -> Any:
    """What is the same of a function that is made anew in every step.

    Its code, and that of all that wraps it: `f` and `jax.grad(f)` are two.
    """
    codes: list[Any] = [getattr(inner, "__name__", type(inner).__name__)]
    while inner is not None:
        codes.append(getattr(inner, "__code__", type(inner).__name__))
        inner = getattr(inner, "__wrapped__", None)
    return tuple(codes)


def anonymous() -> tuple[str, bool, Any]:
    """Name, kind and key of a program without a function: one compiled ahead of time.

    JAX calls those from `stages.py`; others are parts of a derivative, dispatched one
    by one.
    """
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < 8:
        if frame.f_code.co_filename.endswith("stages.py"):
            return "the compiled program", False, ("compiled", id(frame.f_code))
        if is_users(frame.f_code):
            break
        frame, depth = frame.f_back, depth + 1
    return "a derivative", True, "derivative"


def elsewhere(arguments: Any, inner: Any, made: list[Any]) -> tuple[str, ...]:
    """Names of arguments that lie on other devices than the results."""
    ran_on = next((leaf.sharding.device_set for leaf in made if _is(leaf)), None)
    if ran_on is None:
        return ()
    return tuple(
        argument_name(path, inner)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments)
        if _is(leaf) and leaf.sharding.device_set != ran_on
    )


def _is(leaf: Any) -> bool:
    return type(leaf) is Array


def has_moved(value: Any, result: Any) -> bool:
    """Whether an array went to another device or memory, of the same kind of machine.

    From the host's CPU to an accelerator is how a batch is placed.
    """
    before, after = value.sharding, result.sharding
    if before == after:
        return False
    platforms = [next(iter(s.device_set)).platform for s in (before, after)]
    if platforms[0] == "cpu" != platforms[1]:
        return False
    return (
        before.device_set != after.device_set or before.memory_kind != after.memory_kind
    )


def reuse_of(error: BaseException) -> tuple[Place, str] | None:
    """The user's line that used a donated buffer again, if that is the error."""
    message = str(error).partition("\n")[0]
    deleted = "has been deleted" in message or "deleted or donated" in message
    if not deleted or not isinstance(error, RuntimeError | ValueError):
        return None
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        code = frame.f_code
        if is_users(code):
            place = Place(code.co_filename, line, code.co_name, code.co_firstlineno)
            return place, f"{message:.200}"
    return None
