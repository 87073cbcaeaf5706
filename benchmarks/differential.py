"""Random training steps, planned and unplanned: are the numbers the same?

    python -m benchmarks differential --programs 10000 --minutes 60
    python -m benchmarks differential --only 17            # one program, in words
    python -m benchmarks differential --only 17 --shrink   # and made simpler
    python -m benchmarks differential --one-by-one         # one unusual part each
    python -m benchmarks differential --compile v5p-8,h200 --budgets 2 --programs 300
    python -m benchmarks differential --compile plain      # false alarms, if any
    JAX_PLATFORMS=cuda,cpu python -m benchmarks differential --attached --out FILE

Every run is one record, and a table in docs/results/differential.md or what `--out`
names. A program is made from one integer. Processes run a program each; one that dies
or takes too long is a failure with a seed, too. The grammar is in
`tests/differential/`.

With `--attached` programs run on JAX's first device and are planned for it, products at
their highest precision; programs over several devices are left out.
"""

import argparse
import contextlib
import dataclasses
import gzip
import importlib.metadata
import json
import os
import pathlib
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

from benchmarks import _record, differential_table

COMMAND = "python -m benchmarks differential"
PLAIN, ATTACHED = "plain", "attached"
SECONDS_OF_A_PROGRAM = 240
DECISIONS = 8
"""How often decisions are drawn for a program, after its search was judged."""
_PROGRAMS_OF_A_PROCESS = 50
# XLA takes a quarter as long so, and rounds less differently from program to program.
# Every other process compiles as users do.
_OLD_FLAGS = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
)
_LESS_OPTIMIZED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    # jaxlib 0.11 has none but the new emitters.
    f"{_OLD_FLAGS * importlib.metadata.version('jaxlib').startswith('0.10.')}"
)
_LESS_TUNED = "--xla_gpu_autotune_level=0"
_PROCESS = (sys.executable, *COMMAND.split()[1:], "--work")
_ON_ONE_DEVICE = ("none", "one device")


def drawn(seed: int) -> tuple[Any, Any]:
    """The program and wishes of a seed; of -1, -2, … those of `one_by_one`."""
    from tests.differential.choosers import SeededChooser
    from tests.differential.programs import draw, one_by_one

    if seed < 0:
        return one_by_one()[-1 - seed]
    return draw(SeededChooser(seed))


def _start_jax() -> None:
    os.environ["STOWAX_CALIBRATION"] = os.path.join(os.devnull, "none")
    import jax

    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    jax.config.update("jax_num_cpu_devices", 8)
    if os.environ["JAX_PLATFORMS"] != "cpu":  # a GPU's products of float32 are TF32
        jax.config.update("jax_default_matmul_precision", "highest")


def run_one(seed: int, targets: str = "", budgets: int = 2) -> dict[str, Any]:
    """What came of one seed: on JAX's device, or compiled for targets not there.

    The target `plain` stands for the plain step beside itself, `attached` for JAX's
    first device.
    """
    program, wishes = drawn(seed)
    if targets == ATTACHED:
        import jax

        from stowax._target._target import platform_name

        here = platform_name(jax.devices()[0])
        wishes = dataclasses.replace(wishes, target=here)
    elif targets and targets != PLAIN:
        from benchmarks.differential_compile import judge_compiled

        verdicts = judge_compiled(program, targets.split(","), budgets)
        return {"seed": seed, "features": program.features, "verdicts": verdicts}
    from tests.differential.calibrate import otherwise
    from tests.differential.judge import judge_all

    plain = targets == PLAIN
    front, decisions = (otherwise(program), 0) if plain else (None, DECISIONS)
    verdicts = judge_all(program, wishes, front, decisions)
    return {
        "seed": seed,
        "features": program.features + wishes.features,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
    }


