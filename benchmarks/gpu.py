"""What plans promise, held against a real GPU: sized for one H200, in chunks.

    python -m benchmarks gpu --minutes 9          begins, or goes on where it stopped
    python -m benchmarks gpu --part hazards       only these parts (any number of them)
    python -m benchmarks gpu --retry              tries again what ended in an error
    python -m benchmarks gpu --tiny --output FILE all parts in tiny sizes, on the CPU

Parts: calibration (`stowax.calibrate`, whose rates all later cells plan with); hazards
(known faults of XLA, planted: `gpu_hazards`); tutorial (its three examples:
`gpu_tutorial`); measured (seconds and bytes beside what was simulated and predicted:
`gpu_plans`); gate (`stowax.verify` on every plan); llama (`gpu_llama`).

Every cell is a process of its own: its peak of device memory is its own then, and a
compiler or a driver that ends the process ends one cell. Nothing needs the network.
Plans, and traces with their programs, are kept in `.gpu/`. Without a GPU it says so and
exits with 2.
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

PARTS = ("calibration", "hazards", "tutorial", "measured", "gate", "llama")
DEVICE = "device"
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
    command = [sys.executable, "-m", "benchmarks", "gpu", "--folder", str(folder)]
    with log.open("w") as said:
        try:
            done = subprocess.run(
                [*command, "--answer", str(answer), *arguments],
                cwd=_record.ROOT,
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


def belongs_to(found: Row, records: _record.Records) -> None:
    """Takes down the device; ends the run if other cells are of another one."""
    known = records.cells.get(DEVICE)
    if known and known["device"] != found["device"]:
        sys.exit(
            f"{records.path} has cells of {known['device']}, and this is "
            f"{found['device']}. Write elsewhere (--output)."
        )
    memory = found["device_bytes"]
    with_memory = f" with {_record.gib(memory)} GiB" if memory else ""
    records.machine = (
        f"machine with one {found['device']}{with_memory} "
        f"({found['platform_version']}), {found['cores']} processor cores"
    )
    if known != found:
        records.add(DEVICE, found)


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


def _run_cells(arguments: argparse.Namespace, records: _record.Records) -> bool:
    """Cell after cell until all are done, or no time is left; whether all are."""
    started = time.monotonic()
    seconds = float("inf") if arguments.minutes is None else 60 * arguments.minutes
    cells = to_do(arguments, records.cells)
    for number, cell in enumerate(cells):
        left = seconds - (time.monotonic() - started)
        # The first of a chunk has all the time there is, or it would never begin.
        if number and left < cell.seconds + _SECONDS_TO_START:
            print(f"no time for {cell.key}; call again", file=sys.stderr)
            return False
        print(f"{cell.key} ({number + 1} of {len(cells)})", file=sys.stderr, flush=True)
        folder = arguments.folder
        if arguments.tiny:
            context = Context(tiny=True, folder=folder, found=records.cells)
            row = work_on(cell, context)
        else:
            _restore_calibration(folder, records.cells)
            limit = min(MOST_SECONDS, max(left, 30.0))
            row = isolated(cell, folder, records.path, False, limit)
            if row.get("stopped") and number:  # the next chunk has more time for it
                print("    no time was left; call again", file=sys.stderr)
                return False
        records.add(cell.key, row)
        summary = row.get("error", "").splitlines()[:1] or [f"{row['cell_seconds']} s"]
        _record.say(summary[0])
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


def answer(asked: argparse.Namespace, records: _record.Records) -> int:
    """In a child: one cell, or the device, to the file that was asked for."""
    if asked.cell is None:
        _record.write_json(asked.answer, device())
        return 0
    cells = {cell.key: cell for cell in all_cells(asked.tiny)}
    context = Context(tiny=asked.tiny, folder=asked.folder, found=records.cells)
    name = "".join(c if c.isalnum() else "-" for c in asked.cell)
    os.environ.setdefault(TRACE, str(asked.folder / "traces" / name))
    _record.write_json(asked.answer, work_on(cells[asked.cell], context))
    return 0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--minutes", type=float, help="begin nothing that takes longer")
    parser.add_argument("--retry", action="store_true", help="errors, too")
    parser.add_argument("--tiny", action="store_true", help="on a CPU; tests nothing")
    parser.add_argument("--folder", type=pathlib.Path, default=_record.ROOT / ".gpu")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=pathlib.Path, help=argparse.SUPPRESS)


def run(asked: argparse.Namespace, records: _record.Records) -> int:
    """Runs what was asked for; 0: all of it is there, 3: call again, 2: no GPU."""
    if asked.answer is not None:
        sys.exit(answer(asked, records))  # the table is the parent's
    if asked.tiny and asked.output is None:
        sys.exit("--tiny needs --output: docs/results/ is for a GPU's figures")
    found: Row = {}
    if asked.tiny:
        found = device() | {"tiny": True}
    else:
        with contextlib.suppress(OSError):
            found = in_child([], asked.folder, 120)
        if found.get("platform") not in ("gpu", "cuda"):
            print(
                "The benchmark needs an attached NVIDIA GPU, and JAX has "
                f"{found.get('device', 'no device')} here. `--tiny --output FILE` "
                "runs every part in tiny sizes on the CPU.",
                file=sys.stderr,
            )
            return 2
    belongs_to(found, records)
    return 0 if _run_cells(asked, records) else 3


page = gpu_table.page
