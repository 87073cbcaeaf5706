"""Columns and rows of a linear program as they are written down, one by one."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import scipy.sparse


class Builder:
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
class Columns:
    """The columns of one body: per value keep, offload, recomputed; per operation z."""

    keep: dict[int, int]
    offload: dict[int, int]
    again: dict[int, int]
    run: dict[int, int]
    late_forward: int
    late_backward: int
