"""What was made of a step on a target so far, so that nothing is made twice.

A plan reads the step in several ways, and asks for the memory of dozens of programs.
Tracing and lowering them is most of what planning takes, and much of it is wanted
again: the program that a budget is a share of, the one to compile, those beside the
plan.
"""

import dataclasses
from typing import Any

from .._predict._predict import MemoryPrediction
from .._records._stages import Options
from .._step._recording import Recording
from .._step._trace import Step, trace_step
from .._target._compiled import LoweredProgram
from ._apply import StepPlan

Program = tuple[StepPlan, Options, bool] | tuple[None, None, bool]
"""What tells a step's programs apart: its plan and how it is read, if it has a plan,
and whether it donates."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Programs:
    """The step as it was read, what was predicted for it, and what was lowered last."""

    steps: dict[Options, Step] = dataclasses.field(default_factory=dict)
    predicted: list[tuple[Program, MemoryPrediction]] = dataclasses.field(
        default_factory=list
    )
    last: tuple[Program, LoweredProgram] | None = None

    def step(
        self, recording: Recording, specs: tuple[Any, ...], options: Options
    ) -> Step:
        """What `trace_step` finds in the step, which is always the same one here."""
        if options not in self.steps:
            self.steps[options] = trace_step(recording, specs, options)
        return self.steps[options]

    def prediction(self, program: Program) -> MemoryPrediction | None:
        """What was predicted for a program, if that was asked before."""
        return next((found for p, found in self.predicted if p == program), None)
