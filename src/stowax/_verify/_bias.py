"""An error that the elements of an array share, which no look at each of them shows.

A gradient that is scaled by 1.0001 moves each parameter by less than the parameter's
own rounding, and by less than a long sum in another order would. But roundings point
everywhere, and this error points where the step goes. So the difference d of two runs
is projected on what the step changed, c (of what is no state, its value): the *bias*

    b = Σ d c / Σ c²

is 0.0001 for that gradient, whatever each element's rounding. It is taken for the whole
array and for each slice along its first axis, which is often the layers'.

Roundings n that are independent of one another have b with a standard deviation of

    s = √(Σ n² c²) / Σ c²

which shrinks with the root of the number of elements. It is known for some: the sums'
(`_tolerance`), those of the change, and those of an element that is stored and was
close to the middle between two numbers. For the rest it is measured in runs of the
plain step from arguments a rounding away. Elements of a gradient are not independent:
the biases of those runs are ρ times their s, with ρ over all slices and runs, for there
are few runs. A planned run that scatters less than they do (it has the s of what is
left of d without b c) is held to its own s: it is nearer to the plain one than any
rounding of the arguments. K deviations are tolerated.

What scales all of an array does not scatter. Beside the deviations is tolerated a
rounding of the coarsest dtype that the step computes in, a few of float32 and those of
its longest sum, for the scalars that all elements share (a norm); or a half more than
the largest bias of the whole array in those runs, which round such scalars anew, if
that is more.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._tolerance import SINGLE, Rounding, unit_of

DEVIATIONS = 5.0
"""K above."""

SHARED = 1.5
"""How much of the largest bias of runs a rounding away is tolerated."""

_MANY = 64
"""From so many elements on their scatter says how they scatter."""

_MOST_SLICES = 128
_FEW = 16
"""Roundings of a float32 scalar that all of an array may share."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Direction:
    """Where the plain step goes in an array, and how its runs scatter along that way.

    Arrays are per slice, the whole array last: `length` is Σ c², `known` the deviation
    s of roundings that are known, `squares` the sum over `runs` of the measured s²,
    `ratios` that of ρ². `largest` is their largest bias of the whole array.
    """

    length: np.ndarray
    known: np.ndarray
    squares: np.ndarray
    floor: float
    largest: float = 0.0
    runs: int = 0
    ratios: float = 0.0

    def note(self, change: np.ndarray, apart: np.ndarray) -> None:
        """Takes note of how far another run of the plain step is apart, if it is."""
        if not np.any(apart):
            return
        biases, spread = _along(change, apart, self.length)
        there = spread > 0
        ratios = np.square(biases[there] / spread[there])
        self.ratios += float(np.mean(ratios)) if ratios.size else 0.0
        self.squares = self.squares + np.square(spread)
        self.largest = max(self.largest, float(np.abs(biases[-1])))
        self.runs += 1

    def lean(self, change: np.ndarray, apart: np.ndarray) -> "Lean":
        """How a run leans that is `apart`."""
        biases, _ = _along(change, apart, self.length)
        each = apart - biases[: len(change), None] * change
        _, spread = _along(change, each, self.length)
        if len(biases) > 1:
            _, whole = _along(change, apart - biases[-1] * change, self.length)
            spread[-1] = whole[-1]
        square = np.square(change)
        _, fourth = _along(square, np.ones_like(square), self.length)
        few = np.square(fourth) * _MANY > 1.0  # Σ c⁴ / (Σ c²)², one over their number
        return Lean(biases=biases, spread=np.where(few, np.inf, spread))

    def tolerated(self, lean: "Lean", measured: bool = True) -> np.ndarray:
        """The bias that is tolerated, per slice, the whole array last.

        Without what other plain runs were apart by, if that is not `measured`.
        """
        if not measured or not self.runs:
            return DEVIATIONS * self.known + self.floor
        together = max(1.0, math.sqrt(self.ratios / self.runs))
        spread = np.minimum(np.sqrt(self.squares / self.runs), lean.spread)
        scattered = DEVIATIONS * np.hypot(self.known, together * spread)
        return scattered + max(SHARED * self.largest, self.floor)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lean:
    """The biases of a run, and the deviation of them that its own scatter makes.

    Per slice, the whole array last; the deviation is infinite where elements are few.
    """

    biases: np.ndarray
    spread: np.ndarray


def direction(
    rounding: Rounding, value: np.ndarray, change: np.ndarray, step: int
) -> Direction:
    """The direction of `change`, of an array that is `value` after `step` steps.

    **Arguments:** `change` is in rows as `flattened` makes them, `value` as it is.
    """
    unit = unit_of(value.dtype)
    length = _sums(change * change)
    moved = np.abs(change)
    # Off by a rounding of the change, an element is stored as the next number in as
    # many of all cases as the one is a part of the other.
    storing = 2 * step * unit * moved * (unit * moved + unit * np.abs(flattened(value)))
    summing = rounding.terms * np.square(min(unit, SINGLE) * moved)
    _, known = _along(change, np.sqrt(storing + summing), length)
    floor = rounding.unit + (_FEW + math.sqrt(rounding.terms)) * SINGLE
    nothing = np.zeros_like(length)
    return Direction(length=length, known=known, squares=nothing, floor=floor)


def has_direction(dtype: Any) -> bool:
    """Whether arrays of it can lean to a side: floats and complex numbers."""
    return bool(jnp.issubdtype(dtype, np.inexact))


def flattened(value: np.ndarray) -> np.ndarray:
    """An array's slices as rows of float64; NaN and infinity are 0 in it."""
    rows = value.shape[0] if value.ndim > 1 else 1
    rows = rows if 1 < rows <= _MOST_SLICES and value.size else 1
    if jnp.issubdtype(value.dtype, np.complexfloating):
        value = np.stack([np.real(value), np.imag(value)], axis=-1)
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
