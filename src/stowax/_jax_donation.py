"""Which donated array a result overwrites, where arrays lie in two memories.

JAX pairs donated arguments with results by shape and dtype, in the order of results. On
one device it looks at memories only if every argument and every result was told one,
which an argument that nobody put anywhere is not. Of a step that donates Adam's
moments, in host memory, and not its parameters, it has the first moment overwritten by
the new parameters: the compiled figures are wrong, and the program ends the process.
But each type says in which memory its array lies. From the first program of a plan on
that has arrays in host memory, the types count where nothing was told.

A plan knows more: an array that streams is updated where it lies. A step that returns
its state in another order has moments paired with one another, and each written to the
other's place by a copy on the host. So a plan's program names its pairs
(`overwriting`), in an equation that is nothing once it is lowered.

Served: JAX 0.10 to 0.12.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from ._jax import open_jaxpr

_HOST, _SPACE = "pinned_host", jax.memory.Space.Host
_lock = threading.Lock()
_installed = False
_named = threading.local()  # the pairs of the program that is being lowered

_overwriting = _core.Primitive("overwriting")
_overwriting.multiple_results = True


def donate_within_memories() -> None:
    """From now on, no result overwrites an argument that lies in another memory."""
    global _installed
    with _lock:
        if not _installed:
            pairing: Any = _mlir._set_up_aliases
            lowering: Any = _mlir.lower_jaxpr_to_module
            _mlir._set_up_aliases = _pairing(pairing)
            _mlir.lower_jaxpr_to_module = _naming(lowering)
            _installed = True


def overwriting(
    arguments: Sequence[Any], results: Sequence[Any], pairs: Mapping[int, int | None]
) -> list[Any]:
    """The results of a function that is traced, of which some overwrite arguments.

    **Arguments:** `pairs` has the result's number by that of the argument, `None` of an
    argument that none overwrites. They hold for arguments that are donated.
    """
    named = [(i, o) for i, o in pairs.items() if o is not None]
    old = [arguments[i] for i, _ in named]
    new = _overwriting.bind(*old, *(results[o] for _, o in named))
    out = list(results)
    for (_, number), value in zip(named, new, strict=True):
        out[number] = value
    return out


@_overwriting.def_abstract_eval
def _types(*types: Any) -> list[Any]:
    return [*types[len(types) // 2 :]]


def _results(*operands: Any) -> list[Any]:
    """What the equation gives: the second half of what it is given."""
    return [*operands[len(operands) // 2 :]]


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return _overwriting.bind(*primals), _results(*tangents)


def _batched(operands: Sequence[Any], axes: Sequence[Any]) -> Any:
    return _results(*operands), _results(*axes)


_overwriting.def_impl(_results)
_mlir.register_lowering(_overwriting, lambda _, *operands: _results(*operands))
_ad.primitive_jvps[_overwriting] = _differentiated
_batching.primitive_batchers[_overwriting] = _batched


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's lowering of a program, which notes the pairs that the program names."""

    @functools.wraps(original)
    def lowering(name: str, jaxpr: Any, *rest: Any, **named: Any) -> Any:
        _named.pairs = _pairs_in(jaxpr, named.get("num_const_args", 0))
        try:
            return original(name, jaxpr, *rest, **named)
        finally:
            _named.pairs = {}

    return lowering


def _pairs_in(jaxpr: Any, before: int) -> dict[int, int]:
    """Argument → result, of those that a program names; `before` more come first."""
    program = open_jaxpr(jaxpr)
    inputs = {variable: i for i, variable in enumerate(program.invars)}
    results = enumerate(program.outvars)
    outputs = {v: i for i, v in results if isinstance(v, _core.Var)}
    pairs: dict[int, int] = {}
    for equation in program.eqns:
        if equation.primitive is _overwriting:
            half = len(equation.outvars)
            for old, new in zip(equation.invars[:half], equation.outvars, strict=True):
                if old in inputs and new in outputs:
                    pairs[before + inputs[old]] = outputs[new]
    return pairs


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
            # JAX pairs what lies in the same memory: a pair of a plan has its own.
            for number, result in getattr(_named, "pairs", {}).items():
                if donated[number]:
                    here[number] = there[result] = f"that of argument {number}"
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
