"""The planning model as a mixed-integer linear program: rows, columns and their names.

`_solve` calls `build` and hands the result to HiGHS. The size depends on the bodies,
never on how often they run.

Columns, per body, binary: s_i kept, o_i offloaded, z_f operation f run again, q_i value
i recomputed (only for operations with several outputs; with one output q_i is z_f);
continuous: the seconds by which copies outlast the forward run (x) and the backward run
(y). With s and o integer, the least z and q that satisfy the rows are the minimal
closure, and no term of the objective or of a memory row gets better with a larger z or
q. (The backward window would: running again makes room to hide a copy in. But waiting
costs the same there, second for second, so it never pays.) So z and q could be
continuous; declared binary, HiGHS branches on them and needs half the time or less.

Rows, all as `A x <= b`:

    q_i + s_i + o_i >= 1                     i needed
    q_i + s_i + o_i >= z_f                   every input i of f
    z_f >= q_i                               i an output of f, of several
    o_j + s_i <= 1                           pairs of `_presolve`'s reduction 5
    x >= D / device_to_host - C_f            y + R >= (D + P) / host_to_device - C_b
    x >= P / host_to_device - C_f            y + R >= G / device_to_host - C_b
    y >= U / either - C_b                    of the update, which has no x
    h <= o_i, h >= sum o_i - (n - 1)         h: the host updates these n values; their
                                             bytes are not in U, H is in the objective
    device memory at the loss, and at each point of each body; host memory

Objective: seconds of the step (recomputing, storing, waiting) in units of the step
without recomputation, plus ties: the least bytes moved, then the least bytes kept,
weighted far below the solver's gap. A constant column carries the unavoidable seconds,
so that the solver's relative gap is relative to the step and not to the overhead.

What goes silently wrong: scaling. HiGHS holds rows to 1e-6 in its own units, so rows of
bytes are in units of the budget, and what it returns is always priced again in bytes.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .._records._stages import Passage, Problem
from ._builder import Builder, Columns
from ._presolve import Reduced, reduce_body
from ._tables import BodyTable, base_seconds
from ._windows import add_seconds, passing_columns

if TYPE_CHECKING:
    import scipy.sparse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`minimise cost @ x` with `matrix @ x <= limit`, `0 <= x <= upper`.

    `keep[body][value]` and `offload[body][value]` are columns. `names` has one entry
    per row, empty for the closure's. Device rows have the limit `(budget - reserved) /
    device_scale`. Costs are in units of `seconds_scale` seconds.
    """

    cost: np.ndarray
    matrix: "scipy.sparse.csr_array"
    limit: np.ndarray
    upper: np.ndarray
    integral: np.ndarray
    names: tuple[str, ...]
    device_rows: np.ndarray
    host_row: int
    keep: tuple[dict[int, int], ...]
    offload: tuple[dict[int, int], ...]
    device_scale: float
    host_scale: float
    seconds_scale: float


def build(problem: Problem, body_tables: tuple[BodyTable, ...]) -> Model:
    """The program that minimises the seconds of `problem` within both memories.

    **Arguments:** `body_tables` from `tables(problem)`.
    """
    builder = Builder()
    reduced = [reduce_body(table) for table in body_tables]
    columns = [_body_columns(builder, r) for r in reduced]
    for r, c in zip(reduced, columns, strict=True):
        _closure_rows(builder, r, c)
    base = base_seconds(problem)
    every = base + sum(
        t.body.count * sum(t.body.operations[f].seconds for f in r.operations)
        for t, r in zip(body_tables, reduced, strict=True)
    )
    seconds_scale = base or every or 1.0
    constant = builder.column(integral=False)
    builder.row({constant: -1.0}, -1.0)
    builder.cost[constant] = base / seconds_scale
    passing = passing_columns(body_tables, columns)
    for table, c in zip(body_tables, columns, strict=True):
        mine = passing.get(table.body.name, {})
        add_seconds(builder, problem, table, c, mine, seconds_scale)
    device_scale, device_rows = _device_rows(
        builder, problem, body_tables, reduced, columns, passing
    )
    host_scale, host_row = _host_row(builder, problem, body_tables, columns)
    return Model(
        cost=np.array(builder.cost),
        matrix=builder.matrix(),
        limit=np.array(builder.limit),
        upper=np.array(builder.upper),
        integral=np.array(builder.integral),
        names=tuple(builder.names),
        device_rows=np.array(device_rows, dtype=np.int64),
        host_row=host_row,
        keep=tuple(c.keep for c in columns),
        offload=tuple(c.offload for c in columns),
        device_scale=device_scale,
        host_scale=host_scale,
        seconds_scale=seconds_scale,
    )


