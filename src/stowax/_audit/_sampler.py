"""Where the loop's thread stands while the device has nothing to do.

A thread looks every few milliseconds. What it finds outside of JAX, with the newest
result ready, is time in which the device could have worked.
"""

import sys
import threading
import time
from types import FrameType
from typing import Any

from .._records._audit import Sample
from .._where import Place, is_jax, is_users
from ._pace import Pace

_EVERY_SECONDS, _RESTS_SECONDS = 0.004, 0.05
_DEPTH = 40


class Sampler:
    """Samples the loop's thread from `start` to `stop`.

    **Arguments:** `thread` tells who made the newest call, `newest` a result of it,
    `pace` whether nobody looks for a while. `look` is called every time.
    """

    def __init__(self, thread: Any, newest: Any, pace: Pace, look: Any):
        self._look = look
        self.samples: list[Sample] = []
        self._thread, self._newest, self._pace = thread, newest, pace
        self._over = threading.Event()
        self._sampler = threading.Thread(
            target=self._run, name="stowax-audit", daemon=True
        )

    def start(self) -> None:
        """Begins to look."""
        self._sampler.start()

    def stop(self) -> None:
        """Ends; the samples are complete."""
        self._over.set()
        self._sampler.join()

    def _run(self) -> None:
        before = time.perf_counter()
        while not self._over.wait(
            _RESTS_SECONDS if self._pace.resting else _EVERY_SECONDS
        ):
            now = time.perf_counter()
            self._look()
            if not self._pace.resting:
                thread = self._thread()
                places = _places(sys._current_frames().get(thread))
                if places and _is_idle(self._newest()):
                    self.samples.append(Sample(now, now - before, places, thread))
            before = now


def _places(frame: FrameType | None) -> tuple[Place, ...]:
    """The user's lines on the stack; none where JAX, or an audit, is at work."""
    found = []
    for _ in range(_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        if is_jax(code):
            return ()
        if is_users(code):
            line = frame.f_lineno or 0
            found.append(
                Place(code.co_filename, line, code.co_name, code.co_firstlineno)
            )
        frame = frame.f_back
    return tuple(found)


def _is_idle(newest: Any) -> bool:
    try:
        return newest is not None and newest.is_ready()
    except RuntimeError:  # deleted meanwhile: the next step was dispatched
        return False
