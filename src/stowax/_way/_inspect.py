"""`stowax.inspect`: what a step does; if it does not fit, what would make it fit."""

import dataclasses
from typing import Any

from .._inspect import _inspect
from .._inspect._inspect import Inspection
from .._target._machine import Target
from ._ways import with_ways


def inspect(
    jitted_or_compiled: Any,
    *args: Any,
    target: Target | str | None = None,
    **kwargs: Any,
) -> Inspection:
    """What a step does once it is compiled.

    **Arguments:** `jitted_or_compiled` is what `jax.jit` returned, or `nnx.jit` or
    `eqx.filter_jit`, with `args` and `kwargs` to compile it for (pytrees of arrays or
    `jax.ShapeDtypeStruct`s, a framework's objects); or something
    compiled, without these: a `jax.stages.Compiled`, or what `Target.compile`
    returned. `target` is the machine to compile for (a name or a `Target`), by default
    the attached one; with something compiled it says whose figures to take.

    **Returns:** an `Inspection`, of one device. `fits` says whether a device of the
    target has room for the step. Where it has not, `peak` has the arrays at the
    predicted peak, what recomputing or offloading them would free, and the smallest
    budget that a plan reaches; where the compiler refused the program for that, there
    is nothing else.

    **Raises:** `ArgumentError` for anything else; whatever else compiling raises.

    >>> step = jax.jit(lambda x: jax.numpy.sin(x) @ x)
    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> found = inspect(step, x, target="v5e-4")
    >>> found.memory.device.argument, found.fits
    (262144, True)
    """
    found = _inspect.inspect(jitted_or_compiled, *args, target=target, **kwargs)
    planned = hasattr(jitted_or_compiled, "stowax_plan")
    if found.peak is None or not (args or kwargs) or planned:
        return found
    peak = with_ways(found.peak, jitted_or_compiled, args, target, kwargs)
    taken = found.memory.device.total
    if not found.refusal and taken < peak.smallest_budget:  # the step itself shows it
        peak = dataclasses.replace(
            peak, smallest_budget=taken, smallest_budget_is="compiled"
        )
    return dataclasses.replace(found, peak=peak)
