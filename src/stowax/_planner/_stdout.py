"""Standard output without what a solver's library leaves in it.

HiGHS prints a line of its own when it repairs a solution (a `printf` that its
maintainers left in; HiGHS.jl has it as issue 318), whatever it is told about output. A
command whose standard output is a result cannot have that.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """What C code prints in here goes nowhere; Python's `print` should not be called.

    Does nothing where there is no standard output, or no C library to be asked.
    """
    try:
        flush = ctypes.CDLL(None).fflush  # of every stream, by a null pointer
        kept = os.dup(1)
    except (OSError, TypeError, AttributeError):
        yield
        return
    flush(None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
