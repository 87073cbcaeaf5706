"""A repeated body and how its values are stored: what the two passes are told.

`_rewrite` finds stacks, `_pipeline` runs them, `_passes` emits their loops. What the
numbers in `Stored` mean is `_linearize`'s business: they count the values of one
layer's forward program.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._jax_layouts import row_major
from .._records._stages import Options
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
    as their shapes say, whatever the compiler would like (see `lay_out`). Layers that
    are `as_written` are no loop (see `_straight`). A `segment` of straight-line code is
    one layer written so, all inputs constants (see `_segment`); stacks of a step
    that is cut into such are `among_segments`. Layers that are `tiles` are blocks of
    tokens (see `_jaxprs._tiles`). Of layers in groups of `group` (0: none) each
    group's first input is stored (see `_groups`).
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
    as_written: bool = False
    segment: bool = False
    among_segments: bool = False
    tiles: bool = False
    group: int = 0

    def lay_out(self, value: Any) -> Any:
        """`value`, to be stored or just read, in the order in which it is stored.

        The two loops are compiled one after the other. Where the forward one would
        rather write a value transposed, and the backward one read it straight, the
        compiler transposes the whole stack between them: both are alive then.
        """
        return row_major(value) if self.row_major and value.ndim > 1 else value

    def under(self, options: Options) -> "Stack":
        """The stack as it runs under a program's options, of those that can be its."""
        as_written = (options.as_written and self.separate) or self.segment
        grouped = self.count > options.group and not (as_written or self.tiles)
        return dataclasses.replace(
            self,
            row_major=options.row_major,
            as_written=as_written,
            among_segments=options.segments,
            group=options.group if grouped else 0,
        )

    @property
    def carry_inputs(self) -> range:
        """Numbers of the body inputs that are carried."""
        return range(self.const_count, self.const_count + self.carry_count)

    @property
    def first_layer_input(self) -> int:
        """Number of the first of the body's per-layer inputs."""
        return self.const_count + self.carry_count


Choose = Callable[[Stack, LinearizedBody], Stored]
"""Decides what is stored, once the differentiated inputs are known."""


LOOP_SCOPE = "stowax.layers"
"""Named scope of every loop over layers."""

BACKWARD_SCOPE = "stowax.backward"
"""Beginning of the named scope of a backward pass of straight-line code in segments."""


def scope_name(stack: str, position: int) -> str:
    """Named scope of the forward operation `position`, in a labelled trace."""
    return f"stowax.value.{stack}.{position}"


def moves(stored: Stored) -> bool:
    """Whether something goes to host memory."""
    return any(how != "keep" for how in stored.values())


def ways(stored: Stored) -> tuple[list[int], ...]:
    """The numbers of the values that are stored in each of the ways in `STORED`."""
    return tuple(sorted(n for n, how in stored.items() if how == way) for way in STORED)
