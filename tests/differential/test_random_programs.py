"""Random training steps under random plans: never a wrong number, no foreign error.

One in `make test` and four in `make test-all`, the same ones in every run.
`STOWAX_DIFFERENTIAL=full` takes hundreds, others each time;
`python -m benchmarks differential` takes thousands.
"""

import os

import hypothesis
import pytest
from hypothesis import Phase

from differential.choosers import drawn_by
from differential.judge import FAULTS, judge
from differential.programs import draw

FULL = os.environ.get("STOWAX_DIFFERENTIAL") == "full"


def drawn(programs):
    """A test of so many random steps."""
    settings = hypothesis.settings(
        max_examples=programs,
        derandomize=not FULL,
        database=None,
        phases=[Phase.generate, Phase.shrink] if FULL else [Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: settings(hypothesis.given(pair=drawn_by(draw))(test))


@drawn(1)
def test_a_planned_step_is_the_plain_one(pair):
    verdict = judge(*pair)
    hypothesis.event(verdict.outcome)
    assert verdict.outcome not in FAULTS, f"{verdict.outcome}: {verdict.message}"


@pytest.mark.slow
@drawn(300 if FULL else 4)
def test_planned_steps_are_the_plain_ones(pair):
    verdict = judge(*pair)
    hypothesis.event(verdict.outcome)
    assert verdict.outcome not in FAULTS, f"{verdict.outcome}: {verdict.message}"
