"""Kills, many steps, damaged files, full disks, signals: is anything lost?

Each part has its own count; small ones by default, the whole campaign with --full.
Seeds are printed with every fault, and a fault can be made again from its seed.

    python -m benchmarks reliability                      a few of each, ten minutes
    python -m benchmarks reliability --part mutations --mutations 10000 --fresh
    python -m benchmarks reliability --full --fresh       all of it, hours
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import _record
from benchmarks.reliability_commands import COMMANDS
from benchmarks.reliability_disks import full_disk, read_only, two_at_once
from benchmarks.reliability_kills import kills
from benchmarks.reliability_mutations import mutations
from benchmarks.reliability_readers import KINDS
from benchmarks.reliability_signals import signals
from benchmarks.reliability_steps import STEPS, steps

PARTS = ("kills", "steps", "mutations", "disks", "signals")
FULL = {
    "kills": 50,
    "steps": 20_000,
    "mutations": 10_000,
    "disks": 24,
    "signals": 20,
}
"""What the campaign is to be: a figure per part, kind of file or command."""
_SMALL = {"kills": 3, "steps": 500, "mutations": 200, "disks": 6, "signals": 2}

Work = Callable[[], _record.Figures]


def cells(
    asked: argparse.Namespace, counts: dict[str, int]
) -> Iterator[tuple[str, str, Work]]:
    """Part, name and work of every cell that is asked for."""
    say, seed = _record.say, asked.seed
    for part in asked.part or PARTS:
        count = counts[part]
        if part == "kills":
            work: Work = lambda n=count: kills(n, asked.training, seed, say)
            yield part, "SIGKILL", work
        elif part == "steps":
            for name in STEPS:
                yield part, name, lambda name=name, n=count: steps(name, n)
        elif part == "mutations":
            for name in KINDS:
                work = lambda name=name, n=count: mutations(name, n, seed, say)
                yield part, name, work
        elif part == "disks":
            yield part, "full disk", lambda n=count: full_disk(n, say)
            yield part, "read-only", lambda n=count: read_only(n, say)
            yield part, "two at once", lambda n=count: two_at_once(n, say)
        else:
            for name in COMMANDS:
                yield part, name, lambda name=name, n=count: signals(name, n, seed, say)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable")
    parser.add_argument("--only", action="append", metavar="WHAT", help="of the table")
    parser.add_argument("--full", action="store_true", help="the whole campaign")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--training", type=int, default=40, help="steps of a training")
    for part in PARTS:
        parser.add_argument(
            f"--{part}", type=int, metavar="N", help=f"tries (default {_SMALL[part]})"
        )


def run(asked: argparse.Namespace, records: _record.Records) -> int:
    """Every cell that is not there yet; 1 if anything was lost."""
    usual = FULL if asked.full else _SMALL
    given = {part: getattr(asked, part) for part in PARTS}
    counts = {part: given[part] or usual[part] for part in PARTS}
    print(f"reliability: seed {asked.seed}, {counts}", flush=True)
    faults = 0
    for part, name, work in cells(asked, counts):
        if asked.only and name not in asked.only:
            continue

        def timed(work: Work = work) -> _record.Figures:
            started = time.perf_counter()
            return {**work(), "seconds": round(time.perf_counter() - started, 1)}

        about = {"part": part, "what": name, "full": FULL[part]}
        found = records.made(_record.cell_name(part, name), timed, about)
        faults += faults_of(found)
        for line in found.get("said", []):
            _record.say(line)
    return 1 if faults else 0


def faults_of(found: _record.Figures) -> int:
    """Tries that lost something, ended in a traceback or hung; a failed cell is one."""
    return sum(found.get(n, 0) for n in ("lost", "raw", "hung")) + ("error" in found)


_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "part": lambda row: row["part"],
    "what": lambda row: row["what"],
    "tries": lambda row: f"{row.get('tries', 0):,}",
    "of": lambda row: f"{row['full']:,}",
    "lost": lambda row: row.get("lost", 0),
    "tracebacks": lambda row: row.get("raw", 0),
    "hung": lambda row: row.get("hung", 0),
    "how": lambda row: _told(row),
}


def _told(row: _record.Figures) -> str:
    """What else there is to say of a row."""
    if "error" in row:
        return row["error"][:80]
    if row["part"] == "kills":
        return f"{row['trainings']} trainings of {row['steps']} steps"
    if row["part"] == "steps":
        grown = row["grown"]
        return f"{grown['bytes'] / 2**20:.1f} MiB, {grown['arrays']} arrays more"
    if row["part"] == "mutations":
        names = ("refused", "missed", "used", "run")
        return ", ".join(f"{row[name]:,} {name}" for name in names if row[name])
    if row["part"] == "signals":
        return f"{row['in_time']} before the command had ended"
    return row.get("how", "")


def page(records: _record.Records) -> str:
    """The table."""
    order = {part: number for number, part in enumerate(PARTS)}
    rows = sorted(records.cells.values(), key=lambda row: order[row["part"]])
    faults = sum(faults_of(row) for row in rows)
    return _record.page_text(
        records,
        faults=faults or "None",
        table=_record.columns(_COLUMNS, rows),
    )
