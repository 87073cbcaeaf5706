"""Memory of the process from step to step, and the lines that keep what they allocate.

The process's own memory is read at every step, which says that it grows, and not where.
So when it does, Python's `tracemalloc` looks at three steps: NumPy and Python tell it
of every allocation with its stack. Only then, as it slows those steps down. It does not
see what a library allocates in C by itself, nor XLA: arrays of JAX's are followed by
`_watch`. On Linux only; elsewhere this memory is unknown.
"""

import os
import tracemalloc
from collections import Counter
from typing import Any

from .._records._audit import Grown, Resident
from .._where import Place, is_jaxs_file, is_users_file

_FIRST_CALLS = 8  # of any function; after that, only of where steps begin
_GROWN_BYTES = 1 << 16  # within `_APART` steps, and it is worth a look at the lines
_APART = 3
_TRACED_STEPS = 3
_MOST_LOOKS = 2
_FRAMES = 16
_KEPT_BYTES = 4096  # a step; below are counters and histories of losses
_PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
_OWN = os.path.dirname(__file__) + os.sep


class HostMemory:
    """Asked at every call; `grown` are lines that kept what they made, when it ends."""

    def __init__(self) -> None:
        self._process = Statm()
        self.resident: list[Resident] = []
        self.grown: tuple[Grown, ...] = ()
        self._seen: dict[Any, list[int]] = {}
        self._looks = 0
        self._traced: Any = None  # the call that is followed
        self._sizes: list[Counter[Place]] = []

    def at_call(self, call: Any, count: int, leads: bool, event: int) -> None:
        """Call `count` of a function is about to be noted as event `event`."""
        if not leads and count > _FIRST_CALLS:
            return
        now = self._process.resident_bytes()
        self.resident.append(Resident(event, now))
        seen = self._seen.setdefault(call, [])
        seen.append(now)
        if self._traced == call:
            self._sizes.append(_traced_sizes())
            if len(self._sizes) == _TRACED_STEPS:
                self._stop()
        elif self._traced is None and len(seen) > _APART:
            if now - seen[-1 - _APART] >= _GROWN_BYTES:
                self._look(call)
            del seen[:-_APART]

    def _look(self, call: Any) -> None:
        if self._looks < _MOST_LOOKS and not tracemalloc.is_tracing():
            self._looks += 1
            self._traced = call
            tracemalloc.start(_FRAMES)

    def _stop(self) -> None:
        self._traced = None
        tracemalloc.stop()
        lines = [
            Grown(place, (last - self._sizes[0][place]) // (len(self._sizes) - 1))
            for place, last in self._sizes[-1].items()
            if all(
                after[place] - before[place] >= _KEPT_BYTES
                for before, after in zip(self._sizes, self._sizes[1:], strict=False)
            )
        ]
        self.grown = (*self.grown, *lines)
        self._sizes = []

    def end(self) -> None:
        """Looks no more; of a loop that is over, what it kept by then counts."""
        self._process.close()
        if self._traced is not None:
            if len(self._sizes) == 1:
                self._sizes.append(_traced_sizes())
            if len(self._sizes) > 1:
                self._stop()
            else:
                self._traced = None
                tracemalloc.stop()


def _traced_sizes() -> Counter[Place]:
    """Bytes that are alive, by the user's line that allocated them."""
    found: Counter[Place] = Counter()
    for trace in tracemalloc.take_snapshot().traces:
        for frame in reversed(trace.traceback):  # innermost first
            file = frame.filename
            if is_users_file(file):
                found[Place(file, frame.lineno, "", 0)] += trace.size
                break
            if is_jaxs_file(file) or file.startswith(_OWN):
                break
    return found


class Statm:
    """The system's figures of this process; open as long as each step reads them."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def resident_bytes(self) -> int:
        """Bytes of memory that are the process's own; 0 where the system does not say.

        Without pages of files, which a dataset that is mapped into memory fills up.
        """
        if self._file < 0:
            return 0
        fields = os.pread(self._file, 128, 0).split()
        return (int(fields[1]) - int(fields[2])) * _PAGE

    def close(self) -> None:
        """Reads no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
