"""Random training steps under random plans: never a wrong number, no foreign error.

By default a handful, the same ones in every run. `STOWAX_DIFFERENTIAL=full` takes
hundreds, others each time; `python -m benchmarks.differential` takes thousands.
"""

import os

import hypothesis
import pytest
from hypothesis import strategies as st

from differential.choosers import HypothesisChooser
from differential.judge import FAULTS, judge
from differential.programs import draw

FULL = os.environ.get("STOWAX_DIFFERENTIAL") == "full"
PROGRAMS = 300 if FULL else 8


@pytest.mark.once
@hypothesis.settings(
    max_examples=PROGRAMS,
    derandomize=not FULL,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(data=st.data())
def test_planned_steps_are_the_plain_ones(data):
    program, wishes = draw(HypothesisChooser(data))
    hypothesis.note(f"{program}\n{wishes}")
    verdict = judge(program, wishes)
    hypothesis.event(verdict.outcome)
    assert verdict.outcome not in FAULTS, f"{verdict.outcome}: {verdict.message}"
