"""Memory of the process from step to step, and the lines that keep what they allocate.

The process's own memory is read at every step, which says that it grows, and not where.
So when it does, Python's `tracemalloc` looks at the next eight: NumPy and Python tell
it of every allocation with its stack. Only then, as it slows those steps down. A queue
that fills up grows for some steps, too, so a line has to keep as much in later ones.
What a library allocates in C by itself is not seen, nor XLA's: arrays of JAX's are
followed by `_watch`. On Linux only; elsewhere this memory is unknown.
"""

import itertools
import os
import tracemalloc
from collections import Counter
from typing import Any

from .._records._audit import Grown, Resident
from .._where import GENERATED, Place, is_jaxs_file, is_users_file

_FIRST_CALLS = 8  # of any function; after that, only of where steps begin
# So much within so many steps, and it is worth a look at the lines. An audit itself
# takes some KiB a step, for what it notes.
_GROWN_BYTES = {3: 1 << 18, 48: 1 << 21}
_COUNTED_AT = (2, 5, 8)  # steps from then on
_MOST_LOOKS = 2
_FRAMES = 12
_KEPT_BYTES = 1 << 15  # a step; below are logs, counters and caches that fill up
_PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
_OWN = os.path.dirname(__file__) + os.sep


class HostMemory:
    """Asked at every call; `grown` are lines that kept what they made, when it ends."""

    def __init__(self) -> None:
        self._process = Statm()
        self._peak = 0
        self.resident: list[Resident] = []
        self.grown: tuple[Grown, ...] = ()
        self._seen: dict[Any, list[int]] = {}
        self._looks = 0
        self._traced: Any = None  # the call that is followed
        self._steps = 0
        self._sizes: list[tuple[int, Counter[Place]]] = []

    def look(self) -> None:
        """Between calls: what is taken there may be given back until the next one."""
        self._peak = max(self._peak, self._process.resident_bytes())

    def at_call(self, call: Any, count: int, leads: bool, event: int) -> None:
        """Call `count` of a function is about to be noted as event `event`."""
        if not leads and count > _FIRST_CALLS:
            return
        now = self._process.resident_bytes()
        self.resident.append(Resident(event, now, self._peak))
        self._peak = 0
        seen = self._seen.setdefault(call, [])
        seen.append(now)
        if self._traced == call:
            self._steps += 1
            if self._steps in _COUNTED_AT:
                self._sizes.append((self._steps, _traced_sizes()))
            if self._steps == _COUNTED_AT[-1]:
                self._stop()
        elif self._traced is None:
            if any(
                len(seen) > apart and now - seen[-1 - apart] >= enough
                for apart, enough in _GROWN_BYTES.items()
            ):
                self._look(call)
            del seen[: -max(_GROWN_BYTES)]

    def _look(self, call: Any) -> None:
        if self._looks < _MOST_LOOKS and not tracemalloc.is_tracing():
            self._looks += 1
            self._traced, self._steps = call, 0
            tracemalloc.start(_FRAMES)

    def _stop(self) -> None:
        self._traced = None
        tracemalloc.stop()
        for place in self._sizes[-1][1]:
            rates = [
                (now[place] - before[place]) / (step - earlier)
                for (earlier, before), (step, now) in itertools.pairwise(self._sizes)
            ]
            if min(rates) >= max(_KEPT_BYTES, max(rates) / 2):
                self.grown = (*self.grown, Grown(place, round(rates[-1])))
        self._sizes = []

    def end(self) -> None:
        """Looks no more; of a loop that is over, what it kept by then counts."""
        self._process.close()
        if self._traced is not None:
            if len(self._sizes) == 1:
                self._sizes.append((self._steps + 1, _traced_sizes()))
            if len(self._sizes) > 1:
                self._stop()
            else:
                self._traced = None
                tracemalloc.stop()


def _traced_sizes() -> Counter[Place]:
    """Bytes that are alive, by the user's line that allocated them."""
    found: Counter[Place] = Counter()
    for group in tracemalloc.take_snapshot().statistics("traceback"):
        for frame in reversed(group.traceback):  # innermost first
            file = frame.filename
            if is_users_file(file) and file != GENERATED:
                found[Place(file, frame.lineno, "", 0)] += group.size
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
