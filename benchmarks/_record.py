"""How the benchmarks write down what they found: JSON for machines, a table for people.

Every result says how it was made: the command, the versions, the date, the machine in
words. A file of cells is resumable: one JSON object per line, appended as it comes.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import time
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = _ROOT / "docs" / "results"
GIB = 2**30

_PACKAGES = (
    "stowax",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "equinox",
    "scipy",
)


def versions() -> dict[str, str]:
    """Versions of everything that a result depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "stowax" not in found:  # run from a checkout that is not installed
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
        found["stowax"] = project["version"]
    return found


def machine() -> str:
    """The machine in words: what matters for the figures, and no name."""
    gpu = pathlib.Path("/dev/nvidiactl").exists()
    return (
        f"{os.cpu_count()}-core machine, {'an NVIDIA GPU' if gpu else 'no accelerator'}"
    )


def today() -> str:
    """The date, as ISO writes it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def provenance(command: str) -> dict[str, Any]:
    """How and where a result was made."""
    return {
        "command": command,
        "date": today(),
        "machine": machine(),
        "versions": versions(),
    }


def provenance_text(command: str, *, dates: Iterable[str] = ()) -> str:
    """`provenance` as one Markdown paragraph."""
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    when = " to ".join(sorted({*dates} or {today()})[:: max(1, len({*dates}) - 1)])
    return f"Made by `{command}` on a {machine()}, {when}; {named}.\n"


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; none where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def append_line(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Adds one object to a JSON lines file, at once on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()


def write_json(path: pathlib.Path, record: dict[str, Any]) -> None:
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
