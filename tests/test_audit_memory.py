"""Memory that grows: of the process, and of lines, as records and as it is measured."""

import collections
import dataclasses
import linecache
import tracemalloc

import pytest

from stowax._audit import _host_memory
from stowax._audit._find import findings_of
from stowax._records._audit import Event, Grown, Recording, Resident
from stowax._where import Place

STEP = Place("train.py", 7, "main", 1)
MIB = 1 << 20


def recording(sizes, **more):
    """A loop of one call a step, with the process's memory at each."""
    events = [
        Event("call", STEP, "step", 0, at=float(k), bytes=8) for k in range(len(sizes))
    ]
    resident = [Resident(k, size) for k, size in enumerate(sizes)]
    return Recording(events=tuple(events), resident=tuple(resident), **more)


def grows(sizes, **more):
    found = findings_of(recording(sizes, **more)).findings
    assert {f.kind for f in found} <= {"growing-memory"}
    return [(f.file, f.line, f.bytes) for f in found]


def test_a_process_that_grows_in_every_step_is_told_of_at_the_step():
    growing = [100 * MIB + 3 * MIB * k for k in range(12)]
    assert grows(growing) == [("train.py", 7, 3 * MIB)]
    settled = [100 * MIB + 3 * MIB * min(k, 4) for k in range(12)]
    assert grows(settled) == []
    assert grows(growing[:11]) == []  # the beginning of a process grows
    assert grows([0] * 12) == []  # not known on this system
    anew = recording(growing)
    compiled = tuple(event._replace(changed="epoch") for event in anew.events)
    anew = dataclasses.replace(anew, events=compiled)
    # Programs of a loop that compiles in every step are kept, and that is told.
    assert [f.kind for f in findings_of(anew).findings] == ["recompilation"]
    by_turns = [100 * MIB + 6 * MIB * (k % 2) for k in range(12)]
    assert grows(by_turns) == []


def test_lines_that_keep_what_they_allocate_explain_it():
    growing = [100 * MIB + 3 * MIB * k for k in range(12)]
    line = Grown(Place("load.py", 3, "", 0), 2 * MIB)
    assert grows(growing, grown=(line,)) == [("load.py", 3, 2 * MIB)]
    (found,) = findings_of(recording(growing, grown=(line,))).findings
    assert found.what == (
        "2.00 MiB of host memory that this line allocates in a step are kept; the "
        "process grows by 3.00 MiB a step"
    )


@pytest.fixture
def _process(monkeypatch):
    sizes = iter(range(10 * MIB, 1 << 40, MIB))
    monkeypatch.setattr(_host_memory.Statm, "resident_bytes", lambda _: next(sizes))


@pytest.mark.usefixtures("_process")
def test_lines_are_looked_at_for_eight_steps_when_the_process_grows():
    memory = _host_memory.HostMemory()
    kept, passing, looks = [], None, []
    queue = collections.deque(maxlen=6)  # grows for a while, too
    for count in range(1, 40):
        memory.at_call("step", count, leads=True, event=count)
        looks.append(tracemalloc.is_tracing())
        kept.append(bytearray(1 << 16))
        passing = bytearray(1 << 16)
        queue.append(bytearray(1 << 16))
    assert passing
    assert sum(looks) == 8 * 2  # and once again
    memory.end()
    assert not tracemalloc.is_tracing()
    (line,) = {line.place[:2] for line in memory.grown}
    assert "kept.append" in linecache.getline(*line)
    assert all(abs(line.bytes - (1 << 16)) < 4096 for line in memory.grown)


def test_a_process_that_does_not_grow_is_not_slowed_down(monkeypatch):
    monkeypatch.setattr(_host_memory.Statm, "resident_bytes", lambda _: 10 * MIB)
    memory = _host_memory.HostMemory()
    for count in range(1, 20):
        memory.at_call("step", count, leads=True, event=count)
        assert not tracemalloc.is_tracing()
    assert len(memory.resident) == 19
    memory.at_call("eval", 9, leads=False, event=20)
    assert len(memory.resident) == 19


@pytest.mark.usefixtures("_process")
def test_somebody_who_traces_is_left_alone():
    tracemalloc.start()
    try:
        memory = _host_memory.HostMemory()
        for count in range(1, 20):
            memory.at_call("step", count, leads=True, event=count)
        memory.end()
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
