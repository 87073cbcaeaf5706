"""Profiler traces written by hand, in the forms that real TPUs and GPUs give.

A trace is an `XSpace` (`tsl/profiler/protobuf/xplane.proto`); JAX reads its text form.
Times here are microseconds from the start of the trace. What the planes and lines are
called and which statistics stand where: `xplane_schema.cc` and `cupti_collector.cc` of
openxla/xla.
"""

import json

import jax

from stowax._records._program import Computation, Instruction, Program, Transfer

MODULE = "jit_step"


def event(name, start, end, **stats):
    return name, start, end, stats


def trace(planes):
    """`{plane: {line: [event, ...]}}` as a `ProfileData`."""
    return jax.profiler.ProfileData.from_text_proto(trace_text(planes))


def trace_text(planes):
    """The same as the text form of an `XSpace`."""
    return "\n".join(
        _plane(number, *item) for number, item in enumerate(planes.items())
    )


def _plane(number, name, lines):
    events = [e for line in lines.values() for e in line]
    names = {n: i + 1 for i, n in enumerate(dict.fromkeys(e[0] for e in events))}
    stats = {s: i + 1 for i, s in enumerate({key: 0 for e in events for key in e[3]})}
    parts = [f"id: {number} name: {json.dumps(name)}"]
    parts += [
        f"{kind} {{ key: {i} value {{ id: {i} name: {json.dumps(n)} }} }}"
        for kind, table in (("event_metadata", names), ("stat_metadata", stats))
        for n, i in table.items()
    ]
    for place, (line, there) in enumerate(lines.items()):
        written = " ".join(_event(e, names, stats) for e in there)
        parts.append(f"lines {{ id: {place} name: {json.dumps(line)} {written} }}")
    return f"planes {{ {' '.join(parts)} }}"


def _event(found, names, numbers):
    name, start, end, stats = found
    written = " ".join(
        f"stats {{ metadata_id: {numbers[key]} {_value(value)} }}"
        for key, value in stats.items()
    )
    return (
        f"events {{ metadata_id: {names[name]} offset_ps: {round(start * 1e6)} "
        f"duration_ps: {round((end - start) * 1e6)} {written} }}"
    )


def _value(value):
    if isinstance(value, str):
        return f"str_value: {json.dumps(value)}"
    return f"int64_value: {value}"


def instruction(name, opcode="fusion", **fields):
    standard = {
        "wrapped": "",
        "target": "",
        "result_bytes": 100,
        "operands": (),
        "called": (),
        "op_name": name,
        "source": "",
        "estimated_cycles": None,
        "flops": 0.0,
        "dtype": "bfloat16",
        "bytes_accessed": 100,
        "execution_thread": "",
        "trips": None,
    }
    return Instruction(name=name, opcode=opcode, **{**standard, **fields})


def _copy(start, done, direction, computation):
    return Transfer(
        direction=direction,
        bytes=100,
        trips=1,
        asynchronous=start != done,
        start=start,
        done=done,
        computation=computation,
        op_name=f"stowax.{start}",
        source="",
    )


def step_program():
    """A loop that offloads, and after it a fetch, a reduction and a slow write."""
    body = (
        instruction("copy-start.1", "copy-start"),
        instruction("fusion.1"),
        instruction("copy-done.1", "copy-done", operands=("copy-start.1",)),
    )
    entry = (
        instruction("fusion.2"),
        instruction("while.1", "while", called=("body",), trips=2),
        instruction("copy-start.2", "copy-start"),
        instruction("all-reduce-start.1", "all-reduce-start"),
        instruction("fusion.3"),
        instruction(
            "all-reduce-done.1", "all-reduce-done", operands=("all-reduce-start.1",)
        ),
        instruction("copy-done.2", "copy-done", operands=("copy-start.2",)),
        instruction("prefetch-start.1", "copy-start"),
        instruction("prefetch-done.1", "copy-done", operands=("prefetch-start.1",)),
        instruction("fusion.4"),
    )
    computations = {
        name: Computation(
            name=name, instructions=items, execution_thread="", executions=executions
        )
        for name, items, executions in (("body", body, 2), ("main", entry, 1))
    }
    return Program(
        name=MODULE,
        entry="main",
        computations=computations,
        transfers=(
            _copy("copy-start.1", "copy-done.1", "device-to-host", "body"),
            _copy("copy-start.2", "copy-done.2", "host-to-device", "main"),
            _copy("fusion.4", "fusion.4", "device-to-host", "main"),
        ),
        uncounted_loops=(),
    )
