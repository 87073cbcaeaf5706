"""A `Plan`: the record of what was decided, with the methods that need JAX.

`stowax.plan` makes one (`_planning`), `load_plan` reads one back. `apply` puts it into
effect on a step, `place` and `specs` on the step's arguments.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from ._apply import StackPlan, StepPlan, apply_decisions, attach_options
from ._errors import PlanMismatchError
from ._places import planned_kinds, put, spec_in
from ._plan_record import PlanRecord, read_record
from ._rewrite import Options
from ._stream import Hosted
from ._target import target as find_target
from ._units import format_bytes


class Plan(PlanRecord):
    """A decision per candidate, in effect through `apply`. Made by `stowax.plan`.

    The fields are those of `PlanRecord`; `print(plan)` shows them on one screen.
    """

    __slots__ = ()

    def apply(self, step: Callable[..., Any]) -> Any:
        """What `jax.jit(step)` would have returned, with the plan in it.

        **Arguments:** `step` is the training step that the plan was made for, not
        jitted.

        **Returns:** a jitted function (`.lower`, `.trace`). It donates the arguments
        that `donate_argnums` names. A plan that moves nothing gives `jax.jit(step)`.

        **Raises:** `ArgumentError` for a step that is jitted already;
        `PlanMismatchError`, when it is first traced, if the step is not the one that
        was planned, and at once if the plan is for another kind of attached device.

        ```python
        step = plan.apply(train_step)
        state, metrics = step(state, batch)
        ```
        """
        if not self.fits:
            warnings.warn(
                f"plan: it does not fit: its program needs "
                f"{format_bytes(self.device_bytes)} of the device and "
                f"{format_bytes(self.host_bytes)} of the host. The smallest budget "
                f"that works is {format_bytes(self.smallest_budget)}.",
                stacklevel=2,
            )
        attached = jax.devices()[0]
        if not self.compile_only and attached.device_kind != self.device_kind:
            raise PlanMismatchError(
                f"plan: made for {self.target} ({self.device_kind}), and JAX runs on "
                f"{attached.device_kind} here. Call stowax.plan again on this machine."
            )
        stacks = {
            s.name: StackPlan(fingerprint=s.fingerprint, stored=s.stored)
            for s in self.stacks
            if s.stored is not None
        }
        hosted = self._hosted()
        jitted = apply_decisions(
            step,
            StepPlan(stacks=stacks, hosted=hosted) if stacks or hosted else None,
            Options(
                keep_checkpoint=self.keep_checkpoint,
                roll=self.roll,
                row_major=self.row_major,
            ),
            donate=self.donate_argnums,
            compiler_options=None if self.compile_only else self.compiler_options,
            arguments=self.arguments,
        )
        return (
            attach_options(jitted, self.compiler_options)
            if self.compile_only
            else jitted
        )

    def specs(self, *args: Any) -> Any:
        """`ShapeDtypeStruct`s of `args` with the planned shardings and memory kinds.

        **Arguments:** pytrees of arrays or `jax.ShapeDtypeStruct`s. **Returns:** one
        for one argument, a tuple for several.
        """
        specs = find_target(self.target).specs(*args)
        kinds = planned_kinds(self.arguments, args)
        placed = jax.tree.map(spec_in, specs, kinds)
        return placed[0] if len(args) == 1 else tuple(placed)

    def place(self, *args: Any) -> Any:
        """`args` with every array where the plan wants it.

        Arrays that are there already are returned as they are, not copied. Any of the
        step's arguments may be given, alone or together: they are told apart by their
        structure, shapes and dtypes.

        **Returns:** one for one argument, a tuple for several.

        ```python
        state = plan.place(state)
        ```
        """
        kinds = planned_kinds(self.arguments, args)
        placed = jax.tree.map(put, args, kinds)
        return placed[0] if len(args) == 1 else placed

    def as_code(self) -> str:
        """The same decisions as plain JAX code: checkpoint names and a policy.

        For people who want no dependency. It says in comments what a policy cannot.
        """
        from ._export import plan_as_code

        return plan_as_code(self)

    def _hosted(self) -> Hosted | None:
        """The arguments in host memory, as `apply` needs them."""
        mine = {
            i: argument
            for i, argument in enumerate(self.arguments)
            if argument.memory_kind != "device"
        }
        if not mine:
            return None
        return Hosted(
            updates={i: a.output for i, a in mine.items() if a.output is not None},
            shards={i: a.shard for i, a in mine.items()},
            in_turn=find_target(self.target).platform != "tpu",
        )

    def __str__(self) -> str:
        from .report import plan_text

        return plan_text(self)


def load_plan(path: Any) -> Plan:
    """A plan from a file that `Plan.save` wrote.

    **Raises:** `ArgumentError` for a file that is missing, damaged or no plan;
    `PlanMismatchError` for one written by a stowax with another format.
    """
    return Plan(**read_record(path))
