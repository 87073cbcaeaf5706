"""The line of the user's that is running: the innermost frame that is nobody else's.

Frames of stowax, of JAX, of installed packages and of the standard library are passed
over: what `optax.apply_updates` dispatches belongs to the line that called it. This is
asked at every event of an audit, so what is known of a function is kept.
"""

import functools
import os
import re
import site
import sys
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple


class Place(NamedTuple):
    """A line, and the function that it stands in, by its own first line."""

    file: str
    line: int
    function: str
    first: int


GENERATED = "<string>"  # the file of code that Python makes, and of `python -c`
NOWHERE = Place("<unknown>", 0, "", 0)

OWN_FOLDER = os.path.dirname(__file__) + os.sep
"""Where stowax itself lies: its lines are never a user's."""


@functools.cache
def _folder_of_jax() -> str:
    module = sys.modules.get("jax")
    return os.path.dirname((module and module.__file__) or "")


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[k] for k in ("purelib", "platlib", "stdlib", "platstdlib")}
    folders |= {*site.getsitepackages(), OWN_FOLDER.rstrip(os.sep)}
    if jaxs := _folder_of_jax():
        folders.add(jaxs)
    return (*(folder + os.sep for folder in folders), "<frozen ", "<attrs generated ")


def is_users(code: CodeType) -> bool:
    """Whether a user wrote this function, and no library."""
    # Asked by file, as equal code may stand in several.
    return is_users_file(code.co_filename) and not _is_generated(code)


def _is_generated(code: CodeType) -> bool:
    """Whether Python wrote it, such as the `__init__` of a dataclass."""
    return code.co_filename == GENERATED and code.co_name.startswith("__")


@functools.lru_cache(maxsize=1 << 14)
def is_users_file(filename: str) -> bool:
    """Whether a file is a user's, and no library's."""
    return not filename.startswith(_libraries())


def is_jax(code: CodeType) -> bool:
    """Whether JAX itself wrote this function."""
    return is_jaxs_file(code.co_filename)


@functools.lru_cache(maxsize=1 << 14)
def is_jaxs_file(filename: str) -> bool:
    """Whether a file is JAX's own."""
    jaxs = _folder_of_jax()
    return bool(jaxs) and filename.startswith(jaxs + os.sep)


_LINE_OF_CODE = re.compile(r'"([^"]+)":(\d+):\d+')


def line_in(traceback: str) -> str:
    """The user's innermost line in a traceback as MLIR writes it, as `file:line`.

    Where no line is a user's, the innermost of another library; empty for none. Frames
    behind those of stowax are those of who called it, not of the step.

    >>> line_in('loc("f"("train.py":3:1 to :9) at "g"("main.py":7:1 to :2))')
    'train.py:3'
    """
    others = ""
    for file, line in _LINE_OF_CODE.findall(traceback):
        if file.startswith(OWN_FOLDER):
            break
        if is_users_file(file):
            return f"{file}:{line}"
        if not others and not is_jaxs_file(file):
            others = f"{file}:{line}"
    return others


_places: dict[tuple[int, int | None], tuple[CodeType, Place]] = {}


def place_of(frame: FrameType | None) -> Place:
    """The user's innermost line, from `frame` outwards."""
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename) and not _is_generated(code):
            line = frame.f_lineno
            known = _places.get((id(code), line))
            if known is None:
                place = Place(code.co_filename, line, code.co_name, code.co_firstlineno)
                known = _places[id(code), line] = code, place
            return known[1]
        frame = frame.f_back
    return NOWHERE


def called_by_user() -> bool:
    """Whether what stowax stands in for was called by the user, and by no library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDER):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code)


def here() -> Place:
    """The user's line that is running."""
    return place_of(sys._getframe(1))
