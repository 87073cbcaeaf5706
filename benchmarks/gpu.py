"""What plans promise, held against a real GPU: sized for one H200, in chunks.

    python -m benchmarks.gpu --minutes 9          begins, or goes on where it stopped
    python -m benchmarks.gpu --part hazards       only these parts (any number of them)
    python -m benchmarks.gpu --retry              tries again what ended in an error
    python -m benchmarks.gpu --table              only writes the table again
    python -m benchmarks.gpu --tiny --output FILE all parts in tiny sizes, on the CPU

Parts: calibration (`stowax.calibrate`, whose rates all later cells plan with); hazards
(known faults of XLA, planted: `gpu_hazards`); tutorial (its three examples:
`gpu_tutorial`); measured (seconds and bytes beside what was simulated and predicted:
`gpu_plans`); gate (`stowax.verify` on every plan); llama (`gpu_llama`).

Every cell is a process of its own: its peak of device memory is its own then, and a
compiler or a driver that ends the process ends one cell. Nothing needs the network.
Writes docs/results/gpu.json after every cell and docs/results/gpu.md; plans, and traces
with their programs, are kept in `.gpu/`. Without a GPU it says so and exits with 2.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from typing import Any

import jax

from benchmarks import (
    _record,
    gpu_hazards,
    gpu_llama,
    gpu_plans,
    gpu_table,
    gpu_tutorial,
)
from benchmarks.gpu_cells import TRACE, Cell, Context, Row

COMMAND = "python -m benchmarks.gpu"
PARTS = ("calibration", "hazards", "tutorial", "measured", "gate", "llama")
RESULT = _record.RESULTS / "gpu.json"
ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_SECONDS = 540.0
"""A cell that takes longer is stopped; `--minutes` stops it earlier."""
_SECONDS_TO_START = 15.0
_CALIBRATION = "calibration: rates"


def all_cells(tiny: bool) -> list[Cell]:
    """Every cell in the order of the run; what takes longest comes last."""
    return [
        *gpu_plans.calibration_cells(),
        *gpu_hazards.cells(),
        *gpu_tutorial.cells(),
        *gpu_plans.measured_cells(tiny),
        *gpu_plans.gate_cells(tiny),
        *gpu_llama.cells(tiny),
        *gpu_llama.gate_cells(tiny),
    ]


def device() -> dict[str, Any]:
    """The device of this process, in words."""
    first = jax.devices()[0]
    stats = first.memory_stats() or {}
    version = getattr(first.client, "platform_version", "")
    return {
        "device": first.device_kind,
        "platform": first.platform,
        "count": jax.device_count(),
        "device_bytes": stats.get("bytes_limit"),
        "platform_version": " ".join(str(version).split()),
        "cores": os.cpu_count(),
    }


def work_on(cell: Cell, context: Context) -> Row:
    """The row of one cell; an error is in it, beside what was found before."""
    row: Row = {}
    started = time.perf_counter()
    try:
        cell.work(context, row)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
        traceback.print_exc()
    row["cell_seconds"] = round(time.perf_counter() - started, 1)
    return row


def in_child(arguments: list[str], folder: pathlib.Path, limit: float) -> Any:
    """What a call of this command in a process of its own wrote, or why it wrote none.

    **Raises:** `ChildProcessError` with the last lines of what it said, `TimeoutError`
    where it took longer than `limit` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "STOWAX_CALIBRATION": str(folder / "calibration.json"),
        **os.environ,
    }
    log = folder / "cell.log"
    command = [sys.executable, "-m", "benchmarks.gpu", "--folder", str(folder)]
    with log.open("w") as said:
        try:
            done = subprocess.run(
                [*command, "--answer", str(answer), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=said,
                timeout=limit,
                check=False,
            )
            ended = f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"stopped after {limit:.0f} s") from None
    if answer.exists():
        return json.loads(answer.read_text())
    raise ChildProcessError(f"{ended}: {log.read_text(errors='replace')[-1500:]}")


def isolated(
    cell: Cell, folder: pathlib.Path, output: pathlib.Path, tiny: bool, limit: float
) -> Row:
    """`work_on` in a process of its own."""
    asked = ["--cell", cell.key, "--output", str(output.resolve())]
    started = time.perf_counter()
    try:
        return in_child(asked + ["--tiny"] * tiny, folder, limit)
    except OSError as error:
        spent = round(time.perf_counter() - started, 1)
        row: Row = {"error": f"{type(error).__name__}: {error}", "cell_seconds": spent}
        return row | {"stopped": isinstance(error, TimeoutError)}


class Results:
    """The JSON: read at the start, whole on disk after every cell."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.data: dict[str, Any] = {"command": COMMAND, "device": None, "cells": {}}
        if path.exists():
            self.data = json.loads(path.read_text())

    @property
    def cells(self) -> dict[str, Row]:
        """Every row by the cell's key."""
        return self.data["cells"]

    def belongs_to(self, found: dict[str, Any]) -> None:
        """Takes down the device; ends the run if other cells are of another one."""
        known = self.data["device"]
        if known and known["device"] != found["device"]:
            sys.exit(
                f"{self.path} has cells of {known['device']}, and this is "
                f"{found['device']}. Write elsewhere (--output)."
            )
        self.data["device"] = found

    def add(self, key: str, row: Row) -> None:
        """Adds a row with its date and versions, and writes everything."""
        where = self.data["device"] or {}
        row = {**row, "device": where.get("device"), "date": _record.today()}
        self.cells[key] = {**row, "versions": _record.versions()}
        _record.write_json(self.path, self.data)


