"""The program of a planned step for arguments of one kind, ready to be called."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .._calling._calling import Taken
from .._errors import MisfitError
from .._plan._effect import put_into_effect, why_it_does_not_fit
from .._plan._plan import Plan
from .._state._places import check_alive
from .._survey._asked import Asked
from .._target._foreign import is_lowered_elsewhere
from ._lent import Lent, copied
from ._placing import Placing, apart, on_device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The program for arguments of one kind, and its plan, if it has one.

    `give` makes the program's results the step's. `direct` says that the program takes
    the user's own arguments. What it overwrites without having been told to is `lent`.
    """

    plan: Plan | None
    run: Any
    give: Callable[[Any], Any]
    placing: Placing | None
    direct: bool
    lent: Lent | None = None

    def arrays(self, taken: Taken) -> tuple[Any, ...]:
        """The arrays of a call, where the plan wants them."""
        if self.plan is None:
            return taken.arrays
        check_alive(taken.arrays)
        lent = self.lent.of(taken.arrays) if self.lent else frozenset[int]()
        arrays = apart(taken.arrays, self.plan.program.donate_argnums)
        if self.placing is not None:
            return self.placing.place(arrays, lent)
        arrays = on_device(arrays)  # what another step's plan has put there comes back
        if not lent:
            return arrays
        own = lambda leaf: copied(leaf) if id(leaf) in lent else leaf
        return jax.tree.map(own, arrays)

    def returned(self, out: Any) -> Any:
        """What the step returns where the program returned `out`."""
        if self.lent is not None:
            self.lent.returned(out)
        return self.give(out)

    def specs(self, taken: Taken) -> tuple[Any, ...]:
        """What the program is lowered for."""
        if self.placing is None or self.plan is None:
            return on_device(taken.arrays)
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(taken.arrays)):
            return self.placing.specs(taken.arrays)  # for where they are
        specs = self.plan.specs(*taken.arrays)
        return (specs,) if len(taken.arrays) == 1 else specs


def under(
    taken: Taken,
    direct: bool,
    flat: Any,
    within: Callable[[Callable[..., Any]], Callable[..., Any]],
    lent: Callable[[Plan], Lent],
    plan: Plan,
    step: Any,
) -> Ready:
    """The program under a plan; `step` is `flat`, or what was recorded of it.

    **Arguments:** `lent` is for plans that overwrite what nobody said they may.

    **Raises:** `MisfitError` for a plan that does not keep its budget.
    """
    if not plan.fits:
        raise MisfitError(why_it_does_not_fit(plan), plan)
    overwrites = taken.donated is None and plan.program.donate_argnums
    return Ready(
        plan=plan,
        run=put_into_effect(
            plan, step, within, there=is_lowered_elsewhere(taken.arrays)
        ),
        give=given_by(flat),
        placing=Placing.of(plan, taken.arrays),
        direct=direct,
        lent=lent(plan) if overwrites else None,
    )


def step_under(plan: Plan, asked: Asked) -> Any:
    """The step, or what was recorded of it if the plan's program may be made of that.

    Not for a target that is not there, where it was recorded with other devices; nor
    where nothing of what is differentiated is decided on.
    """
    here = not asked.machine.compile_only
    return asked.recording if plan.program.rewritten and here else asked.step


def given_by(flat: Any) -> Callable[[Any], Any]:
    """What makes the results of a step that was taken apart the step's own."""
    return getattr(flat, "give", lambda out: out)
