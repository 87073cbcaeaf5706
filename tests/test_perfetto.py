"""The trace file: a thread per lane, loops written out, names escaped, limits said."""

import dataclasses
import json

import pytest

from page_records import MIB, curve_of, found, moment
from stowax._errors import ArgumentError
from stowax._records import _perfetto
from stowax._records._memory import MEMORY_ROLES
from stowax._records._timeline import Interval, Timeline


def timeline(*intervals, origin="simulated"):
    return Timeline(
        origin=origin,
        step_seconds=10.0,
        compute_seconds=8.0,
        exposed_seconds=2.0,
        collective_wait_seconds=0.0,
        device_to_host_seconds=3.0,
        host_to_device_seconds=0.0,
        collective_seconds=0.0,
        intervals=intervals,
        unpriced=(),
    )


def work(name, start, end, **fields):
    return Interval(
        **{"lane": "compute", "name": name, "start": start, "end": end, **fields}
    )


def written(tmp_path, *intervals):
    path = tmp_path / "trace.json"
    timeline(*intervals).to_perfetto(path)
    return json.loads(path.read_text())["traceEvents"]


def complete(events):
    return [event for event in events if event["ph"] == "X"]


def threads(events):
    """Thread number -> its name."""
    return {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }


def test_a_lane_is_a_thread_and_a_loop_is_written_out(tmp_path):
    events = written(
        tmp_path,
        work("product", 0.5, 1.5, count=3, period=2.0),
        work("copy.1", 1.5, 2.5, waits=True),
        work("offload", 0.0, 3.0, lane="device-to-host"),
    )
    names = threads(events)
    assert sorted(names.values()) == ["compute", "device-to-host"]
    found = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in complete(events)]
    # Microseconds; the loop body at 0.5, 2.5 and 4.5 s.
    assert sorted(found) == [
        ("compute", "product", 0.5e6, 1e6),
        ("compute", "product", 2.5e6, 1e6),
        ("compute", "product", 4.5e6, 1e6),
        ("compute", "wait: copy.1", 1.5e6, 1e6),
        ("device-to-host", "offload", 0.0, 3e6),
    ]
    (process,) = [e for e in events if e["name"] == "process_name"]
    assert process["args"]["name"] == "stowax: simulated"
    (wait,) = [e for e in complete(events) if e["args"]["waits"]]
    assert (wait["cat"], wait["cname"]) == ("wait", "terrible")


def test_loops_in_loops_are_where_they_happen():
    inner = work("w", 1.0, 2.0, count=6, period=2.0, around=((3, 10.0),))
    assert list(inner.starts()) == [1, 3, 11, 13, 21, 23]


def test_names_are_whatever_the_program_says(tmp_path):
    name = 'jit(f)/"quoted"\\ </script>\n\N{GREEK SMALL LETTER MU}s\x00'
    (event,) = complete(written(tmp_path, work(name, 0.0, 1.0)))
    assert event["name"] == name


def test_long_loops_are_cut_and_said_so(tmp_path):
    many = 10 * _perfetto.MOST_TIMES
    events = complete(written(tmp_path, work("w", 0.0, 0.1, count=many, period=0.2)))
    assert len(events) == _perfetto.MOST_TIMES
    assert events[-1]["args"]["times"] == many
    assert events[-1]["args"]["written"] == _perfetto.MOST_TIMES


def test_what_overlaps_has_a_track_of_its_own(tmp_path):
    events = written(
        tmp_path,
        work("first", 0.0, 4.0, lane="device-to-host"),
        work("second", 2.0, 6.0, lane="device-to-host"),
        work("third", 4.0, 5.0, lane="device-to-host"),
    )
    assert list(threads(events).values()) == ["device-to-host"] * 2
    tracks = {}
    for event in complete(events):
        tracks.setdefault(event["tid"], []).append(event["name"])
    assert sorted(tracks.values()) == [["first", "third"], ["second"]]


def test_two_timelines_share_one_axis(tmp_path):
    path = tmp_path / "both.json"
    first, second = timeline(work("w", 0.0, 1.0)), timeline(work("w", 0.0, 2.0))
    _perfetto.write({"simulated": first, "measured": second}, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"]: e["dur"] for e in complete(events)} == {1: 1e6, 2: 2e6}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["stowax: simulated", "stowax: measured"]


def test_memory_is_a_counter_of_each_role_beside_the_lanes(tmp_path):
    inspection = found()
    inspection.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert set(threads(events).values()) == {"compute", "device-to-host"}
    counters = [event for event in events if event["ph"] == "C"]
    memory = inspection.memory_timeline
    for kind in ("device", "host"):
        mine = [e for e in counters if e["name"] == f"{kind} memory, bytes"]
        curve = getattr(memory, kind)
        assert max(sum(e["args"].values()) for e in mine) == curve.peak_bytes
        assert [e["ts"] for e in mine] == [m.seconds * 1e6 for m in curve.moments]
        # A role that is never there has no track; all events have the same tracks.
        roles = {role for m in curve.moments for role in by_role(m)}
        assert {tuple(e["args"]) for e in mine} == {tuple(mine[0]["args"])}
        assert set(mine[0]["args"]) == roles
    assert {e["pid"] for e in counters} == {1}


def by_role(moment):
    """The roles that have bytes at a moment."""
    return [r for r, much in zip(MEMORY_ROLES, moment.bytes, strict=True) if much]


def test_of_moments_at_one_time_the_highest_is_written(tmp_path):
    low, high = (moment(1.0, k, workspace=much) for k, much in enumerate((5, 7)))
    curve = curve_of([], [moment(0.0, 0), low, high, moment(1.0, 2, workspace=1)])
    memory = dataclasses.replace(found().memory_timeline, device=curve)
    path = tmp_path / "trace.json"
    _perfetto.write({"simulated": timeline()}, path, memory)
    events = json.loads(path.read_text())["traceEvents"]
    sizes = [e["args"] for e in events if e["name"] == "device memory, bytes"]
    assert sizes == [{"workspace": 0}, {"workspace": 7 * MIB}]


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(ArgumentError) as caught:
        timeline().to_perfetto(tmp_path / "no" / "trace.json")
    assert str(caught.value) == (
        f"path: got '{tmp_path}/no/trace.json', which cannot be written (No such file "
        "or directory). Give a file in a folder that exists and may be written to."
    )


def test_a_timeline_prints_in_a_line():
    shown = repr(timeline(work("w", 0.0, 1.0)))
    assert shown == (
        "<Timeline, simulated: step 10 s, compute 8 s, exposed 2 s, 1 intervals>"
    )
