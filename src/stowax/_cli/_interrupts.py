"""Ctrl-C: a command of ours ends at once, a user's script gets `KeyboardInterrupt`.

What goes silently wrong: Python raises `KeyboardInterrupt` in whatever runs next. In a
callback of JAX's (garbage collection, lowering) it is swallowed, and the command goes
on; in C++ around such a callback the process crashes. So nothing is raised in commands:
files that are not finished are removed, and the process ends. Python calls no handler
before C++ returns, and a compile takes up to minutes: so a thread hears it, too.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .._files import remove_unfinished

INTERRUPTED = 130
_LEFT_BY = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

_ends = threading.Lock()  # for good, by the first who leaves
_known: list[Callable[[], str]] = []


def _leave(number: int = signal.SIGINT, *_: Any) -> None:
    """Ends the process for a signal, unless another thread does already."""
    if not _ends.acquire(blocking=False):
        return
    remove_unfinished()
    with contextlib.suppress(Exception):
        os.write(2, b"".join(f"{known()}\n".encode() for known in _known))
    with contextlib.suppress(OSError):
        os.write(2, f"{_LEFT_BY[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


@contextlib.contextmanager
def told_when_interrupted(known: Callable[[], str]) -> Iterator[None]:
    """In here Ctrl-C first shows what is known, on stderr: it is not the result.

    So does SIGTERM, which a scheduler sends when the time is up.
    """
    _known.append(known)
    ours = signal.getsignal(signal.SIGINT) is _leave
    try:
        with contextlib.ExitStack() as stack:
            if ours:
                stack.enter_context(_handled(signal.SIG_DFL, _leave, signal.SIGTERM))
            yield
    finally:
        _known.remove(known)


@contextlib.contextmanager
def _heard_at_once() -> Iterator[None]:
    """A thread that leaves for the main one, which may be compiling."""
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def wait() -> None:
        while signals := os.read(heard, 1):
            if signals[0] in _LEFT_BY:
                _leave(signals[0])
        os.close(heard)

    threading.Thread(target=wait, daemon=True).start()
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)


@contextlib.contextmanager
def _handled(
    before: Any, handler: Any, number: signal.Signals = signal.SIGINT
) -> Iterator[bool]:
    """`handler` in the place of `before`; what somebody else has set stays: `False`."""
    if signal.getsignal(number) is not before:
        yield False
        return
    signal.signal(number, handler)
    try:
        yield True
    finally:
        if signal.getsignal(number) is handler:
            signal.signal(number, before)


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """In here Ctrl-C ends the process, where it would without a word (`__main__`)."""
    with contextlib.ExitStack() as stack:
        if stack.enter_context(_handled(signal.SIG_DFL, _leave)):
            stack.enter_context(_heard_at_once())
        yield


@contextlib.contextmanager
def as_python_does() -> Iterator[None]:
    """In here, within `ends_at_once`, Ctrl-C raises `KeyboardInterrupt`."""
    with _handled(_leave, signal.default_int_handler) as ours:
        before = signal.set_wakeup_fd(-1) if ours else -1
        try:
            yield
        finally:
            if ours:
                signal.set_wakeup_fd(before)


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
