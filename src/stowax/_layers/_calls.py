"""A marked function as a program: traced, and known by what it does.

`_rewrite` asks for one `Call` per call of a marked function. Under `jax.vmap` the call
is first turned inside out: the vmap of the function is traced, so that the layers that
run as a stack are the layers of the whole batch. The other order would be right as
well, and silently dear: the backward pass of a stack that knows of one example alone
makes the gradient of every weight for every example, and adds them up at the end.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax
from .._jaxprs._jaxpr import Program, holds_loop, inline, spec_of, trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A marked function as it was traced: its program and its inputs."""

    name: str
    program: Program
    inputs: tuple[Any, ...]
    assemble: Callable[[Sequence[Any]], Any]

    @property
    def key(self) -> str:
        """What a plan knows this call by."""
        return self.program.fingerprint

    def map_batch(self, run: Callable[["Call"], list[Any]]) -> list[Any]:
        """The outputs of this call for one example; `run` gets the whole batch."""

        @jax.custom_batching.custom_vmap
        def example(*inputs: Any) -> list[Any]:
            program = self.program
            wanted = [o for o in program.outputs if isinstance(o, int)]
            values = program.run(wanted, dict(enumerate(inputs)), effects=True)
            return program.read_outputs(values, len(program.outputs))

        @example.def_vmap
        def batch(size: int, batched: Sequence[bool], *inputs: Any) -> Any:
            axes = [0 if flag else None for flag in batched]
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
    function: Callable[[Any], Any],
    given: Any,
    name: str,
    *,
    keep_checkpoint: bool = False,
) -> Call:
    """Traces `function(given)`.

    The inputs are the arrays in `given` and whatever array the function reads from
    outside.

    **Arguments:** `given` is any pytree; leaves that are no arrays stay as they are.
    With `keep_checkpoint`, a `jax.checkpoint` around a loop stays, and the loop in it
    is no stack.
    """
    seen: dict[str, Any] = {}
    leaves, structure = jax.tree.flatten(given)
    positions = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
    arguments = [leaves[k] for k in positions]

    def arrays(*values: Any) -> list[Any]:
        own = list(leaves)
        for position, value in zip(positions, values, strict=True):
            own[position] = value
        out = function(jax.tree.unflatten(structure, own))
        results, seen["structure"] = jax.tree.flatten(out)
        seen["static"] = [None if _is_array(leaf) else leaf for leaf in results]
        return [leaf for leaf in results if _is_array(leaf)]

    def keep(equation: Any) -> bool:
        return keep_checkpoint or not holds_loop(equation)

    specs = [spec_of(_jax.aval_of(value)) for value in arguments]
    jaxpr = inline(trace(arrays, *specs), keep_checkpoint=keep)
    inputs = (*arguments, *_jax.consts_of(jaxpr))

    def assemble(out: Sequence[Any]) -> Any:
        following = iter(out)
        leaves = [next(following) if s is None else s for s in seen["static"]]
        return jax.tree.unflatten(seen["structure"], leaves)

    return Call(name=name, program=Program(jaxpr), inputs=inputs, assemble=assemble)


def _always(_: Any) -> bool:
    return True


def _is_array(leaf: Any) -> bool:
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or _jax.is_tracer(leaf)
