"""A user's script, run as Python would run it, by a command that looks on.

It is `__main__`, has its arguments and its folder, and says in its own words how it
fails. What cannot be as before: JAX is loaded already when it starts. So variables such
as `JAX_ENABLE_X64` that it sets before its own `import jax` are passed on to JAX.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn

import jax

from .._errors import ArgumentError
from ._interrupts import as_python_does

# What Python says when a process is started; multiprocessing does not always.
_COPIES = ("os.fork", "os.forkpty")
_STARTS = (*_COPIES, "subprocess.Popen", "os.system")
processes: list[str] = []  # started by the script
_starting = threading.Event()  # one of multiprocessing's
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TRUE = {"1", "true", "yes", "on", "y", "t"}
_following = threading.Event()
_hooked: list[bool] = []  # an audit hook of Python's stays for good


class Program(NamedTuple):
    """What is to run as `__main__`: a script, or a module of a package."""

    code: types.CodeType
    path: str  # its own name, as it reads it
    folder: str  # what Python would look for modules in first
    spec: ModuleSpec | None = None


def script_at(path: str) -> Program:
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
        code = compile(
            file.read_bytes(), str(file.absolute()), "exec", dont_inherit=True
        )
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ArgumentError(
            "SCRIPT.py",
            f"{path}{f':{line}' if line else ''}, {error}",
            "Write the path of a Python script.",
        ) from None
    return Program(code, path, str(file.absolute().parent))


def module_named(name: str) -> Program:
    """The module that `python -m name` would run, and of a package its `__main__`.

    **Raises:** `ArgumentError` where there is none.
    """
    sys.path.insert(0, os.getcwd())  # as it would be
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code: Any = spec and spec.loader and spec.loader.get_code(spec.name)  # pyright: ignore[reportAttributeAccessIssue]
    except (ImportError, ValueError, SyntaxError, AttributeError) as error:
        raise ArgumentError(
            "-m", f"{name}, {error}", "Write a module as Python would import it."
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    if code is None:
        raise ArgumentError(
            "-m",
            f"{name}, no module that can run",
            "Write a module as Python would import it, such as package.train.",
        )
    return Program(code, code.co_filename, os.getcwd(), spec)


def run_program(
    program: Program,
    words: tuple[str, ...],
    leaves: Callable[[int], int],
    fails: Callable[[BaseException], None] = lambda error: None,
) -> BaseException | None:
    """Runs it to the end of its threads; what it raised, if anything.

    A failure's traceback has been shown as the script would have shown it, and before
    that `fails(error)` was called. Before the script leaves by `os._exit(code)`,
    `leaves(code)` is called, and gives another code.
    """
    file = program.code.co_filename
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__)
    if program.spec is not None:
        module.__spec__, module.__package__ = program.spec, program.spec.parent
        module.__loader__ = program.spec.loader
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    streams = sys.stdout, sys.stderr
    sys.argv = [program.path, *words]
    sys.path[0:0] = [program.folder]
    sys.modules["__main__"] = module
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_heard)
    _following.set()
    try:
        with _counting_processes(), _leaving(leaves), as_python_does():
            exec(program.code, module.__dict__)
            for thread in threading.enumerate():
                # As the end of a process waits for them.
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
    except BaseException as error:
        try:
            if not isinstance(error, SystemExit | KeyboardInterrupt):
                fails(error)
        finally:
            _shown(error)
        return error
    finally:
        _following.clear()
        sys.argv, sys.path[:], sys.modules["__main__"] = before
        sys.stdout, sys.stderr = streams
        # What its global variables hold lives until the audit has looked at it.
        _last[:] = [module]
    return None


_last: list[types.ModuleType] = []


def exit_code(error: BaseException | None) -> int:
    """What Python would exit with after a script that ended in this."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    return 1


def _without_own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without what looks on: it begins at the script's own line."""
    frames = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OWN):
            frames.append(trace)
        trace = trace.tb_next
    for frame, inner in zip(frames, [*frames[1:], None], strict=True):
        frame.tb_next = inner
    return frames[0] if frames else None


def _shown(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
        return
    chained: BaseException | None = error
    seen: list[BaseException] = []
    while chained is not None and chained not in seen:
        seen.append(chained)
        chained.__traceback__ = _without_own(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)


@contextlib.contextmanager
def _counting_processes() -> Iterator[None]:
    """Notes the processes of multiprocessing that are started in here."""
    processes.clear()
    start = BaseProcess.start

    def started(self: BaseProcess) -> None:
        processes.append("multiprocessing")
        _starting.set()
        try:
            start(self)
        finally:
            _starting.clear()

    BaseProcess.start = started
    try:
        yield
    finally:
        if BaseProcess.start is started:
            BaseProcess.start = start


@contextlib.contextmanager
def _leaving(leaves: Callable[[int], int]) -> Iterator[None]:
    """In here `os._exit` is told of first, but not in a copy of the process."""
    leave, process = os._exit, os.getpid()

    def _exit(status: int) -> NoReturn:
        if os.getpid() == process:
            os._exit = leave
            status = leaves(status)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError):
                    stream.flush()
        leave(status)

    os._exit = _exit
    try:
        yield
    finally:
        os._exit = leave


def _may_run_jax(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a new process is a copy of this one, or Python as far as one can see."""
    return event in _COPIES or any(
        "python" in os.fsdecode(word)
        for argument in arguments[:2]
        for word in (argument if isinstance(argument, list | tuple) else [argument])
        if isinstance(word, str | bytes | os.PathLike)
    )


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    """Counts processes that the script starts, and tells JAX of its variables."""
    if not _following.is_set():
        return
    if event in _STARTS and not _starting.is_set() and _may_run_jax(event, arguments):
        processes.append(event)
    if event != "os.putenv":
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
