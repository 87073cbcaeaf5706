"""What a verification found, as records: leaf by leaf, and which decision is to blame.

No JAX in here; `_verify` fills them, the report prints them.
"""

import dataclasses
import json
from typing import Any, Literal

VERIFICATION_VERSION = 1

Reference = Literal["device", "cpu"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafCheck:
    """One array that the step gives back, planned beside plain.

    `step` counts from one and names the step where the error was the largest part of
    what is tolerated there; `error`, `tolerance` and `change` are of that step, each
    the largest over the array's elements; `change` is what the steps had changed in it
    by then (for what is no state, its size). `bias` is the part of that change by which
    it is too large, or too small if negative, in the whole array or in the slice of it
    (along the first axis) where that is worst; `bias_tolerance` is what is tolerated of
    it there. `problem` says what is wrong where that is no matter of size: another
    dtype, another memory, NaN where there was none; then `error` is `None`.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    step: int
    error: float | None
    tolerance: float
    change: float
    ok: bool
    problem: str = ""
    bias: float = 0.0
    bias_tolerance: float = 0.0

    @property
    def decisive(self) -> bool:
        """Whether a change that is wrong altogether would be more than is tolerated."""
        return self.tolerance < self.change or self.change == 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """A decision without which the planned step is right, and alone with which it errs.

    `stack` and `value` are those of the plan's `DecisionRecord`, as are `name`,
    `source` and `decision`; `instead` is what it was replaced by.
    """

    stack: str
    value: int
    name: str
    source: str
    decision: str
    instead: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A step with its plan beside the same step without, on a machine that runs both.

    `steps` were run in a row from the arguments as given; `device` is what ran the
    planned step, `reference` what ran the plain one. `repeatable` says that two runs of
    the planned step gave the same bits. `blamed` are the decisions at fault and `why`
    what bisecting the plan says in words; both are empty where nothing is wrong.
    `runs` counts the programs that were compiled and run for it. `notes` says what was
    not compared, and what a pass does not prove.
    """

    step: str
    target: str
    device: str
    reference: str
    steps: int
    leaves: tuple[LeafCheck, ...]
    repeatable: bool
    blamed: tuple[Blame, ...]
    why: str
    notes: tuple[str, ...]
    runs: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every leaf agrees and the planned step repeats itself."""
        return self.repeatable and all(leaf.ok for leaf in self.leaves)

    @property
    def failed(self) -> tuple[LeafCheck, ...]:
        """The leaves that do not agree, in the step's own order."""
        return tuple(leaf for leaf in self.leaves if not leaf.ok)

    def __bool__(self) -> bool:
        return self.passed

    def to_json(self) -> str:
        """The verification as JSON text; `version` says which form."""
        record: dict[str, Any] = {
            "version": VERIFICATION_VERSION,
            "passed": self.passed,
            **dataclasses.asdict(self),
        }
        return json.dumps(record, indent=1)
