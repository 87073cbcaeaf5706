"""Asking a compiler to write down what it decided about memory.

A compiled program tells sums of bytes. Where every array lies, and when, stands in
XLA's buffer assignment, and libtpu and the CUDA plugin give that to nobody: they only
dump it, as a protobuf message (`HloProto`), when the compiler option `xla_dump_to`
names a folder. So a program that is to be inspected is compiled with that option and a
folder that lives as long as the compilation.

What goes silently wrong: JAX's compilation cache leaves dump options out of its keys. A
program that it has is not compiled, and nothing is dumped; so the cache is off while a
dump is waited for.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from .. import _jax_targets
from .._files import scratch_folder

_FOLDER = "xla_dump_to"


@contextlib.contextmanager
def dumping(options: Mapping[str, Any]) -> Iterator[pathlib.Path | None]:
    """A folder for a compiler's dump; `None` if the user has one, or none can be made.

    **Arguments:** `options` are the compiler options of the compilation to come.
    """
    if _FOLDER in options:
        yield None
        return
    try:
        made = scratch_folder("stowax-")
    except OSError:  # nowhere to write it down
        yield None
        return
    with made as folder, _jax_targets.without_compilation_cache():
        yield pathlib.Path(folder)


def options_of(folder: pathlib.Path | None) -> dict[str, Any]:
    """The compiler options that make it dump to `folder`."""
    if folder is None:
        return {}
    return {_FOLDER: str(folder), "xla_dump_hlo_as_proto": True}


def layout_in(folder: pathlib.Path | None) -> tuple[bytes, bytes] | None:
    """The compiled module and its buffer assignment, serialized; `None` if not there.

    Of several modules (a GPU's compiler may try kernels in small programs of their own)
    the largest is the step.
    """
    if folder is None:
        return None
    # protobuf is loaded only when a program is read
    from google.protobuf.message import DecodeError

    from .._hlo._proto import Dump

    found = []
    for file in folder.glob("*.hlo.pb"):
        try:
            dump = Dump.FromString(file.read_bytes())
        except (DecodeError, OSError):  # half of it, on a full disk
            continue
        if dump.buffer_assignment:
            found.append((dump.hlo_module, dump.buffer_assignment))
    return max(found, key=lambda pair: len(pair[0]), default=None)
