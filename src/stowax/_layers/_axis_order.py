"""Arrays that lie in host memory with their axes in another order than typed.

A TPU copies whole tiles, which span the last two axes as an array lies in memory. A
scan over one of these cannot fetch a layer by itself, if the array lies as it is typed.
So such an array is put into host memory with the layers' axis first (a layout of its
own), and the planned step works on it *as it lies*: `as_it_lies` is a transposition
that says in types what is so in memory, and compiles to nothing. Loops over layers and
blocks cut what comes out along leading axes, as they do everywhere else; what the step
returns is typed as the user's own array again, and jitted to lie as that did
(`_ordered_step`).

Which arrays those are, and in what order, is the plan's to say (`_state`).

What goes silently wrong otherwise: an argument that lies in the usual order compiles,
too. The compiler brings the whole of it to the device and lays it out anew there.
"""

from collections.abc import Sequence
from typing import Any

import jax

Order = tuple[int, ...] | None
"""The axes of an array as they lie, major first; `None` for as they are typed."""


def host_order(ndim: int, axis: int, platform: str) -> Order:
    """In what order the axes of a stacked array in host memory should lie.

    Where a TPU could not cut one place out of `axis`, that lies first. A GPU's compiler
    cuts anywhere, and wants the usual order: it would transpose any other, on the
    host's processor.
    """
    if platform != "tpu" or axis < ndim - 2 or axis == 0:
        return None
    return (axis, *(k for k in range(ndim) if k != axis))


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another one."""
    return tuple(order.index(k) for k in range(len(order)))


def lying(values: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """What belongs to an array's axes, in the order in which they lie."""
    return tuple(values) if order is None else tuple(values[k] for k in order)


def as_it_lies(array: Any, order: Order) -> Any:
    """An array with its axes as they lie in memory."""
    return array if order is None else jax.lax.transpose(array, order)


def as_it_is_typed(array: Any, order: Order) -> Any:
    """An array whose axes are as they lie, with these as they are typed."""
    return array if order is None else jax.lax.transpose(array, inverse(order))
