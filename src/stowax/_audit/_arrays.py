"""Small questions about arrays and functions that an audit asks at every call."""

import re
import sys
import zlib
from typing import Any

import jax
import numpy as np

from .._jax_hooks import Array
from .._where import is_users
from ._values import argument_name

_HASHED_BYTES = 1 << 16
_executables: dict[int, Any] = {}


def total_bytes(leaves: Any) -> int:
    """Bytes of all arrays of JAX's in a list."""
    return sum(leaf.nbytes for leaf in leaves if type(leaf) is Array)


def token_of(value: Any) -> Any:
    """Equal for equal values: of an array its content, by a sample if it is large."""
    if isinstance(value, list):
        return [token_of(each) for each in value]
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
        code = getattr(inner, "__code__", None)
        # Equal code may stand in several files.
        codes.append((code, code.co_filename) if code else type(inner).__name__)
        inner = getattr(inner, "__wrapped__", None)
    return tuple(codes)


def compiled_ahead(function: Any) -> tuple[str, bool, Any]:
    """Name, kind and key of a program without a function: one compiled ahead of time.

    JAX calls those from `stages.py`, whose first call names the executable; others are
    parts of a derivative, dispatched one by one.
    """
    executable: Any = function
    frame, depth = sys._getframe(1), 0
    while not hasattr(executable, "unsafe_call"):
        if frame is None or depth > 8 or is_users(frame.f_code):
            return "a derivative", True, "derivative"
        if frame.f_code.co_filename.endswith("stages.py"):
            executable = getattr(frame.f_locals.get("self"), "_executable", None)
            if not hasattr(executable, "unsafe_call"):
                return "the compiled program", False, ("compiled", id(frame.f_code))
        frame, depth = frame.f_back, depth + 1
    _executables[id(executable)] = executable  # keeps its id its own
    name = re.sub(r"^jit[_(](.*?)\)?$", r"\1", str(executable.unsafe_call.name))
    return name, False, ("compiled", id(executable))


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


def is_reuse(error: BaseException) -> bool:
    """Whether an error says that a donated buffer was used again."""
    message = str(error).partition("\n")[0]
    deleted = "has been deleted" in message or "deleted or donated" in message
    return deleted and isinstance(error, RuntimeError | ValueError)


def local_devices() -> tuple[int, str]:
    """How many devices this process has, and their platform."""
    try:
        return jax.local_device_count(), jax.local_devices()[0].platform
    except RuntimeError:
        return 1, ""


def memory_limit() -> int:
    """Bytes that the default device has for arrays; 0 where it does not say."""
    try:
        return int((jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0))
    except (RuntimeError, NotImplementedError):
        return 0