def work(targets: str, budgets: int) -> None:
    """A process of the campaign: seeds come in, one a line, and verdicts go out.

    What programs print is no verdict: standard output is put aside first.
    """
    out = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    _start_jax()
    import jax

    for line in sys.stdin:
        try:
            found = run_one(int(line), targets, budgets)
        except Exception:  # a fault of the instrument, not of what it looks at
            found = _lost(int(line), "the instrument", traceback.format_exc())
        out.write(json.dumps(found) + "\n")
        out.flush()
        jax.clear_caches()


def _lost(seed: int, kind: str, message: str) -> dict[str, Any]:
    """A record of a program that gave no verdict of its own."""
    program, wishes = drawn(seed)
    verdict = {"outcome": "foreign", "kind": kind, "message": message, "moved": ()}
    return {
        "seed": seed,
        "features": program.features + wishes.features,
        "verdicts": [verdict | {"seconds": 0.0, "warned": (), "compared": 0}],
    }


class _Worker:
    """A process that judges programs, started anew when it dies."""

    def __init__(self, more: list[str], flags: str = ""):
        self._more, self._process, self._done = more, None, 0
        self._environment = {"XLA_FLAGS": flags, **os.environ}
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`

    def judge(self, seed: int) -> dict[str, Any]:
        """The record of one seed."""
        if self._process is None or self._done >= _PROGRAMS_OF_A_PROCESS:
            self.stop()
            self._words.seek(0)
            self._words.truncate()
            self._process = subprocess.Popen(
                [*_PROCESS, *self._more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                env=self._environment,
            )
            self._done = 0
        self._done += 1
        process = self._process
        with contextlib.suppress(BrokenPipeError):  # it died: no line comes either
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], SECONDS_OF_A_PROGRAM)
        line = process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        code = process.poll() if not ready else process.wait()
        self.stop()
        if code is None:
            return _lost(seed, f"no end within {SECONDS_OF_A_PROGRAM} s", "")
        self._words.seek(0)
        last = self._words.read().decode(errors="replace").strip()[-1000:]
        return _lost(seed, f"the process ended with {code}", last)

    def close(self) -> None:
        """Ends the process, and forgets what it said."""
        self.stop()
        self._words.close()

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes both pipes
            self._process = None


def campaign(
    seeds: Any, minutes: float, processes: int, more: list[str], say: Any
) -> list[dict[str, Any]]:
    """The records of all seeds that fit in the time."""
    records, todo, lock = [], queue.SimpleQueue(), threading.Lock()
    for seed in seeds:
        todo.put(seed)
    end = time.monotonic() + 60 * minutes
    less = _LESS_TUNED if ATTACHED in more else _LESS_OPTIMIZED

    def run(number: int) -> None:
        worker = _Worker(more, "" if number % 2 else less)
        try:
            while time.monotonic() < end:
                record = worker.judge(todo.get_nowait())
                with lock:
                    records.append(record)
                    say(records)
        except queue.Empty:
            return
        finally:
            worker.close()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return records


class _Kept:
    """Records in a file, from one run to the next; without a file nothing is kept.

    While a run goes on each record is a line of the file; then all are compressed
    beside it, in its name and `.gz`. A program with a fault is not known: it is to be
    run again once that is mended.
    """

    def __init__(self, path: pathlib.Path | None):
        self._path = path
        lines: list[str] = []
        if path and self._packed.exists():
            lines += gzip.decompress(self._packed.read_bytes()).decode().splitlines()
        if path and path.exists():
            lines += path.read_text().splitlines()
        by_seed = {record["seed"]: record for record in map(json.loads, lines)}
        self.known = [
            by_seed[seed]
            for seed in sorted(by_seed)
            if not differential_table.has_faults([by_seed[seed]])
        ]
        self.seeds = {record["seed"] for record in self.known}
        self._file = path.open("a") if path else None

    @property
    def _packed(self) -> pathlib.Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.gz")

    def added(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All that is known, the last of `records` written down."""
        if self._file is not None:
            self._file.write(json.dumps(records[-1]) + "\n")
            self._file.flush()
        return self.known + records

    def pack(self, records: list[dict[str, Any]]) -> None:
        """Compresses all that is known and `records`, in the order of their seeds."""
        if self._path is None:
            return
        every = sorted(self.known + records, key=lambda record: record["seed"])
        text = "".join(json.dumps(record) + "\n" for record in every)
        self._packed.write_bytes(gzip.compress(text.encode(), mtime=0))
        self._path.unlink()

    def __enter__(self) -> "_Kept":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def show(seed: int, targets: str, budgets: int, shrink: bool) -> int:
    """One program in words and what came of it; 1 for a fault."""
    from tests.differential.judge import FAULTS, judge

    program, wishes = drawn(seed)
    print(f"{program}\n{wishes}")
    record = run_one(seed, targets, budgets)
    for verdict in record["verdicts"]:
        print(json.dumps(verdict, indent=1))
    worst = record["verdicts"][0]
    if shrink and not targets:
        from tests.differential.shrink import shrunk

        alike = lambda *pair: judge(*pair).kind == worst["kind"]
        simplest = shrunk(program, wishes, alike)
        print("simplest:", *simplest, judge(*simplest).message, sep="\n")
    return int(any(v["outcome"] in FAULTS for v in record["verdicts"]))


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--programs", type=int, default=1000)
    add("--minutes", type=float, default=60)
    add("--seed", type=int, default=0, help="the first one")
    add("--processes", type=int, default=2)
    add("--out", type=pathlib.Path, help="the table; by default beside the records")
    add(
        "--keep",
        type=pathlib.Path,
        metavar="FILE",
        help="every program's verdicts; what is there counts, and is not run again",
    )
    add("--only", type=int, help="this seed alone, in words")
    add("--shrink", action="store_true", help="with --only")
    add("--one-by-one", action="store_true", help="one unusual part each, no seeds")
    add("--compile", default="", help="targets that are not there")
    add("--budgets", type=int, default=2)
    add(
        "--attached",
        action="store_const",
        dest="compile",
        const=ATTACHED,
        help="run them on JAX's first device, planned for it",
    )
    add("--work", action="store_true", help=argparse.SUPPRESS)


def run(asked: argparse.Namespace, records: _record.Records) -> int:
    """Runs the campaign; 1 if anything is wrong or foreign."""
    if asked.work:
        work(asked.compile, asked.budgets)
        return 0
    if asked.only is not None:
        _start_jax()
        return show(asked.only, asked.compile, asked.budgets, asked.shrink)

    def say(found: list[dict[str, Any]]) -> None:
        if len(found) % 25 == 0:
            print(differential_table.one_line(found), flush=True)

    with _Kept(asked.keep) as kept:
        found = campaign(
            [seed for seed in _seeds(asked) if seed not in kept.seeds],
            asked.minutes,
            asked.processes,
            ["--compile", asked.compile, "--budgets", str(asked.budgets)],
            lambda programs: say(kept.added(programs)),
        )
        kept.pack(found)
        found = kept.known + found
    write(found, asked, records)
    print(differential_table.one_line(found))
    return int(differential_table.has_faults(found))


def _seeds(asked: argparse.Namespace) -> Any:
    if asked.one_by_one:
        from tests.differential.programs import one_by_one

        return range(-1, -1 - len(one_by_one()), -1)
    seeds = range(asked.seed, asked.seed + asked.programs)
    if asked.compile == ATTACHED:
        return [seed for seed in seeds if drawn(seed)[0].mesh in _ON_ONE_DEVICE]
    return seeds


def write(
    found: list[dict[str, Any]], asked: argparse.Namespace, records: _record.Records
) -> None:
    """The table of a run, and its record."""
    out = asked.out or records.path.with_suffix(".md")
    cell = out.stem
    targets = "" if asked.compile in (PLAIN, ATTACHED) else asked.compile
    status = "compiled" if targets else "measured"
    records.add(cell, differential_table.figures(found), status)
    provenance = _record.provenance_text([records.lines[cell]], records.command)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(differential_table.table(found, provenance, targets))
