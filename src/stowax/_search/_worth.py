"""When a compiled program is reason enough for another one."""

from ._attempt import Attempt

_WORTH_HIDING = 0.02
"""Part of the step that may be spent waiting for copies without being planned again."""

_WORTH_CORRECTING = 0.05
"""Part of a program's bytes by which the prediction may be off without another try."""

WORTH_FILLING = 0.03
"""Part of the budget that a plan may leave unused without being tried again."""


def waits_longer(attempt: Attempt) -> bool:
    """Whether much more is waited for than the model expects.

    The model lets a copy hide in all of a layer's arithmetic; the compiled schedule may
    not.
    """
    if attempt.measured.inspection is None or attempt.evaluation is None:
        return False
    timeline = attempt.measured.inspection.timeline
    expected = attempt.evaluation.exposed_seconds + attempt.evaluation.host_seconds
    surprising = timeline.exposed_seconds - expected
    return surprising >= _WORTH_HIDING * timeline.step_seconds


def better_known(attempt: Attempt, budget: int) -> bool:
    """Whether a program that fits leaves room, or surprised the prediction."""
    measured = attempt.measured
    unused = budget - measured.compiled_bytes
    surprise = abs(measured.excess) > _WORTH_CORRECTING * measured.compiled_bytes
    return surprise or unused > WORTH_FILLING * budget
