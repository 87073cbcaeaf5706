"""An error that the elements of an array share, which no look at each of them shows.

A gradient that is scaled by 1.0001 moves each parameter by less than the parameter's
own rounding, and by less than a long sum in another order would. But roundings point
everywhere, and this error points where the step goes. So the difference d of two runs
is projected on what the step changed, c (of what is no state, its value): the *bias*

    b = Σ d c / Σ c²

is 0.0001 for that gradient, whatever each element's rounding. It is taken for the whole
array and for each slice along its first axis, which is often the layers'.

Roundings n that are independent of one another have b with a standard deviation of
√(Σ n² c²) / Σ c², which shrinks with the root of the number of elements. n is the
storing and the adding up of `_tolerance`, and what runs of the plain step from
arguments a rounding away differ by. λ of it is tolerated. Roundings that are shared (of
the loss, of a norm that scales all gradients) do not average out; so besides are
tolerated: `SHAKEN` times the bias of those runs themselves, two roundings of the
coarsest dtype that the step computes in, a few of float32, and those of its longest
sum.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._tolerance import CONFIDENCE, SHAKEN, SINGLE, Rounding, unit_of

_MOST_SLICES = 128
_FEW = 16
"""Roundings of a float32 scalar that all of an array may share."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Direction:
    """Where the plain step goes in an array, and how its runs scatter along that way.

    All are per slice, the whole array last: `length` is Σ c², `roundings` the deviation
    of b from roundings that are known, `spread` the one that was measured, and `shared`
    the largest bias that was measured.
    """

    length: np.ndarray
    roundings: np.ndarray
    spread: np.ndarray
    shared: np.ndarray
    floor: float

    def note(self, change: np.ndarray, apart: np.ndarray) -> None:
        """Takes note of how far another run of the plain step is apart."""
        biases, spread = _along(change, apart, self.length)
        self.spread = np.maximum(self.spread, spread)
        self.shared = np.maximum(self.shared, np.abs(biases))

    def biases(self, change: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """The bias of a run that is `apart`, per slice, the whole array last."""
        return _along(change, apart, self.length)[0]

    def tolerated(self, measured: bool = True) -> np.ndarray:
        """The bias that is tolerated, per slice, the whole array last.

        Without what other plain runs were apart by, if that is not `measured`.
        """
        if not measured:
            return CONFIDENCE * self.roundings + self.floor
        scattered = CONFIDENCE * np.hypot(self.roundings, self.spread)
        shared = np.maximum(self.shared, np.median(self.shared))
        return scattered + SHAKEN * shared + self.floor


def direction(
    rounding: Rounding, value: np.ndarray, change: np.ndarray, step: int
) -> Direction:
    """The direction of `change`, of an array that is `value` after `step` steps.

    **Arguments:** both as `flattened` makes them; `value` has the array's own dtype.
    """
    unit = unit_of(value.dtype)
    small = min(unit, SINGLE)
    length = _sums(change * change)
    storing = math.sqrt(2 * step) * unit * np.abs(flattened(value))
    summing = math.sqrt(rounding.terms) * small * np.abs(change)
    _, roundings = _along(change, np.hypot(storing, summing), length)
    floor = 2 * rounding.unit + (_FEW + math.sqrt(rounding.terms)) * SINGLE
    nothing = np.zeros_like(length)
    return Direction(
        length=length,
        roundings=roundings,
        spread=nothing,
        shared=nothing,
        floor=floor,
    )


def has_direction(dtype: Any) -> bool:
    """Whether arrays of it can lean to a side: floats and complex numbers."""
    return bool(jnp.issubdtype(dtype, np.inexact))


def flattened(value: np.ndarray) -> np.ndarray:
    """An array's slices as rows of float64; NaN and infinity are 0 in it."""
    rows = value.shape[0] if value.ndim > 1 else 1
    rows = rows if 1 < rows <= _MOST_SLICES and value.size else 1
    if jnp.issubdtype(value.dtype, np.complexfloating):
        value = np.stack([value.real, value.imag], axis=-1)
    wide = value.astype(np.float64).reshape(rows, -1)
    return np.where(np.isfinite(wide), wide, 0.0)


def _along(
    change: np.ndarray, apart: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bias, and the deviation of it if elements are independent; 0 without a change."""
    inner, squares = _sums(apart * change), _sums(np.square(apart * change))
    there = length > 0
    safe = np.where(there, length, 1.0)
    return np.where(there, inner / safe, 0.0), np.where(
        there, np.sqrt(squares) / safe, 0.0
    )


def _sums(rows: np.ndarray) -> np.ndarray:
    """Sums of the rows, and of everything last; one row is everything."""
    each = rows.sum(axis=1)
    return each if len(each) == 1 else np.append(each, each.sum())
