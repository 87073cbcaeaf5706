"""What JAX's transformations leave in the names of operations: forward or backward.

What is differentiated stands under `jvp(...)`, its derivative under
`transpose(jvp(...))`, what `jax.checkpoint` computes again under
`rematted_computation`, and what a plan does under both of the others. Lowered and
compiled programs have the same names.
"""

import re
from typing import Literal

_DERIVATIVE = re.compile(r"(transpose\()?jvp\(")
_AGAIN = "rematted_computation"

Phase = Literal["forward", "backward", "again", ""]
"""Where in a step an operation stands; `again` is what is recomputed."""


def phase_of(name: str) -> Phase:
    """`forward`, `backward`, `again` or nothing; the innermost scope counts.

    A forward pass within a backward one computes again, as a plan's layers do.

    >>> phase_of("jit(step)/transpose(jvp(loss))/dot_general")
    'backward'
    >>> phase_of("jit(step)/transpose(jvp(stowax.layers))/jvp()/exp")
    'again'
    """
    found = [scope.group(1) for scope in _DERIVATIVE.finditer(name)]
    if _AGAIN in name or (any(found) and not found[-1]):
        return "again"
    if not found:
        return ""
    return "backward" if found[-1] else "forward"
