"""Disks that are full or cannot be written to, and two processes at one cache.

A disk of 64 KiB, and a file system that is read-only as a whole (no temporary folder,
no home), need a mount namespace of their own (`unshare -m`). Where that is not
permitted, files are limited to 8 KiB instead (`ulimit -f`), and the second is left out.
"""

import json
import pathlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import reliability_commands as commands
from benchmarks._record import Figures

_FULL = (
    "mount -t tmpfs -o size=64k none disk && cat /dev/zero > disk/fill 2> /dev/null; "
    "exec "
)
_READ_ONLY = "mount --bind / / && mount -o remount,ro,bind /; exec "

_ALLOWED = ("targets", "plan", "inspect", "inspect --html", "audit", "run")


def may_mount() -> bool:
    """Whether this process may make file systems of its own."""
    tried = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "mount", "--bind", "/", "/"],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


def _in(mounts: str, words: Sequence[str]) -> list[str]:
    script = f'{mounts}"$@"'
    return ["unshare", "-m", "--propagation", "private", "bash", "-c", script, *words]


def _limited() -> list[str]:
    return ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash"]


def _to_disk(words: Sequence[str]) -> list[str]:
    """A command whose outputs and cache are on the disk."""
    there = {"out.json": "disk/out.json", "out.html": "disk/out.html", "cache": "disk"}
    return [there.get(word, word) for word in words]


def full_disk(count: int, say: Any) -> Figures:
    """Commands whose outputs and cache are on a full disk, in turns."""
    how = "tmpfs" if may_mount() else "ulimit -f"
    before = _in(_FULL, ["bash"]) if how == "tmpfs" else _limited()
    return {"how": how, **_ran(count, before, _to_disk, {0, 1, 2}, say)}


def read_only(count: int, say: Any) -> Figures:
    """Commands without outputs where nothing can be written at all, in turns."""
    if not may_mount():
        return {"tries": 0, "right": 0, "lost": 0, "raw": 0, "said": ["not permitted"]}
    return {"how": "ro", **_ran(count, _in(_READ_ONLY, ["bash"]), _bare, {0, 1}, say)}


def _bare(words: Sequence[str]) -> list[str]:
    """A command without its outputs and a cache of its own."""
    kept, skip = [], False
    for word in words:
        skip, left = word in ("-o", "--html", "--perfetto", "--cache"), skip
        if not skip and not left:
            kept.append(word)
    return kept


def _ran(
    count: int, before: Sequence[str], change: Any, codes: set[int], say: Any
) -> Figures:
    found = {"tries": count, "right": 0, "lost": 0, "raw": 0}
    said: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        commands.prepared(folder)
        for number in range(count):
            commands.cleared(folder)
            (folder / "disk").mkdir()
            name = _ALLOWED[number % len(_ALLOWED)]
            words = change(commands.COMMANDS[name])
            done = commands.ran(words, folder, before)
            lost = not done.out.strip() and name != "run"
            wrong = commands.left_behind(folder)
            raw = "Traceback" in done.err or done.code not in codes
            found["raw" if raw else "lost" if lost or wrong else "right"] += 1
            say(f"{name}: {done.code}")
            if raw or lost or wrong:
                told = done.err[-400:] if raw else wrong or "no result"
                said.append(f"{shlex.join(words)}: {done.code}: {told}")
    return {**found, "said": said[:5]}


def _without_seconds(text: str) -> Any:
    """The decisions and bytes of a plan, which do not depend on the day."""
    plan = json.loads(text)
    return plan["program"], plan["decisions"], plan["proof"]["device_bytes"]


def two_at_once(count: int, say: Any) -> Figures:
    """Pairs of processes that plan the same at once, over one cache."""
    found = {"tries": count, "right": 0, "lost": 0, "raw": 0}
    said: list[str] = []
    words = (*commands.COMMANDS["plan"], "--json")
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        for number in range(count):
            commands.cleared(folder)
            since = time.perf_counter()
            pair = [commands.started(words, folder) for _ in range(2)]
            done = [commands.ended(process, since) for process in pair]
            raw = any("Traceback" in one.err or one.code for one in done)
            wrong = commands.left_behind(folder)
            if not raw and len({str(_without_seconds(one.out)) for one in done}) > 1:
                wrong.append("two plans")
            found["raw" if raw else "lost" if wrong else "right"] += 1
            say(f"pair {number + 1}: {[one.code for one in done]} {wrong}")
            if raw or wrong:
                said.append(f"{wrong} {[one.err[-300:] for one in done if raw]}")
    return {**found, "said": said[:5]}
