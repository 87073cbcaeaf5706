"""SIGINT and SIGTERM at random moments of every command.

A command that is interrupted ends with 130 (before and after its work: by the signal
itself, for which a shell says 130, too), one that is terminated by the signal. Neither
prints a traceback or leaves half a file; what it has cached is whole. Moments begin
when the interpreter has started: what it prints before that is Python's own.
"""

import os
import pathlib
import random
import signal
import tempfile
import time
from typing import Any

from benchmarks import reliability_commands as commands
from benchmarks._record import Figures

SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
_INTERRUPTED = {130, -signal.SIGINT}
_STARTED_SECONDS = 0.15
_ENDING_SECONDS = 0.25
"""A process that ends so soon after a signal may have been ending: no code is wrong."""


def _codes(sent: int) -> set[int]:
    return _INTERRUPTED if sent == signal.SIGINT else {-sent}


def _faults(
    name: str, done: commands.Ended, codes: set[int], folder: pathlib.Path
) -> list[str]:
    found = [] if done.code in codes else [f"exit code {done.code}"]
    if "Traceback" in done.err:
        found.append(f"a traceback: {done.err[-400:]}")
    return [f"{name}: {fault}" for fault in [*found, *commands.left_behind(folder)]]


def signals(name: str, count: int, seed: int, say: Any) -> Figures:
    """The figures of `count` signals, in turns, to one command."""
    draw = random.Random(f"{seed} {name}")
    found = {"tries": count, "right": 0, "lost": 0, "raw": 0, "in_time": 0}
    said: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        if "plan.json" in commands.COMMANDS[name]:
            commands.prepared(folder)
        alone = commands.ran(commands.COMMANDS[name], folder)
        if alone.code not in (0, 1) or commands.left_behind(folder):
            raise RuntimeError(f"{name} fails by itself: {alone.err[-1000:]}")
        for number in range(count):
            commands.cleared(folder)
            what, sent = [*SIGNALS.items()][number % 2]
            after = draw.uniform(_STARTED_SECONDS, alone.seconds)
            since = time.perf_counter()
            process = commands.started(commands.COMMANDS[name], folder)
            time.sleep(after)
            in_time = process.poll() is None
            if in_time:
                os.kill(process.pid, sent)
            done = commands.ended(process, since)
            found["in_time"] += in_time
            ended = not in_time or done.seconds - after < _ENDING_SECONDS
            codes = _codes(sent) | ({alone.code} if ended else set())
            faults = _faults(name, done, codes, folder)
            say(f"{name}: {what} after {after:.2f} s: {done.code} {faults}")
            raw = any("traceback" in fault or "exit code" in fault for fault in faults)
            found["raw" if raw else "lost" if faults else "right"] += 1
            said += [f"{what} after {after:.3f} s: {fault}" for fault in faults]
    return {**found, "seed": seed, "seconds_alone": alone.seconds, "said": said[:5]}
