"""Where calibrations are kept: one file per machine, kind and number of devices.

`STOWAX_CALIBRATION` names one file that is written and read instead. Else they are in
the folder `stowax/calibration` of the user's cache (`XDG_CACHE_HOME`, or `~/.cache`).

A file that cannot be used is no error: plans were made without one before, and are then
made so again. But it is never ignored in silence, as figures would change without a
word. A job of several processes uses none of its machines' own files: its processes
have to make one plan, and would make several from rates that differ in the third digit.
"""

import json
import os
import pathlib
import platform
import re

from .._errors import ArgumentError
from .._files import read_own, user_cache, write_whole
from .._record_json import NotSuchARecord, json_of
from .._records._calibration import CalibrationRecord, calibration_of

VARIABLE = "STOWAX_CALIBRATION"
"""Environment variable that names the file."""

_AGAIN = "stowax calibrate measures again"


def calibration_path(device_kind: str, device_count: int) -> pathlib.Path:
    """The file for this machine with so many devices of a kind."""
    if named := os.environ.get(VARIABLE):
        return pathlib.Path(os.path.expanduser(named))
    name = f"{_plain(device_kind)}-x{device_count}-{_plain(host_name())}.json"
    return user_cache() / "calibration" / name


def host_name() -> str:
    """What this machine is told apart by."""
    return platform.node() or "localhost"


def save_calibration(found: CalibrationRecord) -> pathlib.Path:
    """Writes a calibration where `find_calibration` looks; the path.

    **Raises:** `ArgumentError` if nothing can be written there.
    """
    path = calibration_path(found.device_kind, found.device_count)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            "save",
            f"True, and {str(path.parent)!r} cannot be made ({error.strerror})",
            f"Set {VARIABLE} to a file that can be written, or save nothing.",
        ) from None
    write_whole(path, json.dumps(found.to_json(), indent=1) + "\n", argument=VARIABLE)
    return path


def find_calibration(
    device_kind: str, device_count: int, jax_version: str, *, processes: int = 1
) -> tuple[CalibrationRecord | None, str | None]:
    """The calibration to use here, or why one that is there is not used.

    **Arguments:** `device_count` is of this process, `processes` how many make the same
    plan.

    **Returns:** a calibration and `None`, `None` and a note, or twice `None` where
    nothing was measured.
    """
    path = calibration_path(device_kind, device_count)
    try:
        found = calibration_of(json_of(read_own(path)))
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (OSError, ValueError) as error:
        kind = "cannot be read" if isinstance(error, OSError) else "is no calibration"
        if isinstance(error, NotSuchARecord) and "format" in str(error):
            kind = "cannot be used"
        return None, _unused(path, f"{kind} ({error})")
    here, there = (device_kind, device_count), (found.device_kind, found.device_count)
    if here != there:
        reason = f"is of {_devices(*there)}, and this process has {_devices(*here)}"
    elif found.versions.get("jax") != jax_version:
        reason = f"is of JAX {found.versions.get('jax')}, and this is {jax_version}"
    elif os.environ.get(VARIABLE):
        return found, None
    elif found.host != host_name():
        reason = f"is of the machine {found.host!r}, and this is {host_name()!r}"
    elif processes > 1:
        reason = (
            f"is one machine's, and {processes} processes have to make the same plan: "
            f"set {VARIABLE} to one file for all of them"
        )
        return None, f"the calibration {str(path)!r} is not used: it {reason}"
    else:
        return found, None
    return None, _unused(path, reason)


def _unused(path: pathlib.Path, reason: str) -> str:
    return f"the calibration {str(path)!r} is not used: it {reason}; {_AGAIN}"


def _devices(kind: str, count: int) -> str:
    return f"{count} {kind} device{'s' * (count != 1)}"


def _plain(text: str) -> str:
    """`text` as part of a file's name: `NVIDIA H200` → `nvidia-h200`."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unknown"
