"""Compiled programs in a folder, by content: what was compiled once is read again.

JAX's own cache keeps executables, and reads them back only where their device is
attached (for compile-only TPUs JAX 0.10 writes an entry, fails to read it, and compiles
again). Planning needs less of a program: its module with the schedule, and the memory
figures. Those are kept here, and also that a compiler refused a program for its size.

What goes silently wrong: two programs under one key. So the key is made of all that a
compiler sees: the module, the names of its operations (by which copies are told apart),
the options, the devices, the versions, the flags in the environment, JAX's settings.
And a file that was changed: each has a digest of its content and key.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import time
import types
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import jax

from .._errors import ArgumentError, OutOfMemoryCompileError
from .._files import read_own, write_own
from .._mlir import scopes
from .._versions import versions
from ._compiled import LoweredProgram
from ._machine import Target

_KINDS = ("argument", "output", "alias", "temp")
_FIGURES = (
    *(f"{prefix}{k}_size_in_bytes" for k in _KINDS for prefix in ("", "host_")),
    "peak_memory_in_bytes",
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SETTINGS = (
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptProgram:
    """What came of compiling a program, just now or on the day when it was kept.

    `module` is the serialized module with its schedule, `memory` XLA's figures; where
    the compiler refused the program for its size there is the `refusal` instead. The
    compiler took `seconds`. `key` stands for all that it depended on (`None` without a
    folder to keep it in); `was_kept` says that nothing was compiled now.
    """

    module: bytes
    memory: Any
    refusal: OutOfMemoryCompileError | None
    seconds: float
    key: str | None = None
    was_kept: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramCache:
    """Compiles, or reads what was compiled before; `folder` is `None` for neither."""

    folder: pathlib.Path | None = None

    def compiled(
        self, lowered: LoweredProgram, options: Mapping[str, Any], target: Target
    ) -> KeptProgram:
        """What `lowered` compiles to.

        **Raises:** `CompileError` if the compiler refuses it for anything but its size;
        that is not kept.
        """
        if self.folder is None:
            return _compile(lowered, options)
        key = _key(lowered, options, target)
        kept = self.read(key)
        if kept is not None:
            return kept
        found = _compile(lowered, options)
        try:
            write_own(self._path(key), gzip.compress(_as_bytes(found, key), 1))
        except OSError as error:
            # What was compiled is not lost for that.
            warnings.warn(
                f"cache: {str(self.folder)!r} cannot be written ({error.strerror}): "
                "programs are compiled, and not kept",
                stacklevel=2,
            )
        return dataclasses.replace(found, key=key)

    def read(self, key: str) -> KeptProgram | None:
        """What is kept under `key`; `None` if nothing is, or not as it was written."""
        with contextlib.suppress(OSError, EOFError, ValueError, zlib.error):
            return _from_bytes(gzip.decompress(read_own(self._path(key))), key)
        return None

    def _path(self, key: str) -> pathlib.Path:
        assert self.folder is not None, "there is no folder to keep programs in"
        return self.folder / f"{key}.gz"


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


def told_compilers() -> list[str]:
    """What changes every compiled program: flags in the environment, JAX's settings.

    A setting that this JAX does not have is like one that nobody set.
    """
    flags = [f"{name}={os.environ.get(name, '')}" for name in _FLAGS]
    settings = jax.config.values
    return [*flags, *(f"{name}={settings.get(name)}" for name in _SETTINGS)]


def _key(lowered: LoweredProgram, options: Mapping[str, Any], target: Target) -> str:
    devices = [
        (device.device_kind, str(getattr(device, "coords", "")))
        for device in target.compile_devices or target.devices
    ]
    said = [target.name, devices, sorted(options.items()), versions()]
    said += told_compilers()
    said += [lowered.as_text(), *scopes(lowered.compiler_ir().operation)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _compile(lowered: LoweredProgram, options: Mapping[str, Any]) -> KeptProgram:
    started = time.perf_counter()
    module, memory, refusal = b"", None, None
    try:
        compiled = lowered.compile(dict(options) or None)
        module = compiled.hlo_module_protos()[0]
        memory = compiled.memory_analysis()
    except OutOfMemoryCompileError as error:
        refusal = error
    seconds = time.perf_counter() - started
    return KeptProgram(module=module, memory=memory, refusal=refusal, seconds=seconds)


def _digest(content: bytes, key: str) -> bytes:
    """Tells what was changed since, or belongs to another key; it is no signature."""
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


def _as_bytes(found: KeptProgram, key: str) -> bytes:
    note: dict[str, Any] = {"seconds": found.seconds}
    if (refusal := found.refusal) is not None:
        figures = (refusal.needed_bytes, refusal.available_bytes)
        note["refused"] = (str(refusal), *figures)
    else:
        note["memory"] = {n: int(getattr(found.memory, n, 0)) for n in _FIGURES}
    content = json.dumps(note).encode() + b"\n" + found.module
    return _digest(content, key) + b"\n" + content


def _from_bytes(data: bytes, key: str) -> KeptProgram:
    digest, _, content = data.partition(b"\n")
    if digest != _digest(content, key):
        raise ValueError("damaged, or another program's")
    text, _, module = content.partition(b"\n")
    note, memory, refusal = json.loads(text), None, None
    if "refused" in note:
        refusal = OutOfMemoryCompileError(*note["refused"])
    else:
        memory = types.SimpleNamespace(**note["memory"])
    return KeptProgram(
        module=module,
        memory=memory,
        refusal=refusal,
        seconds=note["seconds"],
        key=key,
        was_kept=True,
    )
