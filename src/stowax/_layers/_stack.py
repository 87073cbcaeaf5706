"""A repeated body and how its values are stored: what the two passes are told.

`_rewrite` finds stacks, `_pipeline` runs them, `_passes` emits their loops. What the
numbers in `Stored` mean is `_linearize`'s business: they count the values of one
layer's forward program.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._jax import open_jaxpr
from .._jax_layouts import row_major
from ._linearize import LinearizedBody

Stored = Mapping[int, str]
"""Value number → "keep", or one of the ways to offload it (see `_pipeline`)."""

STORED = ("keep", "offload", "offload early", "offload ahead")
"""All ways to store a value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A body that runs `count` times, fed by its own carry.

    The body's inputs are constants, carry and per-layer inputs, in this order; its
    outputs are the carry and per-layer outputs. `separate` per-layer inputs come as one
    array per layer (an unrolled model), others stacked along their first axis (a scan).
    `source` says where the user wrote it. With `row_major`, stored values lie in memory
    as their shapes say, whatever the compiler would like (see `lay_out`).

    A stack may be a part of a scan: its runs are those from `first` on, of `total`.
    Per-layer inputs and their gradients are then the whole scan's, and are read and
    written in place: a slice of either would be a copy of it.
    """

    name: str
    source: str
    count: int
    body: Any
    const_count: int
    carry_count: int
    reverse: bool = False
    separate: bool = False
    row_major: bool = False
    first: int = 0
    total: int | None = None

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a scan."""
        return self.total is not None

    def inputs_of(self, per_layer: Sequence[Any]) -> list[Any]:
        """Of the whole stack's per-layer inputs those that a part is given."""
        mine = slice(self.first, self.first + self.count)
        return [x[mine] if self.separate else x for x in per_layer]

    def lay_out(self, value: Any) -> Any:
        """`value`, to be stored or just read, in the order in which it is stored.

        The two loops are compiled one after the other. Where the forward one would
        rather write a value transposed, and the backward one read it straight, the
        compiler transposes the whole stack between them: both are alive then.
        """
        return row_major(value) if self.row_major and value.ndim > 1 else value

    @property
    def carry_inputs(self) -> range:
        """Numbers of the body inputs that are carried."""
        return range(self.const_count, self.const_count + self.carry_count)

    @property
    def first_layer_input(self) -> int:
        """Number of the first of the body's per-layer inputs."""
        return self.const_count + self.carry_count


def can_run_as_parts(stack: Stack) -> bool:
    """Whether a stack may be divided: parts' outputs would have to be put together."""
    outputs = len(open_jaxpr(stack.body).outvars)
    return outputs == stack.carry_count and not stack.reverse and stack.count > 1


def parts_of(stack: Stack, first_part: int | None) -> tuple[Stack, ...]:
    """The two parts of a stack in the order in which they run, or the whole."""
    if first_part is None or not can_run_as_parts(stack):
        return (stack,)

    def part(number: int, first: int, count: int) -> Stack:
        return dataclasses.replace(
            stack,
            name=f"{stack.name}_{number}",
            source=f"{stack.source} ({first + 1} to {first + count} of {stack.count})",
            count=count,
            first=first,
            total=None if stack.separate else stack.count,
        )

    return part(1, 0, first_part), part(2, first_part, stack.count - first_part)


Choose = Callable[[Stack, LinearizedBody], Stored]
"""Decides what is stored, once the differentiated inputs are known."""


LOOP_SCOPE = "stowax.layers"
"""Named scope of every loop over layers."""


def scope_name(stack: str, position: int) -> str:
    """Named scope of the forward operation `position`, in a labelled trace."""
    return f"stowax.value.{stack}.{position}"


def ways(stored: Stored) -> tuple[list[int], ...]:
    """The numbers of the values that are stored in each of the ways in `STORED`."""
    return tuple(sorted(n for n, how in stored.items() if how == way) for way in STORED)
