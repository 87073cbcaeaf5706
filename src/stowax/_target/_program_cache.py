"""Compiled programs in a folder, by content: what was compiled once is read again.

JAX's own cache keeps executables, and reads them back only where their device is
attached (for compile-only TPUs JAX 0.10 writes an entry, fails to read it, and compiles
again). Planning needs less of a program: its module with the schedule, and the memory
figures. Those are kept here, and also that a compiler refused a program for its size.

What goes silently wrong: two programs under one key. So the key is made of all that a
compiler sees: the module, the names of its operations (by which copies are told apart),
the options, the devices, the versions, and the flags in the environment.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import types
import zlib
from collections.abc import Mapping
from typing import Any

from .._errors import ArgumentError, OutOfMemoryCompileError
from .._files import write_whole
from .._mlir import scopes
from .._versions import versions
from ._compiled import CompiledProgram, LoweredProgram
from ._machine import Target

_KINDS = ("argument", "output", "alias", "temp")
_FIGURES = (
    *(f"{prefix}{k}_size_in_bytes" for k in _KINDS for prefix in ("", "host_")),
    "peak_memory_in_bytes",
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadableProgram:
    """What planning reads of a compiled program: its module, and its memory figures."""

    module: bytes
    memory: Any


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramCache:
    """Compiles, or reads what was compiled before; `folder` is `None` for neither."""

    folder: pathlib.Path | None = None

    def compiled(
        self, lowered: LoweredProgram, options: Mapping[str, Any], target: Target
    ) -> ReadableProgram:
        """The program that `lowered` compiles to.

        **Raises:** as `LoweredProgram.compile`, whether it compiles or remembers.
        """
        if self.folder is None:
            return _readable(lowered.compile(dict(options) or None))
        path = self.folder / f"{_key(lowered, options, target)}.gz"
        kept = _read(path)
        if kept is None:
            kept = _compile(lowered, options)
            write_whole(path, gzip.compress(_as_bytes(*kept), 1), "cache")
        note, module = kept
        if "message" in note:
            raise OutOfMemoryCompileError(
                note["message"], note["needed_bytes"], note["available_bytes"]
            )
        memory = types.SimpleNamespace(**note["memory"])
        return ReadableProgram(module=module, memory=memory)


def cache_in(folder: str | os.PathLike[str] | None) -> ProgramCache:
    """The cache in a folder, which is made if it is not there.

    **Raises:** `ArgumentError`, about `cache`, if it cannot be.
    """
    if folder is None:
        return ProgramCache()
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(
            "cache", f"{folder!r}", "Write the path of a folder, or leave it out."
        )
    path = pathlib.Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            "cache",
            f"{os.fspath(folder)!r}, which is no folder and cannot be made one "
            f"({error.strerror})",
            "Write the path of a folder that may be written to.",
        ) from None
    if not os.access(path, os.W_OK):
        raise ArgumentError(
            "cache",
            f"{os.fspath(folder)!r}, which cannot be written to",
            "Write the path of a folder that may be written to.",
        )
    return ProgramCache(path)


def _key(lowered: LoweredProgram, options: Mapping[str, Any], target: Target) -> str:
    devices = [
        (device.device_kind, str(getattr(device, "coords", "")))
        for device in target.compile_devices or target.devices
    ]
    said = [target.name, devices, sorted(options.items()), versions()]
    said += [os.environ.get(flags, "") for flags in _FLAGS]
    said += [lowered.as_text(), *scopes(lowered.compiler_ir().operation)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


_Kept = tuple[dict[str, Any], bytes]


def _compile(lowered: LoweredProgram, options: Mapping[str, Any]) -> _Kept:
    try:
        compiled = lowered.compile(dict(options) or None)
    except OutOfMemoryCompileError as error:
        refused = {
            "message": str(error),
            "needed_bytes": error.needed_bytes,
            "available_bytes": error.available_bytes,
        }
        return refused, b""
    found = _readable(compiled)
    memory = {name: int(getattr(found.memory, name, 0)) for name in _FIGURES}
    return {"memory": memory}, found.module


def _readable(compiled: CompiledProgram) -> ReadableProgram:
    module = compiled.hlo_module_protos()[0]
    return ReadableProgram(module=module, memory=compiled.memory_analysis())


def _as_bytes(note: dict[str, Any], module: bytes) -> bytes:
    return json.dumps(note).encode() + b"\n" + module


def _read(path: pathlib.Path) -> _Kept | None:
    """What is kept at `path`; what cannot be read is compiled again."""
    with contextlib.suppress(OSError, EOFError, ValueError, zlib.error):
        note, _, module = gzip.decompress(path.read_bytes()).partition(b"\n")
        return json.loads(note), module
    return None
