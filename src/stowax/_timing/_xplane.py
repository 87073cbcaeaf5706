"""What ran on one device, and when, from a profiler's trace.

JAX's profiler writes an `XSpace`: planes (a device, a host), in them lines (a stream, a
kind of event), on them events. `jax.profiler.ProfileData` reads it; what it gives is
looked at here by its attributes alone, so that this module knows no JAX. `executions`
cuts the trace into runs of one program and says what each event was to it: names of
events are names of instructions, and the compiled `Program` knows what those do.

The forms of three backends:

- TPU, plane `/device:TPU:0`: "XLA Modules" has one event per run of a program; on "XLA
  Ops" the instructions follow each other, loops around their bodies, `-done`s as long
  as they wait; "Async XLA Ops" has copies and collectives from start to end.
- GPU, plane `/device:GPU:0`: a line per stream, kernels and copies as they ran, with
  the instruction in the statistic `hlo_op`. Nothing on the device says where a run
  begins (see `_marks` and `_turns`), and waiting is a gap (see `_measured`).
- CPU, plane `/host:CPU`: instructions on the threads that ran them, with `hlo_op`,
  `hlo_module` and `run_id`. The host is the device: no copies, no waiting.

What goes silently wrong: a TPU's plane also has the programs that ran before and after,
such as the copies of arguments, and a GPU's derived lines ("XLA Ops") repeat what its
streams have.
"""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._errors import TraceError
from .._records._program import Program
from ._xplane_roles import Event, Happening, Roles, What, happening

MARK = "stowax.measure"
"""The name under which the host's side of each measured step stands in the trace."""

