"""What in an update's loop begins after what, told to compilers by arithmetic.

A copy may begin when its place is known, and a block may be written when it is made. So
a place, or a block, is computed with a number of what has to be there first: one that
changes nothing, which the compiler cannot know.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._layers._host_layers import can_order, not_positive


def in_turn(
    at: Sequence[Any], block: Any, fetched: Any, zero: Any
) -> tuple[Sequence[Any], Any]:
    """Where and what to write, both the same, once `fetched` is there.

    Under a mesh no device has an element of `fetched` by itself: it would be sent to
    all of them, for every block. There each device's part of `block` waits for its part
    of `fetched`. The predicate, on `zero`, is never true; the compiler cannot know.
    """
    if _jax.aval_of(fetched).sharding.mesh.size <= 1:
        return after_all(at, [fetched]), block
    never = jax.lax.broadcast(zero < 0, block.shape)
    return at, jax.lax.select(never, fetched, block)


def can_wait_for(value: Any) -> bool:
    """Whether `after_all` can wait for a value: a number, on the device."""
    return can_order(_jax.aval_of(value)) and not _jax.in_host_memory(value)


def zero_after(values: Sequence[Any]) -> Any:
    """Zero, once `values` are there, and no compiler knows: `n (n + 1)` is even."""
    number = not_positive(values)
    return jax.lax.bitwise_and(number * (number + 1), jnp.int32(1))


def after_all(starts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """`starts`, none of them negative, where a copy may begin after `values` are there.

    See `_host_layers.after`.
    """
    number = not_positive(values)
    return [jax.lax.max(jnp.int32(s), number) for s in starts] if values else [*starts]
