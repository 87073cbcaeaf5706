"""Kill and resume: SIGKILL at random moments of a planned training, then go on.

Every process goes on from the newest whole checkpoint, and is killed. When the training
is through, the loss of every step, however often it was made, has to be that of a
training that nobody killed, to the bit; then another training begins.
"""

import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import stowax
from benchmarks._record import ROOT, Figures
from benchmarks.models import reliable
from benchmarks.reliability_training import ROWS, WIDTH

EVERY = 5
_PATIENCE_SECONDS = 300


def _program(folder: pathlib.Path, steps: int) -> list[str]:
    module = "benchmarks.reliability_training"
    return [sys.executable, "-m", module, str(folder), str(steps), str(EVERY)]


def _ran(folder: pathlib.Path, steps: int, seconds: float | None) -> tuple[int, str]:
    """Exit code and stderr of a training that is killed after `seconds`."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(_program(folder, steps), stderr=said, cwd=ROOT)
        try:
            process.wait(_PATIENCE_SECONDS if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        said.seek(0)
        return process.returncode, said.read()


def _losses(folder: pathlib.Path) -> dict[str, set[str]]:
    """What was written for every step; a line that a kill cut is none."""
    found: dict[str, set[str]] = {}
    path = folder / "losses"
    for line in path.read_text().splitlines(True) if path.exists() else ():
        number, _, loss = line.partition(" ")
        if line.endswith("\n"):
            found.setdefault(number, set()).add(loss)
    return found


def kills(count: int, steps: int, seed: int, say: Any) -> Figures:
    """The figures of `count` kills of trainings of `steps` steps."""
    draw = random.Random(seed)
    found = {"tries": count, "right": 0, "lost": 0, "raw": 0, "trainings": 0}
    said: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        plan = stowax.plan(
            reliable.train_step,
            *(*reliable.initial(WIDTH), reliable.batch(0, ROWS, WIDTH)),
            target="h200",
            pin={"optimizer state": "offload", "*tanh*": "recompute"},
            progress=False,
        )

        def fresh(what: str) -> pathlib.Path:
            new = folder / what
            new.mkdir()
            plan.save(new / "plan.json")
            return new

        whole = fresh("whole")
        started = time.perf_counter()
        code, error = _ran(whole, steps, None)
        seconds, expected = time.perf_counter() - started, _losses(whole)
        if code or len(expected) != steps:
            raise RuntimeError(f"the training fails by itself: {error[-1000:]}")
        while found["right"] + found["lost"] + found["raw"] < count:
            found["trainings"] += 1
            killed, raw = 0, False
            here = fresh(str(found["trainings"]))
            while not raw:
                left = count - killed - found["right"] - found["lost"] - found["raw"]
                after = draw.uniform(0.05, seconds) if left else None
                code, error = _ran(here, steps, after)
                if code == -signal.SIGKILL and after is not None:
                    killed += 1
                    say(f"killed {killed} after {after:.2f} s: {len(_losses(here))}")
                elif code == 0:
                    break
                else:
                    raw = True
                    said.append(error[-600:])
            if raw:
                found["raw"] += max(1, killed)
            else:
                right = _losses(here) == expected
                found["right" if right else "lost"] += killed
                if not right:
                    said.append(f"training {found['trainings']}: other losses")
    return {**found, "steps": steps, "seed": seed, "said": said[:5]}
