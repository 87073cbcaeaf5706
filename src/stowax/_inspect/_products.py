"""How much a program multiplies, and how long that would take at the chip's own rates.

Both together say how well a step uses the chip. Values that are computed again are in
it: this is the use of the hardware, not of the model's own products.
"""

import collections
from collections.abc import Mapping

from .._hardware._figures import Chip
from .._records._program import Program


def products_of(program: Program) -> dict[str, float]:
    """Operations of the device's matrix products per step, by what they read."""
    found: dict[str, float] = collections.defaultdict(float)
    for computation in program.computations.values():
        for item in computation.instructions:
            if item.flops and not item.execution_thread:
                found[item.dtype] += item.flops * computation.executions
    return dict(found)


def nominal_seconds(products: Mapping[str, float], chip: Chip) -> float:
    """Seconds that the products take at the chip's rates; 0 where one is not known.

    >>> from stowax._hardware._hardware import CHIPS
    >>> nominal_seconds({"bfloat16": 989e12}, CHIPS["h100"])
    1.0
    """
    if chip.platform == "cpu":  # its rate is assumed
        return 0.0
    rates = {dtype: chip.matrix_rate(dtype) for dtype in products}
    if not all(rates.values()):
        return 0.0
    return sum(flops / (rates[dtype] or 1.0) for dtype, flops in products.items())
