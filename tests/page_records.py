"""Inspections made by hand for the page: a small one, and one of many places."""

import dataclasses

from report_records import INSPECTION
from stowax._records._memory import (
    MEMORY_ROLES,
    Block,
    Loop,
    MemoryCurve,
    MemoryTimeline,
    Moment,
)
from stowax._records._timeline import Interval

MIB = 2**20
NASTY = "</script><img src=x onerror=\"document.title='broken in'\"><b>"
LAYERS = 4


def block(name, mib, role, first, last, **fields):
    """A place of `mib` MiB, alive from `first` to `last`."""
    return Block(
        **{
            "name": name,
            "bytes": mib * MIB,
            "array_bytes": mib * MIB,
            "shape": f"float32[{mib},1024,256]",
            "role": role,
            "framework_name": f"jit(step)/layers/{name}",
            "source": f"/home/me/model.py:{first + 10}",
            "first": first,
            "last": last,
            **fields,
        }
    )


def moment(seconds, position, empty=0, **fields):
    """A moment with MiB by role."""
    words = {role.replace(" ", "_"): role for role in MEMORY_ROLES}
    sizes = {words[k]: v * MIB for k, v in fields.items() if k in words}
    rest = {k: v for k, v in fields.items() if k not in words}
    return Moment(
        seconds=seconds,
        position=position,
        bytes=tuple(sizes.get(role, 0) for role in MEMORY_ROLES),
        empty=empty * MIB,
        **rest,
    )


def curve_of(blocks, moments):
    """The curve of these, its peak the highest moment."""
    peak = max(moments, key=lambda m: m.total)
    return MemoryCurve(
        peak_bytes=peak.total,
        peak_position=peak.position,
        peak_instruction="fusion.1",
        peak_seconds=peak.seconds,
        blocks=tuple(sorted(blocks, key=lambda b: -b.bytes)),
        moments=tuple(moments),
    )


def found(name="weights"):
    """Six seconds: a loop that fills a stack of four layers, and one that reads it."""
    blocks = (
        block(name, 100, "parameter", 0, 9),
        block(
            "stack", 80, "kept activation", 1, 8, filled_in="forward", emptied_in="back"
        ),
        block("work", 50, "workspace", 3, 4),
        block("more", 60, "workspace", 6, 7),
    )
    moments = [moment(0.0, 0, parameter=100)]
    for k in range(LAYERS):
        at = 1 + k / 2
        shown = {"parameter": 100, "kept_activation": 80, "loop": "forward", "trip": k}
        moments.append(moment(at, 2, 60 - 20 * k, **shown))
        moments.append(moment(at + 0.2, 3, 60 - 20 * k, workspace=50, **shown))
    for k in range(LAYERS):
        at = 3 + k / 2
        shown = {"parameter": 100, "kept_activation": 80, "loop": "back", "trip": k}
        moments.append(moment(at, 5, 20 * k, **shown))
        moments.append(moment(at + 0.2, 6, 20 * k, workspace=60, **shown))
    moments.append(moment(5.5, 9, parameter=100))
    loops = tuple(
        Loop(
            body=body,
            trips=LAYERS,
            first=first,
            last=last,
            framework_name=f"jit(step)/{body}",
            source="/home/me/model.py:7",
        )
        for body, first, last in (("forward", 2, 4), ("back", 5, 7))
    )
    device = curve_of(blocks, moments)
    host = curve_of(
        [block("host", 8, "offloaded", 2, 7)],
        [
            moment(0.0, 0),
            moment(1.0, 2, offloaded=8),
            moment(5.0, 8),
        ],
    )
    intervals = (
        Interval(lane="compute", name=name, start=0.0, end=1.0),
        Interval(lane="compute", name="layer", start=1.0, end=1.4, count=4, period=0.5),
        Interval(lane="compute", name="back", start=3.0, end=3.5, count=4, period=0.5),
        Interval(lane="compute", name="copy-done", start=5.0, end=5.5, waits=True),
        Interval(
            lane="device-to-host", name="copy", start=1.2, end=1.6, count=4, period=0.5
        ),
    )
    timeline = dataclasses.replace(
        INSPECTION.timeline,
        step_seconds=6.0,
        compute_seconds=5.5,
        exposed_seconds=0.5,
        intervals=intervals,
    )
    memory = MemoryTimeline(
        device=device,
        host=host,
        loops=loops,
        peak_bytes=device.peak_bytes,
        compiler_peak_bytes=device.peak_bytes,
    )
    return dataclasses.replace(
        INSPECTION, hazards=(), timeline=timeline, memory_timeline=memory
    )


def large(count):
    """An inspection with `count` places, a moment for each fifth of them."""
    roles = ("kept activation", "gradient", "workspace", "recomputed")
    blocks = [
        dataclasses.replace(
            block(f"fusion.{k}", 1, roles[k % 4], k % 20_000, k % 20_000 + k % 97),
            bytes=1000 + 977 * (k * 7919 % 1009),
            framework_name=f"jit(step)/layers/{k % 2000}/dot_general",
            source=f"/home/me/model.py:{k % 3000}",
        )
        for k in range(count)
    ]
    change = [[0] * len(MEMORY_ROLES) for _ in range(20_100)]
    for b in blocks:
        change[b.first][MEMORY_ROLES.index(b.role)] += b.bytes
        change[b.last + 1][MEMORY_ROLES.index(b.role)] -= b.bytes
    now, moments = [0] * len(MEMORY_ROLES), []
    for position in range(20_000):
        now = [a + b for a, b in zip(now, change[position], strict=True)]
        moments.append(
            Moment(
                seconds=6.0 * position / 20_000,
                position=position,
                bytes=tuple(now),
                empty=0,
            )
        )
    small = found()
    memory = dataclasses.replace(
        small.memory_timeline, device=curve_of(blocks, moments), loops=()
    )
    many = tuple(
        Interval(
            lane="compute" if k % 3 else "device-to-host",
            name=f"fusion.{k}",
            start=k * 6 / 20_000,
            end=k * 6 / 20_000 + 2e-4,
            waits=k % 30 == 1,
        )
        for k in range(20_000)
    )
    timeline = dataclasses.replace(small.timeline, intervals=many)
    return dataclasses.replace(small, memory_timeline=memory, timeline=timeline)
