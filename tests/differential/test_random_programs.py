"""Random training steps under random plans: never a wrong number, no foreign error.

By default two, the same ones in every run. `STOWAX_DIFFERENTIAL=full` takes hundreds,
others each time; `python -m benchmarks differential` takes thousands.
"""

import os

import hypothesis
from hypothesis import Phase

from differential.choosers import drawn_by
from differential.judge import FAULTS, judge
from differential.programs import draw

FULL = os.environ.get("STOWAX_DIFFERENTIAL") == "full"
PROGRAMS = 300 if FULL else 2


@hypothesis.settings(
    max_examples=PROGRAMS,
    derandomize=not FULL,
    database=None,
    phases=[Phase.generate, Phase.shrink] if FULL else [Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(pair=drawn_by(draw))
def test_planned_steps_are_the_plain_ones(pair):
    verdict = judge(*pair)
    hypothesis.event(verdict.outcome)
    assert verdict.outcome not in FAULTS, f"{verdict.outcome}: {verdict.message}"
