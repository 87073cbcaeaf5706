"""Compiled programs by content: each is compiled once, on whatever day.

The key is the lowered module, the options, the target and the versions of the
compilers. What is kept is the scheduled program itself with its memory figures, not
what was read from it: a better simulator reads old programs anew. The folder is
`.comparison/` in the checkout, which git ignores.
"""

import gzip
import hashlib
import json
import pathlib
import time
import types
from typing import Any

from benchmarks import _record
from stowax._errors import CompileError, OutOfMemoryCompileError
from stowax._hlo._program import read_program
from stowax._inspect._inspect import inspect_program

FOLDER = pathlib.Path(__file__).resolve().parent.parent / ".comparison"
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")
_FIGURES = ("argument", "output", "alias", "temp", "generated_code")


def key_of(text: str, target: str, options: dict[str, Any]) -> str:
    """What a compiled program depends on, in one hash."""
    versions = _record.versions()
    compilers = {name: versions.get(name) for name in _COMPILERS}
    rest = json.dumps([target, sorted(options.items()), compilers])
    return hashlib.sha256((rest + text).encode()).hexdigest()[:24]


def figures(
    target: Any, jitted: Any, specs: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Bytes and simulated seconds of a step compiled for `target`.

    A program that the compiler refuses for want of memory has bytes and no seconds; one
    that it refuses for another reason has neither, and `refused` says why.
    """
    lowered = target.lower(jitted, *specs)
    key = key_of(lowered.as_text(), target.name, options)
    note, program = FOLDER / f"{key}.json", FOLDER / f"{key}.pb.gz"
    if not note.exists():
        FOLDER.mkdir(exist_ok=True)
        record = _compile(lowered, options, program)
        _record.write_json(note, record)
    record = json.loads(note.read_text())
    if "memory" not in record:
        return {"program": key} | record
    memory = types.SimpleNamespace(**record.pop("memory"))
    read = read_program(gzip.decompress(program.read_bytes()))
    found = inspect_program(read, memory, target)
    return {
        "program": key,
        "device_bytes": found.memory.device.total,
        "host_bytes": found.memory.host.total,
        "argument_bytes": memory.argument_size_in_bytes,
        "step_seconds": found.timeline.step_seconds,
        "exposed_seconds": found.timeline.exposed_seconds,
        "compute_seconds": found.timeline.compute_seconds,
        "host_computations": sum(h.kind == "host-compute" for h in found.hazards),
    } | record


def _compile(
    lowered: Any, options: dict[str, Any], path: pathlib.Path
) -> dict[str, Any]:
    """Compiles, writes the program to `path`, and returns what else is to be kept."""
    started = time.perf_counter()
    try:
        compiled = lowered.compile(options)
    except OutOfMemoryCompileError as error:
        needed = error.needed_bytes
        spent = time.perf_counter() - started
        return {"device_bytes": needed, "host_bytes": None, "compiling_seconds": spent}
    except CompileError as error:
        return {"refused": str(error)[:2000]}
    path.write_bytes(gzip.compress(compiled.hlo_module_protos()[0], compresslevel=1))
    analysis = compiled.memory_analysis()
    memory = {}
    for name in _FIGURES:
        for field in (f"{name}_size_in_bytes", f"host_{name}_size_in_bytes"):
            memory[field] = getattr(analysis, field)
    memory["peak_memory_in_bytes"] = getattr(analysis, "peak_memory_in_bytes", 0)
    return {"memory": memory, "compiling_seconds": time.perf_counter() - started}
