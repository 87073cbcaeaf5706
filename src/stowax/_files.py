"""Files that appear whole or not at all, and that are known beforehand to be writable.

A plan or a page is written after minutes of compiling: what can be said before is said
before, and what goes wrong later leaves no half a file.
"""

import contextlib
import errno
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator

from ._errors import ArgumentError

_A_FILE = "Write the path of a file."

unfinished: set[pathlib.Path] = set()
"""Files and folders that are to go before this process may end."""


def user_cache() -> pathlib.Path:
    """The folder `stowax` of the user's cache (`XDG_CACHE_HOME`, or `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, says the XDG base directory specification.
    cache = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return pathlib.Path(cache, "stowax")


def check_writable(path: str | os.PathLike[str], argument: str) -> None:
    """Fails before minutes of work, not after.

    **Raises:** `ArgumentError`, about `argument`, if no file can be made at `path`.
    """
    got, there = repr(os.fspath(path)), _status_of(path)
    if there is not None and not stat.S_ISREG(there.st_mode):
        if stat.S_ISDIR(there.st_mode) or not os.access(path, os.W_OK):
            raise ArgumentError(argument, f"{got}, which cannot be written", _A_FILE)
        return
    folder = pathlib.Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise ArgumentError(
            argument,
            f"{got}, and {str(folder)!r} is no folder",
            "Make the folder, or write another path.",
        )
    if not os.access(folder, os.W_OK):
        raise ArgumentError(argument, f"{got}, which cannot be written", _A_FILE)


def write_whole(
    path: str | os.PathLike[str], content: str | bytes, argument: str = "path"
) -> None:
    """Writes text or bytes where a user said; a file appears whole or not at all.

    A file that is there keeps its mode, and a link stays one: what it points to is
    written. Devices, pipes and our own stdout are written to as they are.

    **Raises:** `ArgumentError`, about `argument`, if nothing can be written there.
    """
    data = content if isinstance(content, bytes) else content.encode(errors="replace")
    try:
        there = _status_of(path)
        if there is not None and (own := _own_stream(there)) is not None:
            with open(own, "wb", closefd=False) as stream:
                stream.write(data)
        elif there is not None and not stat.S_ISREG(there.st_mode):
            with open(path, "wb") as stream:
                stream.write(data)
        else:
            mode = None if there is None else stat.S_IMODE(there.st_mode)
            target = pathlib.Path(os.path.realpath(path))
            if target.is_symlink():  # links in a circle
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            _replace(target, data, mode)
    except OSError as error:
        raise ArgumentError(
            argument,
            f"{os.fspath(path)!r}, which cannot be written ({error.strerror})",
            "Give a file in a folder that exists and may be written to.",
        ) from None


def write_own(path: pathlib.Path, content: bytes) -> None:
    """Writes a file of a folder that is ours alone, whole or not at all.

    Whatever has its name makes way: a link there is replaced, not followed.

    **Raises:** `OSError`.
    """
    _replace(path, content, None)


def read_own(path: pathlib.Path) -> bytes:
    """What such a file holds. A pipe in its place would be waited for, and is not read.

    **Raises:** `OSError`.
    """
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "a pipe", str(path))
    return path.read_bytes()


def _status_of(path: str | os.PathLike[str]) -> os.stat_result | None:
    """What is there, behind links; `None`: nothing that can be looked at."""
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None


def _own_stream(there: os.stat_result) -> int | None:
    """The descriptor of our stdout or stderr, if that is a file and goes there.

    `-o /dev/stdout > file` names that file. What is printed afterwards would be lost
    with another one in its place, or written over what stands there.
    """
    for descriptor in (1, 2) if stat.S_ISREG(there.st_mode) else ():
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), there):
                return descriptor
    return None


def _replace(target: pathlib.Path, data: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    unfinished.add(temporary)
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # not every file system has modes
                    os.chmod(temporary, mode)
            file.write(data)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
        unfinished.discard(temporary)


def remove_unfinished() -> None:
    """Removes them, for a process that ends in the middle of something."""
    import shutil

    for path in [*unfinished]:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()


def scratch_folder(prefix: str) -> contextlib.AbstractContextManager[str]:
    """A temporary folder, made now, for a `with` block.

    **Raises:** `OSError` if none can be made.
    """
    import tempfile  # as long to import as all of this package

    made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    return _noted(made, pathlib.Path(made.name))


@contextlib.contextmanager
def _noted(
    made: contextlib.AbstractContextManager[str], path: pathlib.Path
) -> Iterator[str]:
    unfinished.add(path)
    try:
        with made as folder:
            yield folder
    finally:
        unfinished.discard(path)
