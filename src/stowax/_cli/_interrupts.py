"""Ctrl-C: a command of ours ends at once, a user's script gets `KeyboardInterrupt`.

What goes silently wrong: Python raises `KeyboardInterrupt` in whatever runs next. In a
callback of JAX's (garbage collection, lowering) it is swallowed, and the command goes
on; in C++ around such a callback the process crashes. So nothing is raised in commands:
files that are not finished are removed, and the process ends.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from .._files import remove_unfinished

INTERRUPTED = 130


def _leave(*_: Any) -> NoReturn:
    remove_unfinished()
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def _handled(before: Any, handler: Any) -> Iterator[None]:
    """`handler` in the place of `before`; what somebody else has set stays."""
    if signal.getsignal(signal.SIGINT) is not before:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)


def ends_at_once() -> contextlib.AbstractContextManager[None]:
    """In here Ctrl-C ends the process, where it would without a word (`__main__`)."""
    return _handled(signal.SIG_DFL, _leave)


def as_python_does() -> contextlib.AbstractContextManager[None]:
    """In here, within `ends_at_once`, Ctrl-C raises `KeyboardInterrupt`."""
    return _handled(_leave, signal.default_int_handler)


def ended_by_an_interrupt() -> NoReturn:
    """Ends the process as Python would, but for taking its objects down.

    What an interrupt leaves of a trace is half made, and JAX crashes taking it down
    (0.10.2). The script's threads end first, and what it has registered at exit runs.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)
