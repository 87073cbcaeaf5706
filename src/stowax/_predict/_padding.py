"""What an array takes once a chip lays it out: rows filled up to its tiles.

A TPU keeps the two minor axes in tiles of 8 rows by 128 lanes, and the compiler takes
those two axes as minor that need the least padding. A CPU and a GPU have no tiles.
"""

import itertools
import math
from collections.abc import Sequence

_LANES, _ROWS = 128, 8
_WORD = 4  # bytes: narrower items share a word over neighbouring rows
_LONGEST_TILE = 1024  # items of an array of one axis


def padded_bytes(shape: Sequence[int], item_bytes: int, platform: str) -> int:
    """Bytes of an array on a device of `platform`, padding included.

    The layouts of libtpu 0.0.42 for a v5e, read off programs of one addition with 19
    shapes in float32 and bfloat16.

    >>> padded_bytes((1000, 3), 4, "tpu"), padded_bytes((1000, 3), 4, "gpu")
    (16384, 12000)
    """
    whole = math.prod(shape) * item_bytes
    if platform != "tpu" or not shape or not whole:
        return whole
    packed = max(1, _WORD // max(item_bytes, 1))
    if len(shape) == 1:
        tile = _LANES * packed
        while tile < min(shape[0], _LONGEST_TILE):
            tile *= 2
        return _up(shape[0], tile) * item_bytes
    items = math.prod(shape)
    return item_bytes * min(
        items
        // (shape[lane] * shape[row])
        * _up(shape[lane], _LANES)
        * _rows(shape[row], packed)
        for lane, row in itertools.permutations(range(len(shape)), 2)
    )


def _rows(rows: int, packed: int) -> int:
    """Rows of tiles: fewer than eight have a tile of their own size."""
    small = 1 << (rows - 1).bit_length()
    return max(packed, small) if small < _ROWS else _up(rows, _ROWS)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
