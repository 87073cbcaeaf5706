"""A marked function as a program: traced, and known by what it does.

`_rewrite` asks for one `Call` per call of a marked function. Under `jax.vmap` the call is
first turned inside out: the vmap of the function is traced, so that the layers that run
as a stack are the layers of the whole batch. The other order would be right as well, and
silently dear: the backward pass of a stack that knows of one example alone makes the
gradient of every weight for every example, and adds them up at the end.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _jax
from ._jaxpr import Program, evaluate, holds_loop, inline, spec_of, trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A marked function as it was traced: its program, and where its inputs came from."""

    name: str
    program: Program
    inputs: tuple[Any, ...]
    assemble: Callable[[Sequence[Any]], Any]

    @property
    def key(self) -> str:
        """What a plan knows this call by."""
        return self.program.fingerprint

    def map_batch(self, run: Callable[["Call"], list[Any]]) -> list[Any]:
        """The outputs of this call of a batch's one example, `run` on the whole batch."""

        @jax.custom_batching.custom_vmap
        def example(*inputs: Any) -> list[Any]:
            return evaluate(self.program.jaxpr, inputs, keep_checkpoint=_always)

        @example.def_vmap
        def batch(size: int, batched: Sequence[bool], *inputs: Any) -> Any:
            axes = [0 if flag else None for flag in batched]
            # All of the inputs may be the same for every example.
            mapped = jax.vmap(example.fun, in_axes=axes, axis_size=size)
            jaxpr = trace(mapped, *[spec_of(_jax.aval_of(v)) for v in inputs])
            whole = dataclasses.replace(
                self,
                program=Program(inline(jaxpr, keep_checkpoint=_always)),
                inputs=(*inputs, *_jax.consts_of(jaxpr)),
            )
            out = whole.map_batch(run) if _jax.under_vmap() else run(whole)
            return out, [True] * len(out)

        return example(*self.inputs)


def name_of(function: Callable[..., Any]) -> str:
    """What to call a marked function in messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def trace_call(
    function: Callable[[], Any], name: str, *, keep_checkpoint: bool = False
) -> Call:
    """Traces `function()`; whatever it reads from outside is an input.

    **Arguments:** with `keep_checkpoint`, a `jax.checkpoint` around a loop stays, and the
    loop in it is no stack.
    """
    seen: dict[str, Any] = {}

    def arrays() -> list[Any]:
        leaves, seen["structure"] = jax.tree.flatten(function())
        seen["static"] = [None if _is_array(leaf) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if _is_array(leaf)]

    def keep(equation: Any) -> bool:
        return keep_checkpoint or not holds_loop(equation)

    jaxpr = inline(trace(arrays), keep_checkpoint=keep)
    consts = tuple(_jax.consts_of(jaxpr))

    def assemble(out: Sequence[Any]) -> Any:
        following = iter(out)
        leaves = [next(following) if s is None else s for s in seen["static"]]
        return jax.tree.unflatten(seen["structure"], leaves)

    return Call(name=name, program=Program(jaxpr), inputs=consts, assemble=assemble)


def _always(equation: Any) -> bool:
    return True


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") or _jax.is_tracer(leaf)