_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One run of a program on one device.

    `gaps_wait` says that waiting has no events of its own: it is where nothing runs.
    """

    start: float
    end: float
    happenings: tuple[Happening, ...]
    gaps_wait: bool


def executions(profile: Any, program: Program) -> tuple[str, tuple[Execution, ...]]:
    """The runs of `program` in a trace, on the first device that has any.

    **Arguments:** `profile` is a `jax.profiler.ProfileData`.

    **Returns:** the device's name, and its runs in order.

    **Raises:** `TraceError` where the trace has no device, or the program not.
    """
    with warnings.catch_warnings():
        # JAX 0.12: the class of an event's statistics has no module.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = {plane.name: plane for plane in profile.planes}
        devices = sorted(
            (int(found[2]), found[1], name)
            for name in planes
            if (found := _DEVICE.fullmatch(name))
        )
        roles = Roles(program)
        for _, kind, name in devices:
            if kind == "TPU":
                runs = _of_tpu(planes[name], roles)
            else:
                runs = _of_gpu(planes[name], roles, _marks(planes))
            if runs:
                return name, runs
        host = planes.get("/host:CPU")
        if not devices and host is not None and (runs := _of_cpu(host, roles)):
            return "/host:CPU", runs
        lanes = [name for _, _, name in devices]
        if not lanes and host is not None and _has_lanes(host):
            lanes = ["/host:CPU"]
    if lanes:
        raise TraceError(
            f"trace: the program {program.name} did not run on {', '.join(lanes)} "
            "while it was recorded. Record at least one whole step of the same jitted "
            "function."
        )
    raise TraceError(
        f"trace: it has no lanes of a device, only {', '.join(planes) or 'nothing'}. "
        "Record it with jax.profiler.trace in the process that runs the step, on a "
        "TPU, a GPU, or the CPU's default runtime."
    )


def _marks(planes: Mapping[str, Any]) -> list[tuple[float, float]]:
    """From when to when the host ran each step, where `measure` has marked that."""
    lines = planes["/host:CPU"].lines if "/host:CPU" in planes else ()
    return sorted(
        (event.start_ns / 1e9, event.end_ns / 1e9)
        for line in lines
        for event in line.events
        if event.name == MARK
    )


def _events(line: Any) -> Iterator[Event]:
    for event in line.events:
        stats = dict(event.stats)
        shown = event.name
        name = str(stats.get("hlo_op") or shown.removeprefix("%").split(" ")[0])
        yield Event(name, shown, event.start_ns / 1e9, event.end_ns / 1e9, stats)


# --- TPU ------------------------------------------------------------------------------


def _of_tpu(plane: Any, roles: Roles) -> tuple[Execution, ...]:
    lines = {line.name: line for line in plane.lines}
    if not {"XLA Modules", "XLA Ops"} <= lines.keys():
        return ()
    program = re.compile(re.escape(roles.program.name) + r"(\(.*\))?$")
    windows = [
        (event.start, event.end)
        for event in _events(lines["XLA Modules"])
        if program.match(event.shown)
    ]
    ops = [*_leaves(_events(lines["XLA Ops"]), roles)]
    beside = [*_events(lines["Async XLA Ops"])] if "Async XLA Ops" in lines else None
    found = [*_tpu_ops(ops, roles, beside is None), *_tpu_beside(beside or (), roles)]
    for name in ("Host Offload Ops",):
        if name in lines:
            found += [happening("host", event, roles) for event in _events(lines[name])]
    return tuple(
        Execution(
            start=start,
            end=end,
            happenings=tuple(h for h in found if start <= h.start < end),
            gaps_wait=False,
        )
        for start, end in sorted(windows)
    )


def _tpu_ops(ops: Iterable[Event], roles: Roles, alone: bool) -> Iterator[Happening]:
    """What the core itself did. `alone`: no line says what ran beside it."""
    started: dict[str, float] = {}
    for event in ops:
        wait = roles.dones.get(event.name)
        yield happening(wait or "compute", event, roles)
        lane = roles.lanes.get(event.name)
        if lane and wait:
            yield happening(lane, event, roles)  # it is done where it stands
        elif lane:
            started[event.name] = event.start
        elif wait and alone:
            start = roles.starts.get(event.name, "")
            if start in started and start in roles.lanes:
                whole = dataclasses.replace(event, name=start, start=started.pop(start))
                yield happening(roles.lanes[start], whole, roles)


def _tpu_beside(events: Iterable[Event], roles: Roles) -> Iterator[Happening]:
    """Copies and collectives from start to end.

    An event spans all of it, under the name of its start; or there are two events, and
    that of the end closes what the other began.
    """
    begun: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: event.start):
        start = roles.starts.get(event.name, event.name)
        lane = roles.lanes.get(start)
        if not lane:  # a copy between the chip's own memories
            continue
        if start != event.name and start in begun:
            event = dataclasses.replace(event, name=start, start=begun.pop(start).start)
        elif start == event.name:
            if start in begun:
                yield happening(lane, begun[start], roles)
            begun[start] = event
            continue
        yield happening(lane, event, roles)
    for start, event in begun.items():
        yield happening(roles.lanes[start], event, roles)


# --- GPU ------------------------------------------------------------------------------

_GRAPH = "command_buffer"
"""How XLA names what it runs as a CUDA graph; its kernels name no instruction."""
_MEMCPY: Mapping[str, What] = {
    "MemcpyD2H": "device-to-host",
    "MemcpyH2D": "host-to-device",
}


def _of_gpu(
    plane: Any, roles: Roles, marks: Sequence[tuple[float, float]]
) -> tuple[Execution, ...]:
    events = sorted(
        (
            event
            for line in plane.lines
            if line.name.startswith("Stream #")
            for event in _events(line)
        ),
        key=lambda event: event.start,
    )
    ours = [event for event in events if roles.has_run(event)]
    turns = _turns(ours, roles)
    if marks:
        turns = [[e for e in ours if a <= e.start <= b] for a, b in marks]
    runs: list[Execution] = []
    for turn in filter(None, turns):
        start, end = turn[0].start, max(event.end for event in turn)
        happenings = [
            found
            for event in events
            if start <= event.start < end
            for found in _gpu_event(event, roles)
        ]
        runs.append(
            Execution(
                start=start, end=end, happenings=tuple(happenings), gaps_wait=True
            )
        )
    return tuple(runs)


def _turns(events: list[Event], roles: Roles) -> list[list[Event]]:
    """The events of each run: it begins with what was launched first.

    An instruction outside of loops is launched once per run, or a fixed number of
    times, as several kernels. So the rarest one counts the runs. What a CUDA graph runs
    is one launch, under the name of a command buffer, and may be a branch's: graphs
    count runs only where there is nothing else. What comes first of all that is
    launched in equal numbers in all runs begins them.
    """
    seen: dict[str, list[int]] = {}
    graphs: dict[str, dict[Any, int]] = {}
    for place, event in enumerate(events):
        if event.name.startswith(_GRAPH):
            launch = event.stats.get("correlation_id", place)
            graphs.setdefault(event.name, {}).setdefault(launch, place)
        elif event.name in roles.entry and not roles.is_loop(event.name):
            seen.setdefault(event.name, []).append(place)
    launched = [[*launches.values()] for launches in graphs.values()]
    if not (counting := [*seen.values()] or launched):
        return [events] if events else []
    count = min(map(len, counting))
    regular = [p for p in (*seen.values(), *launched) if len(p) % count == 0]
    first = min(regular, key=lambda places: places[0])
    begins = first[:: len(first) // count]
    ends = [*begins[1:], len(events)]
    return [events[a:b] for a, b in zip(begins, ends, strict=True)]


def _gpu_event(event: Event, roles: Roles) -> Iterator[Happening]:
    lane = roles.lanes.get(event.name)
    copied = _MEMCPY.get(event.shown.split(" ")[0])
    if lane == "collective" or "nccl" in event.shown.lower():
        yield happening("collective", event, roles)
    elif copied:
        yield happening(copied, event, roles)
    elif lane in ("device-to-host", "host-to-device"):
        # A kernel that works on host memory: beside the others, or in their place.
        yield happening(lane, event, roles)
        if wait := roles.dones.get(event.name):
            yield happening(wait, event, roles)
    else:
        yield happening("compute", event, roles)


# --- CPU ------------------------------------------------------------------------------


def _of_cpu(plane: Any, roles: Roles) -> tuple[Execution, ...]:
    events = [
        event
        for line in plane.lines
        for event in _events(line)
        if "hlo_op" in event.stats and roles.has_run(event)
    ]
    first = min((str(e.stats.get("device_ordinal")) for e in events), default="")
    runs: dict[Any, list[Event]] = {}
    for event in events:
        if str(event.stats.get("device_ordinal")) == first:
            runs.setdefault(event.stats.get("run_id"), []).append(event)
    found = [
        Execution(
            start=min(event.start for event in run),
            end=max(event.end for event in run),
            happenings=tuple(
                found
                for event in _leaves(run, roles)
                for found in _cpu_event(event, roles)
            ),
            gaps_wait=False,
        )
        for run in runs.values()
    ]
    return tuple(sorted(found, key=lambda run: run.start))


def _has_lanes(plane: Any) -> bool:
    """Whether any program ran on the CPU while it was recorded."""
    return any("hlo_op" in e.stats for line in plane.lines for e in _events(line))


def _cpu_event(event: Event, roles: Roles) -> Iterator[Happening]:
    if roles.lanes.get(event.name) == "collective":
        yield happening("collective", event, roles)
        yield happening("wait for devices", event, roles)
    else:
        yield happening("compute", event, roles)


def _leaves(events: Iterable[Event], roles: Roles) -> Iterator[Event]:
    """Without the loops, whose bodies have events of their own."""
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    for event, following in zip(ordered, [*ordered[1:], None], strict=True):
        inside = following is not None and following.start < event.end
        if not (inside and roles.is_loop(event.name)):
            yield event