def to_do(arguments: argparse.Namespace, known: dict[str, Row]) -> list[Cell]:
    """The chosen cells that have no row yet."""
    parts = arguments.part or PARTS
    return [
        cell
        for cell in all_cells(arguments.tiny)
        if cell.part in parts
        and (
            arguments.fresh
            or cell.key not in known
            or (arguments.retry and "error" in known[cell.key])
        )
    ]


def run(arguments: argparse.Namespace, results: Results) -> bool:
    """Cell after cell until all are done, or no time is left; whether all are."""
    started = time.monotonic()
    seconds = float("inf") if arguments.minutes is None else 60 * arguments.minutes
    cells = to_do(arguments, results.cells)
    for number, cell in enumerate(cells):
        left = seconds - (time.monotonic() - started)
        # The first of a chunk has all the time there is, or it would never begin.
        if number and left < cell.seconds + _SECONDS_TO_START:
            print(f"no time for {cell.key}; call again", file=sys.stderr)
            return False
        print(f"{cell.key} ({number + 1} of {len(cells)})", file=sys.stderr, flush=True)
        folder = arguments.folder
        if arguments.tiny:
            context = Context(tiny=True, folder=folder, found=results.cells)
            row = work_on(cell, context)
        else:
            _restore_calibration(folder, results.cells)
            limit = min(MOST_SECONDS, max(left, 30.0))
            row = isolated(cell, folder, results.path, False, limit)
            if row.get("stopped") and number:  # the next chunk has more time for it
                print("    no time was left; call again", file=sys.stderr)
                return False
        results.add(cell.key, row)
        summary = row.get("error", "").splitlines()[:1] or [f"{row['cell_seconds']} s"]
        print(f"    {summary[0]}", file=sys.stderr, flush=True)
        gpu_table.write(results.path)
    return True


def _restore_calibration(folder: pathlib.Path, found: dict[str, Row]) -> None:
    """Rates of an earlier chunk, for a machine that has lost its files since."""
    rates, path = found.get(_CALIBRATION, {}).get("calibration"), folder
    if rates is None or (path / "calibration.json").exists():
        return
    from stowax._target._calibration_file import host_name

    path.mkdir(parents=True, exist_ok=True)
    # The same kind of device; the name of this machine is the one that is read.
    _record.write_json(path / "calibration.json", {**rates, "host": host_name()})


def answer(arguments: argparse.Namespace) -> int:
    """In a child: one cell, or the device, to the file that was asked for."""
    if arguments.cell is None:
        _record.write_json(arguments.answer, device())
        return 0
    cells = {cell.key: cell for cell in all_cells(arguments.tiny)}
    found = Results(arguments.output).cells
    context = Context(tiny=arguments.tiny, folder=arguments.folder, found=found)
    name = "".join(c if c.isalnum() else "-" for c in arguments.cell)
    os.environ.setdefault(TRACE, str(arguments.folder / "traces" / name))
    _record.write_json(arguments.answer, work_on(cells[arguments.cell], context))
    return 0


def parsed(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--minutes", type=float, help="begin nothing that takes longer")
    parser.add_argument("--retry", action="store_true", help="errors, too")
    parser.add_argument("--fresh", action="store_true", help="do what is there again")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--tiny", action="store_true", help="on a CPU; tests nothing")
    parser.add_argument("--output", type=pathlib.Path, help=f"instead of {RESULT}")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / ".gpu")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.tiny and arguments.output is None:
        parser.error("--tiny needs --output: docs/results/ is for a GPU's figures")
    arguments.output = arguments.output or RESULT
    return arguments


def main(given: list[str] | None = None) -> int:
    """Runs what was asked for; 0: all of it is there, 3: call again, 2: no GPU."""
    arguments = parsed(given)
    if arguments.answer is not None:
        return answer(arguments)
    results = Results(arguments.output)
    if not arguments.table:
        if arguments.tiny:
            found = device()
        else:
            found = {}
            with contextlib.suppress(OSError):
                found = in_child([], arguments.folder, 120)
            if found.get("platform") not in ("gpu", "cuda"):
                print(
                    "benchmarks.gpu needs an attached NVIDIA GPU, and JAX has "
                    f"{found.get('device', 'no device')} here. `--tiny --output FILE` "
                    "runs every part in tiny sizes on the CPU.",
                    file=sys.stderr,
                )
                return 2
        results.belongs_to(found)
        results.data["tiny"] = arguments.tiny
        done = run(arguments, results)
        gpu_table.write(results.path)
        return 0 if done else 3
    gpu_table.write(results.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
