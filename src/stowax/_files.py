"""Files that appear whole or not at all, and that are known beforehand to be writable.

A plan or a page is written after minutes of compiling: what can be said before is said
before, and what goes wrong later leaves no half a file.
"""

import contextlib
import os
import pathlib
import secrets

from ._errors import ArgumentError


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
    wanted = pathlib.Path(path)
    folder, got = wanted.absolute().parent, repr(os.fspath(path))
    if not folder.is_dir():
        raise ArgumentError(
            argument,
            f"{got}, and {str(folder)!r} is no folder",
            "Make the folder, or write another path.",
        )
    if not os.access(folder, os.W_OK) or wanted.is_dir():
        raise ArgumentError(
            argument, f"{got}, which cannot be written", "Write the path of a file."
        )


def write_whole(
    path: str | os.PathLike[str], content: str | bytes, argument: str = "path"
) -> None:
    """Writes text or bytes; the file appears whole or not at all.

    **Raises:** `ArgumentError`, about `argument`, if nothing can be written there.
    """
    target = pathlib.Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        data = content.encode("utf-8") if isinstance(content, str) else content
        temporary.write_bytes(data)
        os.replace(temporary, target)
    except OSError as error:
        raise ArgumentError(
            argument,
            f"{os.fspath(path)!r}, which cannot be written ({error.strerror})",
            "Give a file in a folder that exists and may be written to.",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
