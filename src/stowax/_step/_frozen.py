"""Weights that a step reads and never differentiates: a frozen part of the model.

By the data flow alone they are like a batch: inputs of the marked function that no
derivative is taken of (`_roles`). What tells them apart is what reads them: a frozen
weight comes into a stack's loop as an input of its own layer (`_boundary`), as it is or
after casts and transpositions of the whole. So does what a recurrent network scans over
time, but there the weights are the loop's constants.
"""

from collections.abc import Collection, Mapping
from typing import Any

from .. import _jax
from .._layers._boundary import Emission

_ITSELF = frozenset({"name", "convert_element_type", "transpose"})


def find_frozen(
    jaxpr: Any, boundary: Mapping[str, Emission], parameters: Collection[int]
) -> frozenset[int]:
    """The inputs that are weights of layers, `parameters` (differentiated) aside.

    A stack's own inputs are weights if any of them is a parameter, or if none of its
    loop's constants is one.
    """
    found: set[int] = set()

    def walk(inner: Any, given: list[int | None]) -> list[int | None]:
        """Which input of the step each output is, if it is one."""
        opened = _jax.open_jaxpr(inner)
        env = dict(zip(opened.invars, given, strict=True))

        def read(atom: Any) -> int | None:
            return None if isinstance(atom, _jax.Literal) else env.get(atom)

        for equation in opened.eqns:
            values = [read(v) for v in equation.invars]
            name, params = equation.primitive.name, equation.params
            emission = boundary.get(params.get("name", ""))
            called = params.get("jaxpr", params.get("call_jaxpr"))
            if emission is not None:
                found.update(_weights(emission, values, parameters))
            elif name in _ITSELF:
                env[equation.outvars[0]] = values[0]
            elif called is not None and hasattr(_jax.open_jaxpr(called), "eqns"):
                inputs = _jax.open_jaxpr(called).invars
                if len(inputs) == len(values) and name not in ("scan", "while"):
                    env.update(zip(equation.outvars, walk(called, values), strict=True))
        return [read(v) for v in opened.outvars]

    walk(jaxpr, list(range(len(_jax.open_jaxpr(jaxpr).invars))))
    return frozenset(found - {*parameters})


def _weights(
    emission: Emission, values: list[int | None], parameters: Collection[int]
) -> set[int]:
    own = {values[n] for numbers in emission.layer_inputs for n in numbers} - {None}
    constants = {*values[: emission.stack.const_count]}
    if own.isdisjoint(parameters) and not constants.isdisjoint(parameters):
        return set()
    return {i for i in own if i is not None}
