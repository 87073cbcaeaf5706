"""What progress says of a program that was compiled."""

import pytest

from stowax._records._plan import Trial
from stowax._trial._compiled import Measured, outcome

GIB = 2**30


def measured(device, host, *, refused=False, was_kept=False):
    trial = Trial(
        what="plan 1",
        predicted_bytes=device * GIB,
        compiled_bytes=device * GIB,
        host_bytes=host * GIB,
        step_seconds=None if refused else 0.5,
        seconds_to_compile=2.0,
    )
    timeline = type("Timeline", (), {"step_seconds": 0.5})
    inspection = type("Inspection", (), {"timeline": timeline})
    return Measured(
        trial=trial, inspection=None if refused else inspection, was_kept=was_kept
    )


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (
            measured(10, 4),
            "compiled in 2.00 s: 10.0 GiB on the device (fits the budget of 12.0 "
            "GiB), 4.00 GiB on the host, 500.0 ms a step",
        ),
        (
            measured(10, 9, was_kept=True),
            "read from the cache: 10.0 GiB on the device (fits the budget of 12.0 "
            "GiB), 9.00 GiB on the host (does not fit the host budget of 8.00 GiB), "
            "500.0 ms a step",
        ),
        (
            measured(13, 8, refused=True),
            "compiled in 2.00 s: 13.0 GiB on the device (does not fit the budget "
            "of 12.0 GiB), 8.00 GiB on the host",
        ),
    ],
)
def test_the_line_says_what_does_not_fit_and_where(program, line):
    assert outcome(program, 12 * GIB, 8 * GIB) == line
    # Of what a share is to be taken of there is no budget.
    assert "budget of 12.0 GiB" not in outcome(program, None, 8 * GIB)
