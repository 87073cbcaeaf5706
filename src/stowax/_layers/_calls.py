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
from .._jax_autodiff import users_function
from .._jaxprs._jaxpr import (
    Program,
    evaluate,
    holds_loop,
    inline,
    is_float,
    spec_of,
    trace,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A marked function as it was traced: its jaxpr and its inputs.

    `jaxpr` has the arrays that the function was given, and those that it read from
    outside, as its inputs; its own constants are made by the function itself.
    """

    name: str
    jaxpr: Any
    inputs: tuple[Any, ...]
    assemble: Callable[[Sequence[Any]], Any]
    known: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def program(self, keep_checkpoint: bool) -> Program:
        """The call, `flattened`."""
        key = "program", keep_checkpoint
        if key not in self.known:
            self.known[key] = flattened(self.jaxpr, keep_checkpoint)
        return self.known[key]

    def handed_through(self) -> dict[int, int]:
        """Outputs that are inputs as they came, and which: state of an NNX module."""
        opened = _jax.open_jaxpr(self.jaxpr)
        place = {variable: i for i, variable in enumerate(opened.invars)}
        return {
            k: place[v]
            for k, v in enumerate(opened.outvars)
            if isinstance(v, _jax.Var) and v in place
        }

    def map_batch(self, run: Callable[["Call"], list[Any]]) -> list[Any]:
        """The outputs of this call for one example; `run` gets the whole batch."""

        @jax.custom_batching.custom_vmap
        def example(*inputs: Any) -> list[Any]:
            return evaluate(self.jaxpr, inputs, keep_checkpoint=_always)

        @example.def_vmap
        def batch(size: int, batched: Sequence[bool], *inputs: Any) -> Any:
            axes = [0 if flag else None for flag in batched]
            mapped = jax.vmap(example.fun, in_axes=axes, axis_size=size)
            whole = self._mapped(mapped, inputs)
            out = whole.map_batch(run) if _jax.under_vmap() else run(whole)
            return out, [True] * len(out)

        return example(*self.inputs)

    def over(self, axes: Sequence[int | None], axis: Any, inputs: Any) -> "Call":
        """The call for every example of `axis`, `jax.vmap`'s; results have it first.

        `inputs` have it in the places that `axes` say.
        """
        mapped = jax.vmap(
            lambda *values: evaluate(self.jaxpr, values, keep_checkpoint=_always),
            in_axes=tuple(axes),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        return self._mapped(mapped, inputs)

    def pushed(
        self, values: Sequence[Any], moved: Sequence[int], tangents: Sequence[Any]
    ) -> "Call":
        """The call with its derivative along `tangents` of the inputs `moved`.

        The inputs are `values`, then the tangents; the results are the call's, then the
        tangents of those that are floats.
        """
        count = len(values)

        def with_tangents(*given: Any) -> list[Any]:
            def chosen(*some: Any) -> list[Any]:
                inputs = list(given[:count])
                for i, value in zip(moved, some, strict=True):
                    inputs[i] = value
                return evaluate(self.jaxpr, inputs, keep_checkpoint=_always)

            at = [given[i] for i in moved]
            out, along = jax.jvp(chosen, at, list(given[count:]))
            pairs = zip(out, along, strict=True)
            return [*out, *(t for o, t in pairs if is_float(_jax.aval_of(o)))]

        return self._mapped(with_tangents, [*values, *tangents])

    def _mapped(self, mapped: Callable[..., Any], inputs: Sequence[Any]) -> "Call":
        jaxpr, read = closed(mapped, [spec_of(_jax.aval_of(v)) for v in inputs])
        return Call(
            name=self.name,
            jaxpr=jaxpr,
            inputs=(*inputs, *read),
            assemble=self.assemble,
        )


def flattened(jaxpr: Any, keep_checkpoint: bool) -> Program:
    """A jaxpr with its calls opened.

    With `keep_checkpoint`, a `jax.checkpoint` around a loop stays, and the loop in it
    is no stack.
    """

    def keep(equation: Any) -> bool:
        return keep_checkpoint or not holds_loop(equation)

    return Program(inline(jaxpr, keep_checkpoint=keep))


def closed(function: Callable[..., Any], specs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A jaxpr of `function`, and what it reads from outside: its further inputs."""
    jaxpr = trace(function, *specs)
    read, count = list(_jax.consts_of(jaxpr)), len(specs)
    if not read:
        return jaxpr, []

    def whole(*values: Any) -> list[Any]:
        return evaluate(
            jaxpr, values[:count], keep_checkpoint=_always, consts=values[count:]
        )

    return trace(whole, *specs, *(spec_of(_jax.aval_of(v)) for v in read)), read


def name_of(function: Callable[..., Any]) -> str:
    """What to call a marked function in messages."""
    function = users_function(function)
    return getattr(function, "__qualname__", None) or repr(function)


def trace_call(function: Callable[[Any], Any], given: Any, name: str) -> Call:
    """Traces `function(given)`.

    The inputs are the arrays in `given` and whatever array the function reads from
    outside.

    **Arguments:** `given` is any pytree; leaves that are no arrays stay as they are.
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

    specs = [spec_of(_jax.aval_of(value)) for value in arguments]
    jaxpr, read = closed(arrays, specs)

    def assemble(out: Sequence[Any]) -> Any:
        following = iter(out)
        leaves = [next(following) if s is None else s for s in seen["static"]]
        return jax.tree.unflatten(seen["structure"], leaves)

    return Call(name=name, jaxpr=jaxpr, inputs=(*arguments, *read), assemble=assemble)


def _always(_: Any) -> bool:
    return True


def _is_array(leaf: Any) -> bool:
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or _jax.is_tracer(leaf)
