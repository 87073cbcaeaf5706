"""A step without new parameters teaches nothing, and comparing it proves nothing."""

from collections.abc import Callable
from typing import Any

import jax

from .. import _jax
from .._errors import StepError
from .._jaxprs._jaxpr import is_float, spec_of, trace
from .._step._trace import Step


def check_learns(step: Callable[..., Any], args: tuple[Any, ...], traced: Step) -> None:
    """Refuses a step after which nothing holds new parameters or their gradients.

    What it returns is looked at, which is also what became of objects that the user's
    step is given. A step that returns gradients is right: somebody else updates by
    them.

    **Raises:** `StepError`.
    """
    if not traced.differentiated.isdisjoint(traced.updates):
        return
    shapes = {tuple(traced.arguments[i].spec.shape) for i in traced.differentiated}
    shapes.discard(())  # a loss has that, too
    if not shapes or not shapes.isdisjoint(_made(step, args)):
        return
    raise StepError(
        "step: neither what it returns nor the objects that it is given hold new "
        "parameters after it, so a loop over it learns nothing. Return the new "
        "parameters and optimizer state; or give it the nnx.Module and the "
        "nnx.Optimizer as arguments and write optimizer.update(model, grads) in it."
    )


def _made(step: Callable[..., Any], args: tuple[Any, ...]) -> set[tuple[int, ...]]:
    """The shapes of the floats that a step makes and returns."""
    leaves, structure = jax.tree.flatten(args)
    specs = [spec_of(_jax.aval_of(leaf)) for leaf in leaves]
    flat = lambda *values: jax.tree.leaves(step(*jax.tree.unflatten(structure, values)))
    opened = _jax.open_jaxpr(trace(flat, *specs))
    given = set(opened.invars)
    made = [v for v in opened.outvars if not isinstance(v, _jax.Literal)]
    return {tuple(v.aval.shape) for v in made if v not in given and is_float(v.aval)}
