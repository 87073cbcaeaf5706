"""Do the published signs depend on the host link? The same programs, other links.

Published: offloading query, key and value makes PaliGemma2 28B 10 % and Llama2-13B 5 %
faster than full recomputation on a v5p-8, and the 3B and 9B models not. The rate of the
link was not published. Here the compiled programs of `benchmarks.comparison` are
simulated again with other rates, the same both ways: what a program computes does not
depend on them, only what it waits for.

    python -m benchmarks.comparison --kind policy --target v5p-8      compiles first
    python -m benchmarks.comparison_links

Writes docs/results/comparison_links.json and .md, of the programs that are there.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gzip
import sys
from typing import Any

import stowax
from benchmarks import _record, comparison_cells, comparison_programs
from benchmarks.comparison import LINES
from stowax._hlo._program import read_program
from stowax._records._stages import Link
from stowax._timing._simulate import simulate

COMMAND = "python -m benchmarks.comparison_links"
RESULT = _record.RESULTS / "comparison_links.json"
RATES = (15e9, 20e9, 26e9, 30e9, 40e9, 64e9)
"""Bytes per second and direction: from what is usually quoted for a chip of a v5p host
to what PCIe 5.0 x16 gives."""
REFERENCE = comparison_cells.FULL_RECOMPUTE


def seconds_of(line: dict[str, Any]) -> list[list[float]] | None:
    """Step and exposed seconds per rate, or `None` where the program was not kept."""
    path = comparison_programs.FOLDER / f"{line.get('program')}.pb.gz"
    if not path.exists():
        return None
    program = read_program(gzip.decompress(path.read_bytes()))
    chip = stowax.target(line["target"]).chip
    found = []
    for rate in RATES:
        link = Link(device_to_host=rate, host_to_device=rate)
        timeline = simulate(program, chip, link)
        found.append([timeline.step_seconds, timeline.exposed_seconds])
    return found


def write(rows: list[dict[str, Any]]) -> None:
    """The JSON, and a table of steps against full recomputation's."""
    _record.write_json(RESULT, _record.provenance(COMMAND) | {"rows": rows})
    whole = {
        (r["workload"], r["target"]): r["seconds"]
        for r in rows
        if r["policy"] == REFERENCE
    }
    table = []
    for row in rows:
        base = whole.get((row["workload"], row["target"]))
        if base is None or row["policy"] == REFERENCE:
            continue
        cells = [
            f"{step:.3f} ({step / full - 1:+.1%})"
            for (step, _), (full, _) in zip(row["seconds"], base, strict=True)
        ]
        table.append((row["workload"], row["target"], row["policy"], *cells))
    rates = (f"{rate / 1e9:g} GB/s" for rate in RATES)
    text = [
        "# Hand-written policies over other links\n",
        _record.provenance_text(COMMAND),
        _HOW,
        _record.table(("workload", "target", "policy", *rates), table),
    ]
    RESULT.with_suffix(".md").write_text("\n".join(text))


_HOW = """Simulated seconds of a step, and against full recomputation
(`nothing_saveable`) of the same workload, whose time does not depend on the link.
Programs are those of [comparison](comparison.md): compiled once, simulated for each
rate. Attention is plain, its scores written to memory, which makes more of a step
depend on it than with a fused kernel; published figures are with one.
"""


def main() -> None:
    rows = []
    for lines in comparison_cells.series(_record.read_lines(LINES)).values():
        for line in lines:
            if line["kind"] != "policy" or line.get("step_seconds") is None:
                continue
            print(line["workload"], line["name"], file=sys.stderr, flush=True)
            if (seconds := seconds_of(line)) is not None:
                keys = ("workload", "target", "device_bytes", "host_bytes")
                given = {key: line[key] for key in keys}
                rows.append(given | {"policy": line["name"], "seconds": seconds})
    write(rows)


if __name__ == "__main__":
    main()
