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
    x >= D / device_to_host - C_f            y + R >= D / host_to_device - C_b
    y >= D / either - C_b                    of the update, which has no x
    device memory at the loss, and at each point of each body; host memory

Objective: seconds of the step (recomputing, storing, waiting) in units of the step
without recomputation, plus ties: the least bytes moved, then the least bytes kept,
weighted far below the solver's gap. A constant column carries the unavoidable seconds,
so that the solver's relative gap is relative to the step and not to the overhead.

What goes silently wrong: scaling. HiGHS holds rows to 1e-6 in its own units, so rows of
bytes are in units of the budget, and what it returns is always priced again in bytes.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .._stages import Body, Problem
from ._presolve import Reduced, reduce_body
from ._tables import BodyTable, base_seconds

if TYPE_CHECKING:
    import scipy.sparse

TIE_MOVED = 1e-6
TIE_KEPT = 1e-8


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


class _Builder:
    """Collects columns and rows; equal rows of the closure are written once."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.rows: list[dict[int, float]] = []
        self.limit: list[float] = []
        self.names: list[str] = []
        self._seen: set[tuple] = set()

    def column(self, *, upper: float = 1.0, integral: bool = True) -> int:
        self.cost.append(0.0)
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], limit: float, name: str = "") -> int:
        self.rows.append(terms)
        self.limit.append(limit)
        self.names.append(name)
        return len(self.rows) - 1

    def cover(self, columns: list[int], needed_by: int | None) -> None:
        """The sum of `columns` is at least 1, or at least column `needed_by`."""
        if needed_by in columns:
            return
        key = (needed_by, *sorted(columns))
        if key in self._seen:
            return
        self._seen.add(key)
        terms = dict.fromkeys(columns, -1.0)
        if needed_by is None:
            self.row(terms, -1.0)
        else:
            self.row(terms | {needed_by: 1.0}, 0.0)

    def matrix(self) -> "scipy.sparse.csr_array":
        import scipy.sparse

        triples = [
            (r, c, v) for r, row in enumerate(self.rows) for c, v in row.items() if v
        ]
        rows, columns, data = zip(*triples, strict=True) if triples else ((), (), ())
        return scipy.sparse.csr_array(
            (data, (rows, columns)), shape=(len(self.rows), len(self.cost))
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The columns of one body: per value keep, offload, recomputed; per operation z."""

    keep: dict[int, int]
    offload: dict[int, int]
    again: dict[int, int]
    run: dict[int, int]
    late_forward: int
    late_backward: int


