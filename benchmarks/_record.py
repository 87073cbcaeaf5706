"""Records: one JSON line per cell of a benchmark, in one envelope for all of them.

    {"benchmark", "cell", "status", "command", "date", "versions", "machine", "figures"}

The status says what the figures are: *compiled* (bytes and schedules of programs that
were compiled and did not run), *simulated* (seconds worked out from such schedules) or
*measured* (by a program that ran). Of a cell that is there twice the last line counts.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = ROOT / "benchmarks" / "pages"
GIB = 2**30
STATUSES = ("compiled", "simulated", "measured")
ENVELOPE = ("benchmark", "cell", "status", "command", "date", "versions", "machine")
Figures = dict[str, Any]

_CALLED = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "")
if _CALLED.startswith("benchmarks.") and _CALLED != "benchmarks.__main__":
    sys.exit("`python -m benchmarks NAME` runs one; without NAME it lists them")

_PACKAGES = (
    *("stowax", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("flax", "equinox", "scipy"),
)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of everything that a result depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "stowax" not in found:  # run from a checkout that is not installed
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        found["stowax"] = project["version"]
    return found


def machine() -> str:
    """The machine in words: what matters for the figures, and no name."""
    gpu = pathlib.Path("/dev/nvidiactl").exists()
    return (
        f"{os.cpu_count()}-core machine, {'an NVIDIA GPU' if gpu else 'no accelerator'}"
    )


class Records:
    """The records of one benchmark: read at the start, appended as they come."""

    def __init__(
        self,
        name: str,
        status: str,
        path: pathlib.Path | None = None,
        *,
        command: str = "",
        fresh: bool = False,
    ):
        """With `fresh` every cell is made again, once."""
        self.name, self.status, self.command = name, status, command
        self.path = path or RESULTS / f"{name}.jsonl"
        self.machine = machine()
        self.lines: dict[str, dict[str, Any]] = {}
        self._count = 0
        if self.path.exists():
            read = [json.loads(n) for n in self.path.read_text().splitlines() if n]
            self.lines, self._count = {n["cell"]: n for n in read}, len(read)
        self._again = {*self.lines} if fresh else set()

    @property
    def cells(self) -> dict[str, Figures]:
        """The figures of every cell, by its name."""
        return {cell: line["figures"] for cell, line in self.lines.items()}

    def known(self, cell: str) -> Figures | None:
        """The figures of a cell that need not be made: there, without an error."""
        found = self.cells.get(cell)
        again = found is None or "error" in found or cell in self._again
        return None if again else found

    def made(
        self,
        cell: str,
        work: Callable[[], Figures],
        about: Mapping[str, Any] | None = None,
    ) -> Figures:
        """The figures of a cell: those that are there, or what `work` finds now.

        They begin with `about`. An error makes a record, too, and is tried again later.
        """
        known = self.known(cell)
        if known is not None:
            return known
        print(f"{self.name}: {cell}", file=sys.stderr, flush=True)
        figures = dict(about or {})
        try:
            figures |= work()
        except Exception as error:
            figures["error"] = f"{type(error).__name__}: {error}"[:2000]
            say(figures["error"])
        self.add(cell, figures)
        return figures

    def add(self, cell: str, figures: Figures, status: str | None = None) -> None:
        """Adds one record, at once on disk."""
        self.lines[cell] = {
            "benchmark": self.name,
            "cell": cell,
            "status": status or self.status,
            "command": self.command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": versions(),
            "machine": self.machine,
            "figures": figures,
        }
        self._again.discard(cell)
        self._count += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[cell]) + "\n")

    def settle(self) -> None:
        """Leaves one line per cell in the file."""
        if self._count > len(self.lines):
            text = "".join(json.dumps(line) + "\n" for line in self.lines.values())
            draft = self.path.with_suffix(".draft")
            draft.write_text(text)
            draft.replace(self.path)
            self._count = len(self.lines)

    def provenance(self, command: str = "") -> str:
        """How, when and where the records were made: one Markdown paragraph."""
        command = command or f"python -m benchmarks {self.name}"
        return provenance_text(self.lines.values(), command)


def page_text(records: Records, **parts: Any) -> str:
    """A page of results: its template in `pages/`, filled with its parts.

    `{made}` says how the records were made.
    """
    template = PAGES / f"{records.name}.md"
    parts = {name: str(part).rstrip("\n") for name, part in parts.items()}
    made = records.provenance().rstrip("\n")
    return template.read_text().format(made=made, **parts)


def provenance_text(lines: Iterable[Mapping[str, Any]], command: str) -> str:
    """How, when and where records were made: one Markdown paragraph."""
    lines = list(lines)
    machines = dict.fromkeys(line["machine"] for line in lines)
    named = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        for line in lines
    )
    return (
        f"Made by `{command}` on a {'; or '.join(machines)}, {dates_text(lines)}; "
        f"{'; or '.join(named)}.\n"
    )


def dates_text(lines: Iterable[Mapping[str, Any]]) -> str:
    """The day of some records, or the first and the last."""
    dates = sorted({line["date"] for line in lines})
    return " to ".join(dates[:: max(1, len(dates) - 1)])


def cell_name(*parts: Any) -> str:
    """What a cell is called: its parts, those that are none left out."""
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def say(line: str) -> None:
    """Progress, indented below the cell's own line."""
    print(f"    {line}", file=sys.stderr, flush=True)


def write_json(path: pathlib.Path, record: Any) -> None:
    """Writes one JSON document; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.replace(path)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def columns(given: Mapping[str, Callable[[Any], Any]], items: Iterable[Any]) -> str:
    """A Markdown table of `items`: per column its head and its text of an item."""
    return table([*given], [[text(item) for text in given.values()] for item in items])


def seconds_text(count: float) -> str:
    """Three decimals, or three digits of what is small."""
    return f"{count:.3f}" if count >= 0.1 or not count else f"{count:.3g}"


def gib(count: float) -> str:
    """Bytes as GiB with two decimals, for a column that says GiB."""
    return f"{count / GIB:.2f}"


def total_bytes(analysis: Any) -> int:
    """Device bytes of a compiled program, from XLA's own figures."""
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


class Stopwatch:
    """Seconds on the wall and of the processor (children too) since it was made."""

    def __init__(self):
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def seconds(self) -> dict[str, float]:
        """`wall_seconds` and `cpu_seconds` so far."""
        return {
            "wall_seconds": round(time.perf_counter() - self._wall, 2),
            "cpu_seconds": round(_cpu_seconds() - self._cpu, 2),
        }


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median of second over first: pairs taken one after the other share the noise."""
    return statistics.median(second / first for first, second in pairs)
