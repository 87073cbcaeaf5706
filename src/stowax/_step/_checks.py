"""Steps that are refused before anything is planned: nothing would come of them."""

from collections.abc import Sequence
from typing import Any

from .. import _jax
from .._errors import NothingToPlanError, StepError
from ._lineage import dead_updates, is_backward, parted
from ._recording import Recording
from ._roles import Roles

_RETURN = (
    "Return the new parameters and optimizer state. A model that is updated in place "
    "inside (an nnx.Module, say) comes back from nnx.jit, and from stowax.jit without "
    "a jit of your own; for jax.jit split it into arrays before the step (nnx.split), "
    "merge it inside, and return the new arrays."
)
_STATE = frozenset({"parameter", "optimizer state"})


def check_traced(
    jaxpr: Any, recording: Recording, arguments: Sequence[Any], roles: Roles
) -> None:
    """Refuses a step in which there is nothing to plan, or that would learn nothing.

    **Arguments:** `jaxpr` is the step's as it is planned, `arguments` are flat.

    **Raises:** `StepError`.
    """
    if not recording.names:
        raise NothingToPlanError(
            "step: it differentiates nothing, so there are no activations, gradients "
            "or updates to plan. Pass the training step itself: the function that "
            "calls jax.value_and_grad, jax.grad or jax.vjp and updates the parameters."
        )
    if not _jax.open_jaxpr(jaxpr).outvars:
        raise StepError(
            "step: it returns no array, so nothing that it computes is used. Return "
            "the new state and the loss."
        )
    if changed := _lost_changes(recording, arguments, roles):
        raise StepError(
            f"step: it changes {changed} in place and does not return it, and under "
            f"jax.jit such a change is lost. {_RETURN}"
        )
    if _backward_is_dead(jaxpr):
        raise StepError(
            "step: its gradients reach none of its outputs, so the compiler would "
            f"leave out the backward pass, and nothing would be learned. {_RETURN}"
        )
    if roles.differentiated and _update_is_dead(jaxpr, roles):
        raise StepError(
            "step: it computes new parameters, and none of its outputs is made of "
            f"them, so nothing would be learned. {_RETURN}"
        )
    # What is left as it is written may be where `reach` does not look.
    if roles.differentiated is None and not recording.left:
        names = ", ".join(sorted(recording.names))
        raise StepError(
            f"step: {names} is marked with @stowax.stow, but nothing differentiates "
            "it. Move the mark to the function that jax.value_and_grad or jax.grad is "
            "applied to."
        )


def _backward_is_dead(jaxpr: Any) -> bool:
    """Whether there is a backward pass, and no output needs any of it."""
    needed, dead = parted(jaxpr)
    return any(map(is_backward, dead)) and not any(map(is_backward, needed))


def _lost_changes(
    recording: Recording, arguments: Sequence[Any], roles: Roles
) -> str | None:
    """The path of state that the step changes in place and returns in no way."""
    for i in recording.changed:
        if arguments[i].role in _STATE and i not in roles.updates:
            return arguments[i].path
    return None


def _update_is_dead(jaxpr: Any, roles: Roles) -> bool:
    """Whether no output takes a parameter's place, and something that could is lost."""
    trained = roles.differentiated or frozenset()
    if not trained.isdisjoint(roles.updates):
        return False
    return dead_updates(jaxpr, trained)
