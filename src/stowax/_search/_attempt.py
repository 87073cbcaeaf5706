"""A program that was compiled for a plan, and what is known of it."""

import dataclasses
from collections.abc import Mapping

from .._records._stages import Decisions, Evaluation, Solution
from ._trial import Measured


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Decisions with what the planner says of them and what the compiler made of them.

    `decisions` is `None` for the step as the user wrote it.
    """

    decisions: Decisions | None
    solution: Solution | None
    evaluation: Evaluation | None
    options: Mapping[str, str | bool]
    donated: bool
    measured: Measured

    def fits(self, budget: int, host_budget: int) -> bool:
        """Whether the compiled program is one, and stays within both budgets."""
        return (
            self.measured.inspection is not None
            and self.measured.compiled_bytes <= budget
            and self.measured.host_bytes <= host_budget
        )

    @property
    def is_sound(self) -> bool:
        """Whether the compiled program moves all that was planned to move."""
        return not (self.measured.vanished or self.measured.not_on_host)
