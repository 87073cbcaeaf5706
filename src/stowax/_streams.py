"""What the command line lets through to stdout and stderr.

A result on stdout is to be piped, so nothing else may get there: compilers and solvers
print from C, past `sys.stdout`. And on a machine without accelerators JAX's plugins
complain about that before anything has been asked of them.
"""

import contextlib
import glob
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

_NOISE = re.compile(
    rb"cudart_stub\.cc|All log messages before absl::InitializeLog"
    rb"|Logging before InitGoogle|Failed to find host bounds for accelerator type"
)

# Any of these may be an accelerator that JAX can drive; a glob too many costs a few
# lines of noise, one too few an accelerator.
_DEVICE_FILES = (
    "/dev/nvidia*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/*",
    "/dev/accel*",
    "/dev/vfio/*",
)


@contextlib.contextmanager
def only_result_on_stdout() -> Iterator[None]:
    """Sends everything that is printed meanwhile, from C too, to stderr.

    >>> with only_result_on_stdout():
    ...     print("not part of the result")
    """
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        try:
            saved = os.dup(1)
        except OSError:
            saved = None  # no stdout at all: nothing to keep clean
        if saved is not None:
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, 1)
            os.dup2(2, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def nowhere_for_stdout() -> None:
    """What is still printed to stdout goes nowhere, where nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != 1:
        os.dup2(nowhere, 1)
        os.close(nowhere)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


def _scratch() -> BinaryIO | None:
    """A file without a name: in memory, or in a temporary folder; `None` without."""
    with contextlib.suppress(AttributeError, OSError):
        return os.fdopen(os.memfd_create("stowax"), "w+b")
    with contextlib.suppress(OSError):
        return tempfile.TemporaryFile()
    return None


@contextlib.contextmanager
def quiet_native_log() -> Iterator[None]:
    """Keeps known chatter of the C++ plugins off stderr; everything else is passed on.

    libtpu and the CUDA plugin write to file descriptor 2 while they load ("could not
    find cuda drivers"), which Python's own redirection cannot catch. What is held back
    is replayed when the block ends, minus the lines that say nothing.
    """
    try:
        saved = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    held = _scratch()
    if held is None:
        os.close(saved)
        yield
        return
    with held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            held.seek(0)
            kept = [line for line in held if not _NOISE.search(line)]
            if kept:
                os.write(saved, b"".join(kept))
            os.close(saved)


def import_jax_quietly() -> None:
    """Imports JAX without its plugins' chatter, and on the CPU where nothing else is.

    Alone it would try the others first, aloud. `JAX_PLATFORMS` is set where Linux shows
    no device file of any accelerator and nobody has set it; targets that are not
    attached can be compiled for all the same.
    """
    only_cpu = (
        sys.platform == "linux"
        and "JAX_PLATFORMS" not in os.environ
        and not any(glob.glob(pattern) for pattern in _DEVICE_FILES)
    )
    if only_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    with quiet_native_log():
        import jax
    if only_cpu:
        # Also set here: a JAX that was imported before does not read it again.
        jax.config.update("jax_platforms", "cpu")
