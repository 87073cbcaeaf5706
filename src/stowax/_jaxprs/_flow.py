"""A flat jaxpr as arrays, for the search of repeating blocks.

`_repeats` calls `read` once per program. Keys of equations come from `_signatures`; the
amounts of work here are rough and serve only to compare one stretch of a program with
another (which block to roll), never to predict a time.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _jax
from . import _periods, _signatures


def read(opened: Any) -> _periods.Flow:
    """The arrays that the search works on, of an open, flat jaxpr."""
    keys = _signatures.Keys()
    work = _Work()
    made: dict[Any, tuple[int, int]] = {}
    codes, exact, amounts, costly = [], [], [], []
    offsets, makers, places, sizes, floating = [0], [], [], [], []
    for position, equation in enumerate(opened.eqns):
        precise, loose = keys.equation_key(equation)
        number = keys.number(precise)
        exact.append(number)
        codes.append(number if loose is precise else keys.number(loose))
        amount, is_costly = work.of(equation)
        amounts.append(amount)
        costly.append(is_costly)
        for atom in equation.invars:
            maker, place = (
                (-1, 0) if isinstance(atom, _jax.Literal) else made.get(atom, (-1, 0))
            )
            makers.append(maker)
            places.append(place)
            sizes.append(_bytes(atom.aval))
            floating.append(_is_floating(atom.aval))
        offsets.append(len(makers))
        for output, variable in enumerate(equation.outvars):
            made[variable] = (position, output)
    return _periods.Flow(
        codes=np.asarray(codes, np.int64),
        exact=np.asarray(exact, np.int64),
        work=np.asarray(amounts, np.float64),
        costly=np.asarray(costly, bool),
        offsets=np.asarray(offsets, np.int64),
        makers=np.asarray(makers, np.int64),
        places=np.asarray(places, np.int64),
        bytes=np.asarray(sizes, np.int64),
        floating=np.asarray(floating, bool),
    )


def _size(aval: Any) -> int:
    size = 1
    for length in getattr(aval, "shape", ()):
        size *= length
    return size


def _bytes(aval: Any) -> int:
    return _size(aval) * getattr(getattr(aval, "dtype", None), "itemsize", 1)


def _is_floating(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and _is_inexact(dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


class _Work:
    """A rough amount of arithmetic per equation: enough to compare stretches by."""

    def __init__(self) -> None:
        self._inner: dict[int, tuple[Any, float, bool]] = {}

    def of(self, equation: Any) -> tuple[float, bool]:
        """Multiply-adds or elements written, and whether a product is in there."""
        name, params = equation.primitive.name, equation.params
        written = float(sum(_size(v.aval) for v in equation.outvars))
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            return written * float(np.prod([shape[d] for d in contracted])), True
        if name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            features = kernel[params["dimension_numbers"].rhs_spec[0]]
            return written * _size(equation.invars[1].aval) / max(features, 1), True
        if "dot" in name or "ffi" in name or "custom_call" in name:
            return written, True
        amount, costly = 0.0, "pallas" in name
        for inner in _jax.jaxprs_in(params):
            more, has_product = self._of_jaxpr(inner)
            amount, costly = amount + more, costly or has_product
        return max(written, amount * params.get("length", 1)), costly

    def _of_jaxpr(self, jaxpr: Any) -> tuple[float, bool]:
        found = self._inner.get(id(jaxpr))
        if found is None:
            parts = [self.of(equation) for equation in jaxpr.eqns]
            amount = sum((a for a, _ in parts), 0.0)
            found = (jaxpr, amount, any(c for _, c in parts))
            self._inner[id(jaxpr)] = found
        return found[1], found[2]
