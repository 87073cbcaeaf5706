"""Which donated array a result overwrites, where arrays lie in two memories.

JAX pairs donated arguments with results by shape and dtype, in the order of results. On
one device it looks at memories only if every argument and every result was told one,
which an argument that nobody put anywhere is not. Of a step that donates Adam's
moments, in host memory, and not its parameters, it has the first moment overwritten by
the new parameters: the compiled figures are wrong, and the program ends the process.
But each type says in which memory its array lies. From the first program of a plan on
that has arrays in host memory, the types count where nothing was told.

Served: JAX 0.10 to 0.12.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir as _mlir

_HOST, _SPACE = "pinned_host", jax.memory.Space.Host
_lock = threading.Lock()
_installed = False


def donate_within_memories() -> None:
    """From now on, no result overwrites an argument that lies in another memory."""
    global _installed
    with _lock:
        if not _installed:
            original: Any = _mlir._set_up_aliases
            _mlir._set_up_aliases = _pairing(original)
            _installed = True


def _pairing(original: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's pairs, told of memories where there is more than one."""

    @functools.wraps(original)
    def pairing(
        aliases: Any,
        avals_in: Any,
        avals_out: Any,
        donated: Any,
        memories_in: Any,
        memories_out: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        here = _memories(avals_in, memories_in)
        there = _memories(avals_out, memories_out)
        if _HOST in (*here, *there):
            memories_in, memories_out = here, there
        return original(
            aliases,
            avals_in,
            avals_out,
            donated,
            memories_in,
            memories_out,
            *rest,
            **named,
        )

    return pairing


def _memories(avals: Sequence[Any], told: Sequence[str | None] | None) -> list[str]:
    """The memories of arrays: what `jax.jit` was told of them, else what types say."""
    told = told or [None] * len(avals)
    return [
        memory or (_HOST if getattr(aval, "memory_space", None) == _SPACE else "device")
        for aval, memory in zip(avals, told, strict=True)
    ]
