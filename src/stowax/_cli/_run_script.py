"""A user's script, run as Python would run it, by a command that looks on.

It is `__main__`, has its arguments and its folder, and says in its own words how it
fails. What cannot be as before: JAX is loaded already when it starts. So variables such
as `JAX_ENABLE_X64` that it sets before its own `import jax` are passed on to JAX.
"""

import os
import pathlib
import sys
import threading
import types
from typing import Any

import jax

from .._errors import ArgumentError

_TRUE = {"1", "true", "yes", "on", "y", "t"}
_following = threading.Event()
_hooked: list[bool] = []  # an audit hook of Python's stays for good


def compiled_script(path: str) -> types.CodeType:
    """The script at `path`, ready to run.

    **Raises:** `ArgumentError` where there is none, or it is no Python.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        got = "a folder" if file.is_dir() else "no such file"
        raise ArgumentError(
            "SCRIPT.py", f"{path}, {got}", "Write the path of a script."
        )
    try:
        return compile(file.read_bytes(), str(file.absolute()), "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ArgumentError(
            "SCRIPT.py",
            f"{path}{f':{line}' if line else ''}, {error}",
            "Write the path of a Python script.",
        ) from None


def run_script(code: types.CodeType, words: tuple[str, ...]) -> BaseException | None:
    """Runs it to the end of its threads; what it raised, if anything.

    A failure's traceback has been shown as the script would have shown it.
    """
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=code.co_filename, __builtins__=__builtins__)
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [code.co_filename, *words]
    sys.path[0:0] = [os.path.dirname(code.co_filename)]
    sys.modules["__main__"] = module
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_heard)
    _following.set()
    try:
        exec(code, module.__dict__)
        for thread in threading.enumerate():
            # As the end of a process waits for them.
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except BaseException as error:
        _shown(error, code.co_filename)
        return error
    finally:
        _following.clear()
        sys.argv, sys.path[:], sys.modules["__main__"] = before
        # What its global variables hold lives until the audit has looked at it.
        _last[:] = [module]
    return None


_last: list[types.ModuleType] = []


def _shown(error: BaseException, file: str) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    """Tells JAX of its variables that the script sets."""
    if event != "os.putenv" or not _following.is_set():
        return
    name = os.fsdecode(arguments[0]).lower()
    text = os.fsdecode(arguments[1])
    if name.startswith("jax_") and hasattr(jax.config, name):
        now = getattr(jax.config, name)
        value: Any = text
        if isinstance(now, bool):
            value = text.lower() in _TRUE
        elif isinstance(now, int):
            value = int(text)
        jax.config.update(name, value)
