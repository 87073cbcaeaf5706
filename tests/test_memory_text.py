"""The memory curve in characters: what stands where, and nothing too wide."""

import pytest

from stowax._records._memory import (
    MEMORY_ROLES,
    Block,
    Loop,
    MemoryCurve,
    MemoryTimeline,
    Moment,
)
from stowax.report._memory_text import memory_text

GIB = 2**30


def moment(seconds, empty=0, loop="", trip=0, **by_role):
    bytes_ = tuple(by_role.get(role.replace(" ", "_"), 0) for role in MEMORY_ROLES)
    return Moment(
        seconds=seconds, position=0, bytes=bytes_, empty=empty, loop=loop, trip=trip
    )


def hump():
    """Four trips in which a stack of 4 GiB fills, four in which it empties."""
    full = {"parameter": GIB, "kept_activation": 4 * GIB}
    forward = [moment(k, (3 - k) * GIB, "f", k, **full) for k in range(4)]
    backward = [moment(4 + k, k * GIB, "b", k, **full) for k in range(4)]
    return (*forward, *backward, moment(8, parameter=GIB))


def memory(moments):
    block = Block(
        name="fusion.1",
        bytes=4 * GIB,
        array_bytes=3 * GIB,
        shape="bfloat16[4,1024]",
        role="kept activation",
        framework_name="jit(step)/jvp()/while/body/tanh",
        source="/home/me/model.py:12",
        first=0,
        last=0,
        filled_in="f",
        emptied_in="b",
    )
    curve = MemoryCurve(
        peak_bytes=max(m.total for m in moments),
        peak_position=0,
        peak_instruction="fusion.1",
        peak_seconds=3.0,
        blocks=(block,),
        moments=moments,
    )
    loops = tuple(
        Loop(body=name, trips=4, first=0, last=0, framework_name="", source="")
        for name in "fb"
    )
    return MemoryTimeline(
        device=curve, host=curve, loops=loops, peak_bytes=0, compiler_peak_bytes=0
    )


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_hump_of_a_stack_is_seen(width):
    lines = memory_text(memory(hump()), width)
    assert lines[0] == "Device memory over the step, peak 5.00 GiB at 3.00 s"
    assert max(map(len, lines)) <= width
    curve = [line for line in lines if "┤" in line and "×" not in line]
    # Filled from the left in the forward loop, to the right in the backward one.
    filled = [row.count("▓") for row in curve]
    assert filled[0] < filled[3] < filled[6]
    assert curve[0].count("·") > curve[5].count("·")
    assert set(curve[-1].split("┤")[1]) == {"█"}  # the parameters, all the time
    marks = next(line for line in lines if "4 ×" in line)
    assert marks.count("4 ×") == 2


def test_the_largest_places_say_what_they_are():
    text = "\n".join(memory_text(memory(hump()), 100))
    assert "at the peak  kept activation 4.00 GiB" in text
    assert "4.00 GiB  1.00 GiB  kept activation  model.py:12  tanh" in text
    assert "· reserved, nothing in it" in text


def test_a_program_without_memory_has_no_curve():
    assert memory_text(memory((moment(0.0),)), 80) == []
