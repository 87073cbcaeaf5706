"""What running an operation takes, before any machine is named: operations and bytes.

The record that cost rules return and that `_cost` turns into seconds. No rule may
return an empty record for what it does not know: `unpriced` is how a hole stays
visible, because a forgotten operation looks like a free one and would be recomputed
without limit.
"""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """Operations and bytes of one or more operations, over all devices together.

    `matrix_flops` are the multiplies and adds of matrix products and convolutions, by
    the name of the dtype that chooses the unit; `vector_flops` all other arithmetic.
    `bytes_read` and `bytes_written` go between device memory and the cores,
    `collective_bytes` over the interconnect. `unpriced` names what had no rule.

    Costs add, and multiply with an `int`:

    >>> product = OperationCost(matrix_flops=(("bfloat16", 6),), bytes_read=4)
    >>> (product + 2 * product).matrix_flops
    (('bfloat16', 18),)
    """

    matrix_flops: tuple[tuple[str, int], ...] = ()
    vector_flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    collective_bytes: int = 0
    unpriced: tuple[str, ...] = ()

    def __add__(self, other: "OperationCost") -> "OperationCost":
        if not isinstance(other, OperationCost):
            return NotImplemented
        matrix = dict(self.matrix_flops)
        for dtype, flops in other.matrix_flops:
            matrix[dtype] = matrix.get(dtype, 0) + flops
        return OperationCost(
            matrix_flops=tuple(sorted(matrix.items())),
            vector_flops=self.vector_flops + other.vector_flops,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            collective_bytes=self.collective_bytes + other.collective_bytes,
            unpriced=tuple(dict.fromkeys((*self.unpriced, *other.unpriced))),
        )

    def __mul__(self, times: int) -> "OperationCost":
        if not isinstance(times, int):
            return NotImplemented
        return OperationCost(
            matrix_flops=tuple((d, f * times) for d, f in self.matrix_flops),
            vector_flops=self.vector_flops * times,
            bytes_read=self.bytes_read * times,
            bytes_written=self.bytes_written * times,
            collective_bytes=self.collective_bytes * times,
            unpriced=self.unpriced,
        )

    __rmul__ = __mul__

    @property
    def total_matrix_flops(self) -> int:
        """Operations of matrix products of every dtype.

        >>> OperationCost(matrix_flops=(("int8", 6), ("float32", 1))).total_matrix_flops
        7
        """
        return sum(flops for _, flops in self.matrix_flops)

    @property
    def total_bytes(self) -> int:
        """Bytes between device memory and the cores, both ways.

        >>> OperationCost(bytes_read=4, bytes_written=2).total_bytes
        6
        """
        return self.bytes_read + self.bytes_written


def size_of(aval: Any) -> int:
    """Number of elements; 0 for what is no array (tokens)."""
    shape = getattr(aval, "shape", None)
    return 0 if shape is None else math.prod(int(n) for n in shape)


def bytes_of(aval: Any) -> int:
    """Bytes of an array of this type; four-bit types count as packed."""
    dtype: Any = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    # `itemsize` of the two- and four-bit types says 1: devices store them packed.
    name = str(getattr(dtype, "name", dtype))
    packed = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
    bits: int = packed[name] if name in packed else 8 * dtype.itemsize
    return (size_of(aval) * bits + 7) // 8
