"""Bytes as people write them: `"16GiB"` to `int`, and back.

Binary units only when printing (device memory is sold in GiB and XLA counts bytes);
decimal units (`GB`) are understood when reading.
"""

import math
import numbers
import re
from typing import Any

from ._errors import ArgumentError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB".upper()] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(quantity: Any, argument: str, *, shares: bool = False) -> int:
    """The number of bytes that `quantity` says.

    **Arguments:** `quantity` is an `int` of bytes or text such as `"16GiB"`, `"1.5
    TiB"`, `"400MB"`; `argument` is the name to use in an error. `shares` says that it
    names these, too (`parse_share`).

    **Raises:** `ArgumentError` for anything that is not a positive amount.

    >>> parse_bytes("16GiB", "budget")
    17179869184
    """
    share = ", or '60%' of what the step takes" if shares else ""
    instead = f"Write bytes as an int, or text such as '16GiB'{share}."
    if not isinstance(quantity, bool) and isinstance(quantity, numbers.Integral):
        quantity = int(quantity)  # NumPy's, too
    # Parts of a byte: more likely a number of GiB.
    broken = isinstance(quantity, float) and quantity % 1 > 0
    known = isinstance(quantity, int | float | str) and not isinstance(quantity, bool)
    if broken or not known:
        raise ArgumentError(argument, f"{quantity!r}", instead)
    if isinstance(quantity, str):
        match = _QUANTITY.fullmatch(quantity)
        unit = match.group(2).upper() if match else None
        if match is None or unit not in _UNITS:
            raise ArgumentError(argument, f"{quantity!r}", instead)
        quantity = float(match.group(1)) * _UNITS[unit]
    if not math.isfinite(quantity) or quantity <= 0:
        raise ArgumentError(argument, f"{quantity!r}, which is not above zero", instead)
    return int(quantity)


def parse_share(quantity: Any, argument: str) -> float | None:
    """The share that text such as `"60%"` says, 0.6; `None` for anything else.

    **Raises:** `ArgumentError` for a share that is not above zero.

    >>> parse_share("60%", "budget")
    0.6
    """
    if not isinstance(quantity, str) or not quantity.strip().endswith("%"):
        return None
    try:
        share = float(quantity.strip()[:-1]) / 100
    except ValueError:
        share = 0.0
    if not math.isfinite(share) or share <= 0:
        raise ArgumentError(
            argument, f"{quantity!r}", "Write a share above zero, such as '60%'."
        )
    return share


def format_bytes(count: float) -> str:
    """`count` bytes with a binary unit and three digits or so.

    >>> format_bytes(17179869184)
    '16.0 GiB'
    """
    sign = "-" if count < 0 else ""
    size = abs(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size /= 1024
    else:
        unit = "TiB"
    digits = 0 if unit == "B" else 2 if size < 10 else 1
    return f"{sign}{size:.{digits}f} {unit}"


def format_room(count: float) -> str:
    """`count` bytes as `format_bytes` writes them, rounded up: a budget to be given.

    >>> format_room(8046000), format_bytes(8046000)
    ('7.68 MiB', '7.67 MiB')
    """
    for size in (count, *(count * (1 + k / 1000) for k in range(1, 12))):
        text = format_bytes(size)
        if parse_bytes(text, "budget") >= count:
            return text
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """`seconds` with the unit a person would use.

    >>> format_seconds(0.01234)
    '12.3 ms'
    """
    size = abs(seconds)
    if size >= 1 or size == 0:
        return f"{seconds:.2f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"


def format_ratio(ratio: float) -> str:
    """How many times one thing is the other, where it is more than one.

    >>> format_ratio(1.23), format_ratio(57.49)
    ('1.2', '57')
    """
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
