"""The equations that marked calls are in a recorded step, and why there may be none.

"plain" is a call that nothing differentiates, "forward" and "backward" are one that
something does. They have no meaning to JAX; a replay gives them one (`_replay`).
"""

from typing import Any

import numpy as np

from .. import _jax
from .._jax_primitives import opaque_primitive, type_of

UNDER_VMAP = "its gradient is taken under jax.vmap (example by example, say)"
AGAIN = "it is differentiated in another way than once, in reverse"
APART = (
    "its forward and its backward pass stand in different loops: the mark is inside of "
    "a loop that is differentiated as a whole. Mark the function around that loop"
)
FORWARDS = (
    "its derivative is taken forwards (by the function that jax.linearize returns): "
    "nothing is stored for that. Take jax.vjp or jax.grad of it"
)
MANUAL = "it is called inside of jax.shard_map, where every device has a program"
ORDERED = "it has effects in a fixed order, which nothing may be moved across"

PLAIN, FORWARD, BACKWARD = "stowax_plain", "stowax_forward", "stowax_backward"
OWN = frozenset({PLAIN, FORWARD, BACKWARD})
bind_plain = opaque_primitive(PLAIN, UNDER_VMAP, AGAIN)
bind_forward = opaque_primitive(FORWARD, UNDER_VMAP, AGAIN)
bind_backward = opaque_primitive(BACKWARD, UNDER_VMAP, AGAIN)

TICKET = type_of((), np.int32)


def holds_marks(equation: Any) -> bool:
    """Whether a marked call is in one of the jaxprs of an equation."""
    return any(
        inner.primitive.name in OWN or holds_marks(inner)
        for jaxpr in _jax.jaxprs_in(equation.params)
        for inner in jaxpr.eqns
    )
