"""NumPy's functions that read an array of JAX's, seen by NumPy's own protocols.

`numpy.log(x)` and `numpy.linalg.norm(x)` read a CPU array through its buffer, past all
of JAX. While somebody watches, its type has `__array_function__` and `__array_ufunc__`,
which NumPy asks first; both do what NumPy would have done, and tell.

What goes silently wrong without care: with `__array_ufunc__`, `ndarray * array` is no
longer left to JAX by NumPy. So an operator is told from a call by the instruction that
the caller is at, and left to JAX, as before.
"""

import dis
import linecache
import re
import sys
from collections.abc import Callable
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import numpy as np

# These ask for shapes and types, or make something like it.
_SILENT = {
    *("shape", "ndim", "size", "result_type", "can_cast", "common_type"),
    *("iscomplexobj", "isrealobj", "min_scalar_type", "broadcast_shapes"),
    *("may_share_memory", "shares_memory"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
}
# What Python calls on the right operand, where the left one gives up.
_REFLECTED = {
    "add": "__radd__",
    "subtract": "__rsub__",
    "multiply": "__rmul__",
    "divide": "__rtruediv__",
    "true_divide": "__rtruediv__",
    "floor_divide": "__rfloordiv__",
    "remainder": "__rmod__",
    "divmod": "__rdivmod__",
    "power": "__rpow__",
    "matmul": "__rmatmul__",
    "left_shift": "__rlshift__",
    "right_shift": "__rrshift__",
    "bitwise_and": "__rand__",
    "bitwise_or": "__ror__",
    "bitwise_xor": "__rxor__",
    "less": "__gt__",
    "less_equal": "__ge__",
    "greater": "__lt__",
    "greater_equal": "__le__",
    "equal": "__eq__",
    "not_equal": "__ne__",
}
_asarray = np.asarray  # not what a watched program is given
_OPERATORS = ("BINARY_OP", "COMPARE_OP")
_USES_OPERATORS = re.compile(r"\b(sum|reduce|accumulate|divmod|pow)\b|\boperator\.")


def install(
    array: type, tell: Callable[[str, list[Any], Callable[[], Any]], Any]
) -> Callable[[], None]:
    """Makes NumPy ask before it reads arrays of a type; returns what ends that.

    **Arguments:** `tell(how, arrays, read)` calls `read`, which gives NumPy's result.
    """

    def __array_function__(
        _: Any, function: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        if any(_is_foreign(kind, "__array_function__", array) for kind in types):
            return NotImplemented
        plain = function._implementation
        if function.__name__ in _SILENT:
            return plain(*args, **kwargs)
        found = _arrays((*args, *kwargs.values()), array)
        return tell(function.__name__, found, lambda: plain(*args, **kwargs))

    def __array_ufunc__(
        _: Any, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        if any(_is_foreign(type(x), "__array_ufunc__", array) for x in inputs):
            return NotImplemented
        by_operator = (
            method == "__call__"
            and len(inputs) == 2
            and isinstance(inputs[0], np.ndarray | np.generic)
            and ufunc.__name__ in _REFLECTED
            and _is_operator(sys._getframe(1))
        )
        if by_operator:
            reflected = getattr(array, _REFLECTED[ufunc.__name__])
            return reflected(inputs[1], inputs[0])

        def read() -> Any:
            values = [_asarray(x) if type(x) is array else x for x in inputs]
            named = {
                name: _asarray(x) if type(x) is array and name != "out" else x
                for name, x in kwargs.items()
            }
            return getattr(ufunc, method)(*values, **named)

        return tell(ufunc.__name__, _arrays(inputs, array), read)

    set_on: Any = array
    for hook in (__array_function__, __array_ufunc__):
        setattr(set_on, hook.__name__, hook)

    def undo() -> None:
        for hook in (__array_function__, __array_ufunc__):
            if vars(array).get(hook.__name__) is hook:
                delattr(array, hook.__name__)

    return undo


def _arrays(values: Any, array: type) -> list[Any]:
    """Arrays among arguments, and in lists and tuples of them."""
    found = []
    for value in values:
        if type(value) is array:
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _arrays(value, array)
    return found


def _is_foreign(kind: type, protocol: str, array: type) -> bool:
    """Whether a third library's type wants to answer itself."""
    if kind is array or issubclass(kind, np.ndarray | np.generic):
        return False
    return getattr(kind, protocol, None) is not None


def _is_operator(frame: FrameType | None) -> bool:
    """Whether the line that runs uses an operator, and does not call NumPy by name."""
    if frame is None:
        return False
    code, at = frame.f_code, frame.f_lasti
    if at < 0 or at >= len(code.co_code):
        return False
    if dis.opname[code.co_code[at]] in _OPERATORS:
        return True
    return bool(_USES_OPERATORS.search(_source(code, at)))


def _source(code: CodeType, at: int) -> str:
    """The text of the call at an instruction; empty where it is not known."""
    line, last, begin, end = next(
        islice(code.co_positions(), at // 2, None), (None, None, None, None)
    )
    if line is None or last is None:
        return ""
    lines = [linecache.getline(code.co_filename, k) for k in range(line, last + 1)]
    lines[-1] = lines[-1][:end]
    return "".join(lines)[begin:]
