"""What `plan` was asked, and the step that it was asked about."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from .._records._stages import Options
from .._state._shards import device_bytes
from .._step._recording import Recording
from .._target._machine import Target
from .._target._program_cache import ProgramCache
from ._options import wants_row_major
from ._programs import Programs

MOST_MISSES = 4
"""Programs that are compiled for a plan before one fits; no `compiles` may be less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `plan` was asked, checked, and the step's one trace; `say` shows progress.

    `budgets` are bytes, or shares of what the step takes as it is written;
    `host_budget` is what of the host's memory `host_reserve` has left. `specs` are
    the step's arguments on the target, `recording` is made of them. `started` is when
    planning began, by `time.perf_counter`. `written` has the step as it is, compiled,
    by whether its state is donated: the same program for every budget, as all that is
    made of the step (`programs`). `first` of two questions, the other of which may be
    answered where this one is not: what nobody expects to fit is not compiled for its
    size.
    """

    step: Callable[..., Any]
    specs: tuple[Any, ...]
    recording: Recording
    budgets: Sequence[int | float]
    started: float
    machine: Target
    host_budget: int
    host_reserve: int = 0
    pin: Mapping[str, str]
    forbid: Collection[str]
    keep_checkpoint: bool
    roll: bool
    donate: bool | None
    compiler_options: Mapping[str, str | bool | float]
    compiles: int | None
    cache: ProgramCache
    say: Callable[[str], None]
    first: bool = False
    written: dict[bool, Any] = dataclasses.field(default_factory=dict)
    programs: Programs = dataclasses.field(default_factory=Programs)

    @property
    def given_bytes(self) -> int:
        """Bytes per device of what the step is given."""
        return sum(map(device_bytes, jax.tree.leaves(self.specs)))

    @property
    def options(self) -> Options:
        """How the step is read, its layers as loops."""
        return Options(
            keep_checkpoint=self.keep_checkpoint,
            roll=self.roll,
            row_major=wants_row_major(self.machine, self.specs),
        )

    @property
    def donates(self) -> bool | None:
        """Whether state is donated; what the step's own `jit` donates, always."""
        told = self.donate is None and self.recording.donated
        return True if told else self.donate
