"""Two timelines side by side: lane by lane, at both ends of a terminal's width."""

import pytest

from stowax._records._timeline import Interval, Timeline
from stowax.report import comparison_text

LANES = ("compute_seconds", "exposed_seconds", "collective_wait_seconds")
BUSY = ("device_to_host_seconds", "host_to_device_seconds", "collective_seconds")


def timeline(origin, lanes, busy=(0.0, 0.0, 0.0), idle=0.0, intervals=(), notes=()):
    return Timeline(
        origin=origin,
        step_seconds=sum(lanes) + idle,
        idle_seconds=idle,
        **dict(zip(LANES + BUSY, (*lanes, *busy), strict=True)),
        intervals=tuple(intervals),
        unpriced=(),
        assumptions=notes,
    )


def work(name, seconds, count=1, waits=False):
    return Interval(
        lane="compute", name=name, start=0.0, end=seconds, count=count, waits=waits
    )


NAME = "a_kernel_with_a_name_that_is_longer_than_any_terminal_could_ever_be_" * 3
SIMULATED = timeline(
    "simulated",
    (4.0, 0.5, 0.0),
    (2.0, 1.0, 0.0),
    intervals=[work("fusion.1", 0.1, 40), work("copy-done.1", 0.5, waits=True)],
    notes=("link 15 GB/s out, 15 GB/s in, both directions at once",),
)
MEASURED = timeline(
    "measured",
    (5.0, 0.25, 0.0),
    (1.0, 1.0, 0.0),
    idle=0.75,
    intervals=[
        *[work("fusion.1", 0.12)] * 40,
        work("copy-done.1", 0.25, waits=True),
        work(NAME, 0.2),
    ],
    notes=("/device:TPU:0, the median of 3 steps in the trace, 5.9 s to 6.1 s",),
)


def test_lane_by_lane():
    assert (
        comparison_text(SIMULATED, MEASURED, 80)
        == """\
                        simulated  measured  ratio
step                       4.50 s    6.00 s   1.33
  computing                4.00 s    5.00 s   1.25
  waiting for the host   500.0 ms  250.0 ms   0.50
  idle                          –  750.0 ms      –
device to host, busy       2.00 s    1.00 s   0.50
host to device, busy       1.00 s    1.00 s   1.00

differ most                                     simulated  measured  ratio
fusion.1                                           4.00 s    4.80 s   1.20
copy-done.1, waiting                             500.0 ms  250.0 ms   0.50
a_kernel_with_a_name_that_is_longer_than_any_…          –  200.0 ms      –

simulated  link 15 GB/s out, 15 GB/s in, both directions at once
measured   /device:TPU:0, the median of 3 steps in the trace, 5.9 s to 6.1 s"""
    )


@pytest.mark.parametrize("width", [60, 80, 160])
def test_within_the_width(width):
    lines = comparison_text(SIMULATED, MEASURED, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.endswith("0.50") for line in lines)


def test_two_of_one_kind_are_told_apart():
    lines = comparison_text(MEASURED, MEASURED, 80).splitlines()
    assert lines[0].split() == ["first", "measured", "second", "measured", "ratio"]
    assert not any("differ most" in line for line in lines)
