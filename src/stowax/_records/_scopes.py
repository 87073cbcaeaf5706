"""What JAX's transformations leave in the names of operations: forward or backward.

What is differentiated stands under `jvp(...)`, its derivative under
`transpose(jvp(...))`, what `jax.checkpoint` computes again under
`rematted_computation`. Lowered and compiled programs have the same names.
"""

import re
from typing import Literal

_DERIVATIVE = re.compile(r"(transpose\()?jvp\(")
_AGAIN = "rematted_computation"

Phase = Literal["forward", "backward", "again", ""]
"""Where in a step an operation stands; `again` is what is recomputed."""


def phase_of(name: str) -> Phase:
    """`forward`, `backward`, `again` or nothing; the innermost scope counts.

    >>> phase_of("jit(step)/transpose(jvp(loss))/dot_general")
    'backward'
    """
    if _AGAIN in name:
        return "again"
    found = [*_DERIVATIVE.finditer(name)]
    if not found:
        return ""
    return "backward" if found[-1].group(1) else "forward"
