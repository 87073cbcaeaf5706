"""The largest batch whose bytes stay within a budget, with few questions asked.

Bytes grow nearly linearly with the batch: a line through two answers says where to ask
next, and what was answered bounds it from both sides.
"""

from collections.abc import Callable, Mapping

_MOST_QUESTIONS = 12
_FARTHEST = 32
"""How many times the largest that fits a line may point beyond it."""
_LARGEST = 2**24  # units: a step whose bytes do not grow with its batch


def bracket(
    bytes_of: Callable[[int], int], budget: int, *, first: int, unit: int
) -> tuple[int, int]:
    """The largest batch that fits, and the smallest that does not.

    **Arguments:** `bytes_of` is asked for multiples of `unit`, from `first` on.

    **Returns:** two multiples of `unit`, next to each other unless the questions ran
    out. 0 in the first place: none was found to fit; in the second: nothing was found
    to be too large.

    >>> bracket(lambda batch: 100 + 7 * batch, 240, first=8, unit=1)
    (20, 21)
    """
    known: dict[int, int] = {}
    low, high, batch = 0, 0, first
    for _ in range(_MOST_QUESTIONS):
        known[batch] = bytes_of(batch)
        if known[batch] <= budget:
            low = max(low, batch)
        else:
            high = min(high or batch, batch)
        if (high and high - low <= unit) or low > _LARGEST * unit:
            break
        batch = _next(known, budget, low, high, unit)
    return low, high


def _next(known: Mapping[int, int], budget: int, low: int, high: int, unit: int) -> int:
    """Where a line through what is known reaches the budget, within the bounds."""
    crossing = _crossing(known, budget, low, high)
    if crossing is None:
        farther = 2 if len(known) == 1 else _FARTHEST
        crossing = (low + high) / 2 if high else farther * low
    batch = int(crossing // unit) * unit
    most = high - unit if high else low * _FARTHEST
    return max(low + unit, min(batch, most))


def _crossing(
    known: Mapping[int, int], budget: int, low: int, high: int
) -> float | None:
    """Where the line through the two nearest answers has the budget's bytes."""
    batches = sorted(known)
    if len(batches) < 2:
        return None
    if low and high:
        one, other = low, high
    else:
        one, other = batches[-2:] if not high else batches[:2]
    slope = (known[other] - known[one]) / (other - one)
    return one + (budget - known[one]) / slope if slope > 0 else None
