"""Do the published signs depend on the host link? The same programs, other links.

Published: offloading query, key and value makes PaliGemma2 28B 10 % and Llama2-13B 5 %
faster than full recomputation on a v5p-8, and the 3B and 9B models not. The rate of the
link was not published. Here the compiled programs of `benchmarks.comparison` are
simulated again with other rates: what a program computes does not depend on them, only
what it waits for.

    python -m benchmarks comparison --kind policy --target v5p-8      compiles first
    python -m benchmarks links
"""

import argparse
from typing import Any

import stowax
from benchmarks import _record, comparison_cells, comparison_programs
from benchmarks.comparison_policies import PIPELINED
from stowax._records._stages import Link
from stowax._timing._simulate import simulate

TARGET, POLICY = "v5p-8", "qkv_proj_offloaded"
PUBLISHED = {
    "llama2-13b": "5 % faster",
    "paligemma2-28b": "10 % faster",
    "paligemma2-3b": "no faster",
    "paligemma2-10b": "no faster (its language model has 9B)",
}
LINKS = tuple(
    Link(device_to_host=out * 1e9, host_to_device=into * 1e9)
    for out, into in (
        # What is usually quoted for a chip of a v5p host, to what PCIe 5.0 x16 gives.
        *((rate, rate) for rate in (15, 20, 26, 30, 40, 64)),
        # Slower out than in.
        *((out, into) for out in (12, 13, 14) for into in (26, 40, 64)),
    )
)


def seconds_of(line: dict[str, Any]) -> list[list[float]]:
    """Step and exposed seconds per link, of a program that was kept."""
    program = comparison_programs.program_of(line)
    if program is None:
        name = f"{line['workload']}, {line['name']}"
        raise LookupError(f"no program of {name}: compile it with --fresh first")
    chip = stowax.target(line["target"]).chip
    found = []
    for link in LINKS:
        timeline = simulate(program, chip, link)
        found.append([timeline.step_seconds, timeline.exposed_seconds])
    return found


def gains(records: _record.Records) -> dict[str, list[float]]:
    """Per workload, a step beside full recomputation's, for every link."""
    rows = [row for row in records.cells.values() if "error" not in row]
    return {
        name: _gains([r for r in rows if r["workload"] == name]) for name in PUBLISHED
    }


def page(records: _record.Records) -> str:
    """A table of steps against full recomputation's."""
    found = gains(records)
    table = [("published", *PUBLISHED.values())]
    for k, link in enumerate(LINKS):
        rates = (link.device_to_host / 1e9, link.host_to_device / 1e9)
        cells = [f"{found[name][k]:+.1%}" for name in PUBLISHED]
        table.append(("{:g}, {:g}".format(*rates), *cells))
    head = ("GB/s out, in", *PUBLISHED)
    return _record.page_text(records, table=_record.table(head, table))


def _gains(rows: list[dict[str, Any]]) -> list[float]:
    """The faster of the programs beside full recomputation, per link."""
    return [
        min(row["seconds"][k][0] / row["full_seconds"] - 1 for row in rows)
        for k in range(len(LINKS))
    ]


def options(parser: argparse.ArgumentParser) -> None:
    del parser


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Every program over every link."""
    del asked
    found = comparison_cells.series(
        _record.Records("comparison", "simulated").cells.values()
    )
    for workload in PUBLISHED:
        lines = {n["name"]: n for n in found[workload, TARGET] if n["kind"] == "policy"}
        for policy in (POLICY, POLICY + PIPELINED):
            records.made(
                _record.cell_name(workload, policy),
                lambda p=policy, n=lines: row_of(n[p], n),
            )


def row_of(line: dict[str, Any], lines: dict[str, Any]) -> dict[str, Any]:
    """Of one program: its bytes, and its seconds over every link."""
    full = lines[comparison_cells.FULL_RECOMPUTE]["step_seconds"]
    keys = ("workload", "target", "device_bytes", "host_bytes")
    given = {key: line[key] for key in keys} | {"full_seconds": full}
    return given | {"policy": line["name"], "seconds": seconds_of(line)}
