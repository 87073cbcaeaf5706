"""The seconds of the model: windows for copies to hide in, and what the rest costs.

Called by `_model` for each body. The link has two directions, which run side by side;
each has a row per phase, and the seconds by which the busier one outlasts the device's
work are a column of their own.
"""

from collections.abc import Mapping

from .._records._stages import Body, HostUpdate, Passage, Problem
from ._builder import Builder, Columns
from ._tables import BodyTable

TIE_MOVED = 1e-6
TIE_KEPT = 1e-8

WINDOW = "window"
"""What is in the names of rows that limit copies, and of no others."""


def add_seconds(
    builder: Builder,
    problem: Problem,
    table: BodyTable,
    columns: Columns,
    passing: Mapping[int, Passage],
    scale: float,
) -> None:
    """Window rows of one body, and its part of the objective.

    `passing` are columns of state that passes through the body.
    """
    body, link = table.body, problem.link
    pipelined = problem.prefetch_depth > 1
    out = {c: table.bytes[i] / link.device_to_host for i, c in columns.offload.items()}
    back = {c: table.bytes[i] / link.host_to_device for i, c in columns.offload.items()}
    rerun: dict[int, float] = {}
    for f, c in columns.run.items():
        rerun[c] = rerun.get(c, 0.0) + body.operations[f].seconds
    for c, seconds in rerun.items():
        builder.cost[c] += body.count * seconds / scale
    for columns_of, spent in (
        (columns.keep, [v.keep_seconds for v in body.values]),
        (columns.offload, [v.offload_seconds for v in body.values]),
    ):
        for i, c in columns_of.items():
            builder.cost[c] += body.count * spent[i] / scale
    if body.phase == "update":
        _update_window(builder, problem, body, columns, scale)
        return _ties(builder, problem, table, columns)
    exposed_runs = (body is problem.bodies[-1]) if pipelined else body.count
    for c in columns.offload.values():
        first = back[c] if pipelined else out[c] + back[c]
        builder.cost[c] += exposed_runs * first / scale
    for c in (columns.late_forward, columns.late_backward):
        builder.cost[c] += body.count / scale
        if not (pipelined and (columns.offload or passing)):
            builder.upper[c] = 0.0
    if pipelined:
        forward, backward = _directions(problem, (out, back), passing)
        unit = scale / body.count

        def window(
            busy: dict[int, float], late: int, seconds: float, name: str
        ) -> None:
            row = {c: much / unit for c, much in busy.items()}
            if late == columns.late_backward:
                row |= {c: -much / unit for c, much in rerun.items()}
            builder.row(row | {late: -1.0 / unit}, seconds / unit, name)

        for busy in filter(None, forward):
            name = f"forward {WINDOW} of {body.name}"
            window(busy, columns.late_forward, body.forward_seconds, name)
        for busy in filter(None, backward):
            name = f"backward {WINDOW} of {body.name}"
            window(busy, columns.late_backward, body.backward_seconds, name)
    else:
        for c, passage in passing.items():
            busy = _directions(problem, ({}, {}), {c: passage})
            seconds = sum(sum(way.values()) for pair in busy for way in pair)
            builder.cost[c] += body.count * seconds / scale
    _ties(builder, problem, table, columns)


def passing_columns(
    body_tables: tuple[BodyTable, ...], columns: list[Columns]
) -> dict[str, dict[int, Passage]]:
    """By body, the columns of state that passes through it if it is offloaded."""
    found: dict[str, dict[int, Passage]] = {}
    for table, c in zip(body_tables, columns, strict=True):
        for i, column in c.offload.items():
            for passage in table.body.values[i].passages:
                found.setdefault(passage.body, {})[column] = passage
    return found


Busy = dict[int, float]
"""Seconds of the link by column."""


def _directions(
    problem: Problem, offloads: tuple[Busy, Busy], passing: Mapping[int, Passage]
) -> tuple[tuple[Busy, Busy], tuple[Busy, Busy]]:
    """What keeps the link busy forward (out, in) and backward (in, out)."""
    out, back = offloads
    leaving, coming = problem.link.device_to_host, problem.link.host_to_device
    into = {c: p.forward_in / coming for c, p in passing.items()}
    again = back | {c: p.backward_in / coming for c, p in passing.items()}
    gone = {c: p.backward_out / leaving for c, p in passing.items()}
    return (out, into), (again, gone)


def _update_window(
    builder: Builder,
    problem: Problem,
    body: Body,
    columns: Columns,
    scale: float,
) -> None:
    """The update waits for the busier direction of the link, and for the host."""
    link, values = problem.link, body.values
    parts = _host_columns(builder, body, columns, scale)
    ways = (
        {
            c: values[i].update_out / link.device_to_host
            for i, c in columns.offload.items()
        }
        | {c: -part.update_out / link.device_to_host for c, part in parts.items()},
        {
            c: values[i].update_in / link.host_to_device
            for i, c in columns.offload.items()
        }
        | {c: -part.update_in / link.host_to_device for c, part in parts.items()},
    )
    builder.upper[columns.late_forward] = 0.0
    builder.cost[columns.late_backward] += 1 / scale
    for direction, seconds in zip(("out", "in"), ways, strict=True):
        if seconds:
            row = {c: much / scale for c, much in seconds.items()}
            row[columns.late_backward] = -1.0 / scale
            limit = body.backward_seconds / scale
            builder.row(row, limit, f"update's {WINDOW} for copies {direction}")


def _host_columns(
    builder: Builder, body: Body, columns: Columns, scale: float
) -> dict[int, HostUpdate]:
    """A column per part that the host may update: 1 if all its values are offloaded."""
    found = {}
    for part in body.host_updates:
        if not columns.offload.keys() >= {*part.values}:
            continue  # a pin keeps some of it on the device
        column = builder.column(integral=False)
        found[column] = part
        moved = [columns.offload[i] for i in part.values]
        for c in moved:
            builder.row({column: 1.0, c: -1.0}, 0.0)
        builder.row({column: -1.0, **dict.fromkeys(moved, 1.0)}, len(moved) - 1.0)
        builder.cost[column] += part.seconds / scale
    return found


def _ties(
    builder: Builder, problem: Problem, table: BodyTable, columns: Columns
) -> None:
    """The parts of the objective that decide between plans of equal speed."""
    body = table.body
    stacks = sum(t.count * sum(v.bytes for v in t.values) for t in problem.bodies) or 1
    for which, tie in ((columns.offload, TIE_MOVED), (columns.keep, TIE_KEPT)):
        for i, c in which.items():
            builder.cost[c] += tie * body.count * table.bytes[i] / stacks