def build(problem: Problem, body_tables: tuple[BodyTable, ...]) -> Model:
    """The program that minimises the seconds of `problem` within both memories.

    **Arguments:** `body_tables` from `tables(problem)`.
    """
    builder = _Builder()
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
    for table, c in zip(body_tables, columns, strict=True):
        _seconds(builder, problem, table, c, seconds_scale)
    device_scale, device_rows = _device_rows(
        builder, problem, body_tables, reduced, columns
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


def _body_columns(builder: _Builder, reduced: Reduced) -> _Columns:
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
    return _Columns(
        keep=keep,
        offload=offload,
        again=again,
        run=run,
        late_forward=builder.column(upper=np.inf, integral=False),
        late_backward=builder.column(upper=np.inf, integral=False),
    )


def _closure_rows(builder: _Builder, reduced: Reduced, columns: _Columns) -> None:
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


def _seconds(
    builder: _Builder,
    problem: Problem,
    table: BodyTable,
    columns: _Columns,
    scale: float,
) -> None:
    """Window rows of one body, and its part of the objective."""
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
        _update_window(builder, body, columns, (out, back), scale)
        return _ties(builder, problem, table, columns)
    exposed_runs = (body is problem.bodies[-1]) if pipelined else body.count
    for c in columns.offload.values():
        first = back[c] if pipelined else out[c] + back[c]
        builder.cost[c] += exposed_runs * first / scale
    for c in (columns.late_forward, columns.late_backward):
        builder.cost[c] += body.count / scale
        if not (pipelined and columns.offload):
            builder.upper[c] = 0.0
    if pipelined and columns.offload:
        unit = scale / body.count
        forward = {c: seconds / unit for c, seconds in out.items()}
        forward[columns.late_forward] = -1.0 / unit
        builder.row(
            forward, body.forward_seconds / unit, f"forward window of {body.name}"
        )
        backward = {c: seconds / unit for c, seconds in back.items()}
        backward |= {c: -seconds / unit for c, seconds in rerun.items()}
        backward[columns.late_backward] = -1.0 / unit
        builder.row(
            backward, body.backward_seconds / unit, f"backward window of {body.name}"
        )
    _ties(builder, problem, table, columns)


def _update_window(
    builder: _Builder,
    body: Body,
    columns: _Columns,
    ways: tuple[dict[int, float], ...],
    scale: float,
) -> None:
    """The update waits for the busier direction of the link; the two run side by side.

    `ways` has the seconds that each column's copy takes out and back.
    """
    builder.upper[columns.late_forward] = 0.0
    builder.cost[columns.late_backward] += 1 / scale
    for direction, seconds in zip(("out", "in"), ways, strict=True):
        if seconds:
            row = {c: much / scale for c, much in seconds.items()}
            row[columns.late_backward] = -1.0 / scale
            limit = body.backward_seconds / scale
            builder.row(row, limit, f"update's window for copies {direction}")


def _ties(
    builder: _Builder, problem: Problem, table: BodyTable, columns: _Columns
) -> None:
    """The parts of the objective that decide between plans of equal speed."""
    body = table.body
    stacks = sum(t.count * sum(v.bytes for v in t.values) for t in problem.bodies) or 1
    for which, tie in ((columns.offload, TIE_MOVED), (columns.keep, TIE_KEPT)):
        for i, c in which.items():
            builder.cost[c] += tie * body.count * table.bytes[i] / stacks


def _device_rows(
    builder: _Builder,
    problem: Problem,
    body_tables: tuple[BodyTable, ...],
    reduced: list[Reduced],
    columns: list[_Columns],
) -> tuple[float, list[int]]:
    """One row per moment that can be the peak; see `_evaluate._device_bytes`."""
    stacks: dict[int, float] = {}
    moments: list[tuple[dict[int, float], float, str]] = []
    for table, r, c in zip(body_tables, reduced, columns, strict=True):
        update = table.body.phase == "update"
        early = 0 if update else problem.prefetch_depth - 1
        late = min(early, 1)
        stacks |= {k: table.body.count * table.bytes[i] for i, k in c.keep.items()}
        staged = {k: early * table.bytes[i] for i, k in c.offload.items()}
        for p in r.points:
            terms = stacks | staged
            for i in table.live[[p]].indices:
                for which in (c.offload, c.again):
                    if i in which:
                        k = which[i]
                        terms[k] = terms.get(k, 0.0) + table.bytes[i]
            name = f"device memory in the backward pass of {table.body.name}"
            name = "device memory at the update" if update else name
            moments.append((terms, float(table.reserved[p]), name))
        stacks |= {k: late * table.bytes[i] for i, k in c.offload.items()}
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
    builder: _Builder,
    problem: Problem,
    body_tables: tuple[BodyTable, ...],
    columns: list[_Columns],
) -> tuple[float, int]:
    terms = {
        k: table.body.count * table.bytes[i]
        for table, c in zip(body_tables, columns, strict=True)
        for i, k in c.offload.items()
    }
    scale = max(float(problem.host_bytes), sum(terms.values()) * 1e-2, 1.0)
    scaled = {k: v / scale for k, v in terms.items()}
    return scale, builder.row(scaled, problem.host_bytes / scale, "host memory")
