"""Values that stay on the device although the planner would have them offloaded."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .._jax_primitives import effects_of, is_ordered
from .._records._stages import Body, Value

_ORDERED = (
    "the step has effects in a fixed order (jax.debug.print or io_callback with "
    "ordered=True), beside which JAX cannot lower arrays in host memory"
)


def holding(
    bodies: Sequence[Body], held: Callable[[Body, Value], bool], why: str
) -> tuple[Body, ...]:
    """The bodies with some values on the device, or computed again."""
    found = []
    for body in bodies:
        values = []
        for value in body.values:
            if "offload" in value.allowed and held(body, value):
                allowed = value.allowed - {"offload"} or frozenset({"keep"})
                stays = value.stays or why
                value = dataclasses.replace(value, allowed=allowed, stays=stays)
            values.append(value)
        found.append(dataclasses.replace(body, values=tuple(values)))
    return tuple(found)


def holding_if_ordered(
    bodies: Sequence[Body], jaxpr: Any
) -> tuple[tuple[Body, ...], tuple[str, ...]]:
    """The bodies of a step, and a note if nothing of them may be offloaded.

    JAX 0.10 to 0.12 pair the memory of results with those and the tokens of effects in
    a fixed order, and fail.
    """
    if not any(is_ordered(effect) for effect in effects_of(jaxpr)):
        return tuple(bodies), ()
    found = holding(bodies, lambda body, value: True, _ORDERED)
    if found == tuple(bodies):
        return found, ()
    return found, (f"nothing may be offloaded: {_ORDERED}",)
