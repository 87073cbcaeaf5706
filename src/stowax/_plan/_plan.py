"""A `Plan`: the record of what was decided, with the methods that need JAX.

`stowax.plan` makes one (`_planning`), `load_plan` reads one back. `apply` puts it into
effect on a step, `place` and `specs` on the step's arguments.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._calling._calling import take
from .._calling._known import known
from .._calling._objects import together
from .._errors import ArgumentError
from .._records._plan import PlanRecord
from .._records._plan_file import plan_from, read_plan
from .._state._places import (
    attached_specs,
    check_alive,
    mesh_of,
    planned_kinds,
    put,
    spec_in,
)
from .._survey._options import is_own_option
from .._target._foreign import target_for
from ._applied import Applied
from ._effect import put_into_effect, why_it_does_not_fit


class Plan(PlanRecord):
    """A decision per candidate, in effect through `apply`. Made by `stowax.plan`.

    Its parts are those of `PlanRecord`: `program`, `decisions`, `proof` and `search`.
    `print(plan)` shows them on one screen.
    """

    __slots__ = ()

    def apply(self, step: Callable[..., Any]) -> Any:
        """What `jax.jit(step)` would have returned, with the plan in it.

        **Arguments:** `step` is the training step that the plan was made for.

        **Returns:** a jitted function (`.lower`, `.trace`). It donates the arguments
        that `donate_argnums` names. A plan that moves nothing gives `jax.jit(step)`.

        **Raises:** `PlanMismatchError`, when it is first traced, if the step is not the
        one that was planned, and at once if the plan is for another kind of attached
        device.

        ```python
        step = plan.apply(train_step)
        state, metrics = step(state, batch)
        ```
        """
        if not self.fits:
            warnings.warn(why_it_does_not_fit(self), stacklevel=2)
        if self.program.taken_apart:
            return Applied(step, lambda flat: put_into_effect(self, flat))
        return put_into_effect(self, known(step).bare or step)

    def specs(self, *args: Any) -> Any:
        """`ShapeDtypeStruct`s of `args` with shardings and the planned memory kinds.

        `jax.eval_shape` and `jax.ShapeDtypeStruct` drop memory kinds, in silence: a
        checkpoint that is restored by what they return lands on the device, all of it.
        What comes from here can be handed to `Target.compile`, and to a checkpointer:

        ```python
        state = jax.eval_shape(init, key)
        state = checkpointer.restore(path, plan.specs(state))
        ```

        **Arguments:** pytrees of arrays or `jax.ShapeDtypeStruct`s, any of the step's
        arguments as in `place`. Their shardings are kept, over devices of the plan's
        target or attached ones; what has none belongs to one device of the target.

        **Returns:** one for one argument, a tuple for several.

        **Raises:** `ArgumentError` for state that has no sharding beside some that has;
        `PlanMismatchError` as `place`.
        """
        with together():
            taken = take(args, {}, known(self.place))
            mine = taken.arrays
            kinds = planned_kinds(self.program.arguments, mine)
            specs = attached_specs(mine) or target_for(self.target, mine).specs(*mine)
            leaves, structure = jax.tree.flatten_with_path(tuple(specs))
            pairs = zip(leaves, kinds, strict=True)
            placed = [spec_in(path, spec, kind) for (path, spec), kind in pairs]
            placed = jax.tree.unflatten(structure, placed)
            # The caller's own objects keep their arrays.
            _, placed = taken.put_together(placed, inside=True)
        return placed[0] if len(args) == 1 else placed

    def place(self, *args: Any) -> Any:
        """`args` with every array where the plan wants it.

        Arrays that are there already are not copied. Any of the step's arguments may
        be given, alone or together: they are told apart by their structure, shapes and
        dtypes. Where the plan has state in host memory, place all that the step gives
        back, parameters too: what it returns is committed to its devices, and arguments
        that were not would make JAX compile the second step anew.

        **Returns:** one for one argument, a tuple for several.

        **Raises:** `PlanMismatchError` for an argument whose arrays the plan has in
        host memory with other shapes or dtypes (where it has none there, the step
        refuses them when it is called); `ArgumentError` for an array that was donated.

        ```python
        params, state = plan.place(params, state)
        ```
        """
        with together():
            taken = take(args, {}, known(self.place))
            kinds = planned_kinds(self.program.arguments, taken.arrays)
            check_alive(taken.arrays)
            mesh = mesh_of(taken.arrays)
            leaves = jax.tree.leaves(taken.arrays)
            placed = [put(a, kind, mesh) for a, kind in zip(leaves, kinds, strict=True)]
            placed = taken.put_back(args, placed)
        return placed[0] if len(args) == 1 else placed

    def init(self, init: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`init(*args, **kwargs)`, its results made where the plan wants them.

        State that belongs in host memory is never on the device as a whole: it is made
        by programs of a few arrays each. Numbers may differ from `init`'s in the last
        bit, as those of `jax.jit(init)` may.

        **Arguments:** `init` returns one of the step's arguments, or a tuple of them,
        as arrays or objects.

        **Returns:** what `init` does.

        **Raises:** `ArgumentError` if nothing of that is what the plan has in host
        memory; `PlanMismatchError` as `place`.

        ```python
        state = jax.eval_shape(init_state, key)
        plan = stowax.plan(train_step, state, batch, budget="16GiB")
        state = plan.init(init_state, key)
        ```
        """
        from ._init import initialized

        return initialized(self.program.arguments, init, args, kwargs)

    def as_code(self) -> str:
        """The same decisions as plain JAX code: checkpoint names and a policy.

        For people who want no dependency. It says in comments what a policy cannot.
        """
        from ._export import plan_as_code

        return plan_as_code(self)

    def __str__(self) -> str:
        from ..report import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from ..report import plan_html

        return plan_html(self)


def load_plan(path: Any, *, compiler_options: Mapping[str, Any] | None = None) -> Plan:
    """A plan from a file that `Plan.save` wrote.

    **Arguments:** `compiler_options` are those that were given to `stowax.plan`. A
    compiler's option can make it write files or change numbers, so one from a file is
    taken only if it is stowax's own, or said here.

    **Raises:** `ArgumentError` for a file that is missing, damaged or no plan, or has
    a compiler option that nobody vouches for; `PlanMismatchError` for one written by a
    stowax with another format.
    """
    plan, given = read_plan(Plan, path), compiler_options or {}
    for name, value in plan.program.compiler_options.items():
        if is_own_option(name, value) or (name in given and given[name] == value):
            continue
        raise ArgumentError(
            "path",
            f"{os.fspath(path)!r}, a plan with the compiler option {name!r:.60} = "
            f"{value!r:.60}, which is none of stowax's own",
            "Use no plan of somebody you do not trust. Options that you gave to "
            "stowax.plan are given again: "
            "stowax.load_plan(path, compiler_options={...}).",
        )
    return plan


def plan_of(data: Any) -> Plan:
    """A plan from what its `to_json` made.

    **Raises:** as `load_plan`.
    """
    return plan_from(Plan, data, "plan")