def _body_columns(builder: Builder, reduced: Reduced) -> Columns:
    keep = {i: builder.column() for i in reduced.keep}
    offload = {i: builder.column() for i in reduced.offload}
    run: dict[int, int] = {}
    for f in reversed(reduced.operations):
        leader = reduced.leader[f]
        run[f] = run[leader] if leader != f else builder.column()
    again = {}
    for f in reduced.operations:
        made = reduced.outputs[f]
        for i in made:
            again[i] = run[f] if len(made) == 1 else builder.column()
    return Columns(
        keep=keep,
        offload=offload,
        again=again,
        run=run,
        late_forward=builder.column(upper=np.inf, integral=False),
        late_backward=builder.column(upper=np.inf, integral=False),
    )


def _closure_rows(builder: Builder, reduced: Reduced, columns: Columns) -> None:
    def ways(i: int) -> list[int]:
        each = (columns.again, columns.keep, columns.offload)
        return [which[i] for which in each if i in which]

    for i in reduced.obtain:
        builder.cover(ways(i), None)
    for f in reduced.operations:
        for i in reduced.inputs[f]:
            builder.cover(ways(i), columns.run[f])
        for i in reduced.outputs[f]:
            builder.cover([columns.run[f]], columns.again[i])
    for i, j in reduced.swaps:
        builder.row({columns.keep[i]: 1.0, columns.offload[j]: 1.0}, 1.0)


def _device_rows(
    builder: Builder,
    problem: Problem,
    body_tables: tuple[BodyTable, ...],
    reduced: list[Reduced],
    columns: list[Columns],
    passing: Mapping[str, Mapping[int, Passage]],
) -> tuple[float, list[int]]:
    """One row per moment that can be the peak; see `_evaluate._device_bytes`."""
    stacks: dict[int, float] = {}
    moments: list[tuple[dict[int, float], float, str]] = []
    for table, r, c in zip(body_tables, reduced, columns, strict=True):
        update = table.body.phase == "update"
        early = 0 if update else problem.prefetch_depth - 1
        late = min(early, 1)
        before = dict(stacks)
        stacks |= {k: table.kept[i] for i, k in c.keep.items()}
        stacks |= {k: table.offloaded[i] for i, k in c.offload.items()}
        staged = {k: early * table.bytes[i] for i, k in c.offload.items()}
        streams = passing.get(table.body.name, {})
        staged |= {k: float(passage.in_flight) for k, passage in streams.items()}
        for p in r.points:
            terms = {
                k: stacks.get(k, 0.0) + staged.get(k, 0.0) for k in {**stacks, **staged}
            }
            for i in table.live[[p]].indices:
                for which in (c.offload, c.again):
                    if i in which:
                        k = which[i]
                        terms[k] = terms.get(k, 0.0) + table.bytes[i]
            name = f"device memory in the backward pass of {table.body.name}"
            name = "device memory at the update" if update else name
            moments.append((terms, float(table.reserved[p]), name))
        stacks |= {
            k: late * table.bytes[i] + table.offloaded[i] for i, k in c.offload.items()
        }
        if table.body.group:  # stored for its own backward pass only
            stacks = before
    loss = float(problem.loss_reserved_bytes)
    moments.append((stacks, loss, "device memory at the loss"))
    largest = max(reserved + sum(terms.values()) for terms, reserved, _ in moments)
    scale = max(float(problem.device_bytes), largest * 1e-2, 1.0)
    rows = [
        builder.row(
            {k: v / scale for k, v in terms.items()},
            (problem.device_bytes - reserved) / scale,
            name,
        )
        for terms, reserved, name in moments
    ]
    return scale, rows


def _host_row(
    builder: Builder,
    problem: Problem,
    body_tables: tuple[BodyTable, ...],
    columns: list[Columns],
) -> tuple[float, int]:
    terms = {
        k: table.body.count * table.bytes[i]
        for table, c in zip(body_tables, columns, strict=True)
        for i, k in c.offload.items()
    }
    scale = max(float(problem.host_bytes), sum(terms.values()) * 1e-2, 1.0)
    scaled = {k: v / scale for k, v in terms.items()}
    return scale, builder.row(scaled, problem.host_bytes / scale, "host memory")
