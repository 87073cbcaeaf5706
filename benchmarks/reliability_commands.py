"""The commands of `stowax` as processes: what each leaves behind, and how it ends."""

import dataclasses
import gzip
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import stowax
from benchmarks._record import ROOT
from stowax._target._program_cache import ProgramCache

STEP = ROOT / "benchmarks" / "models" / "reliable.py"
BUDGET = ("--budget", "6MiB")
_PLAN = ("plan", f"{STEP}:make", *BUDGET)
PATIENCE_SECONDS = 600

COMMANDS: dict[str, tuple[str, ...]] = {
    "targets": ("targets",),
    "plan": (*_PLAN, "--cache", "cache", "-o", "out.json"),
    "inspect": ("inspect", f"{STEP}:make", "plan.json", "--perfetto", "out.json"),
    "inspect --html": ("inspect", f"{STEP}:make", "--html", "out.html"),
    "verify": ("verify", f"{STEP}:make", "plan.json", "--steps", "2"),
    "run": ("run", *BUDGET, "--cache", "cache", "-o", "out.json", str(STEP)),
    "audit": ("audit", "-o", "out.json", "--html", "out.html", str(STEP)),
    "fit": ("fit", f"{STEP}:make_of_batch", *BUDGET, "--cache", "cache"),
    "calibrate": ("calibrate",),
}
"""Every command but `demo`, which takes minutes, and what it writes: `out.…`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


def started(
    words: Sequence[str], folder: pathlib.Path, before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """`stowax *words` in a folder that is its home, too, `before` in front."""
    # What a shell starts in the background ignores SIGINT; the command is to hear it.
    heard = ("env", "--default-signal=INT")
    return subprocess.Popen(
        [*heard, *before, sys.executable, "-m", "stowax", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(folder),
        start_new_session=True,
    )


def environment(folder: pathlib.Path) -> Mapping[str, str]:
    """The environment, with a home of its own and this checkout's stowax."""
    paths = (ROOT, ROOT / "src", os.environ.get("PYTHONPATH", ""))
    home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "home")}
    quiet = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    found = {**os.environ, **home, **quiet, "PYTHONPATH": ":".join(map(str, paths))}
    found.pop("STOWAX_CALIBRATION", None)
    return found


def ended(process: subprocess.Popen[str], since: float) -> Ended:
    """How it ended; what hangs is killed, with the code of that."""
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return Ended(process.returncode, out, err, time.perf_counter() - since)


def ran(
    words: Sequence[str], folder: pathlib.Path, before: Sequence[str] = ()
) -> Ended:
    """Runs a command to its end."""
    return ended(started(words, folder, before), time.perf_counter())


def prepared(folder: pathlib.Path) -> None:
    """A folder with `plan.json`, which some commands take."""
    done = ran((*_PLAN, "-o", "plan.json"), folder)
    if done.code:
        raise RuntimeError(f"stowax plan fails by itself: {done.err[-1000:]}")


def left_behind(folder: pathlib.Path) -> list[str]:
    """What is wrong with the files that a command left: halves, drafts, bad caches."""
    wrong = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder)
        if path.name.startswith("."):
            wrong.append(f"{name} is a draft")
        elif path.suffix == ".gz" and not _whole_program(path):
            wrong.append(f"{name} is no whole program")
        elif path.suffix == ".json" and not _whole_json(path):
            wrong.append(f"{name} is half a file")
        elif path.suffix == ".html" and "</html>" not in path.read_text()[-100:]:
            wrong.append(f"{name} is half a page")
    return wrong


def _whole_program(path: pathlib.Path) -> bool:
    try:
        gzip.decompress(path.read_bytes())
    except (OSError, EOFError):
        return False
    return ProgramCache(path.parent).read(path.stem) is not None


def _whole_json(path: pathlib.Path) -> bool:
    import json

    try:
        found = json.loads(path.read_text())
    except ValueError:
        return False
    if isinstance(found, dict) and "decisions" in found:
        stowax.load_plan(path)
    return True


def cleared(folder: pathlib.Path) -> None:
    """The folder with `plan.json` alone."""
    for path in folder.iterdir():
        if path.name == "plan.json":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
