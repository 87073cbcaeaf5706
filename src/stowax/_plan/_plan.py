"""A `Plan`: the record of what was decided, with the methods that need JAX.

`stowax.plan` makes one (`_planning`), `load_plan` reads one back. `apply` puts it into
effect on a step, `place` and `specs` on the step's arguments.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from .._errors import PlanMismatchError
from .._layers._rewrite import Options
from .._records._plan import PlanRecord, read_record
from .._state._places import (
    attached_specs,
    check_alive,
    mesh_of,
    planned_kinds,
    put,
    spec_in,
)
from .._state._stream import Hosted
from .._survey._apply import StackPlan, StepPlan, apply_decisions, attach_options
from .._target._target import platform_of
from .._target._target import target as find_target
from .._units import format_bytes
from .._update._blocks import BlockSize


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
            warnings.warn(self._why_it_does_not_fit(), stacklevel=2)
        attached = jax.devices()[0]
        if not self.compile_only and attached.device_kind != self.device_kind:
            raise PlanMismatchError(
                f"plan: made for {self.target} ({self.device_kind}), and JAX runs on "
                f"{attached.device_kind} here. Make a plan on this machine."
            )
        stacks = {
            s.name: StackPlan(
                fingerprint=s.fingerprint, stored=s.stored, outline=s.outline
            )
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
                parts=tuple(self.parts.items()),
            ),
            donate=self.donate_argnums,
            compiler_options=None if self.compile_only else self.compiler_options,
            arguments=self.arguments,
        )
        # For `stowax.inspect`, which tells what of this is in the compiled program.
        jitted.stowax_plan = self
        return (
            attach_options(jitted, self.compiler_options)
            if self.compile_only
            else jitted
        )

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
        `PlanMismatchError` for state of other shapes or dtypes than the planned.
        """
        kinds = planned_kinds(self.arguments, args)
        specs = attached_specs(args) or find_target(self.target).specs(*args)
        placed = jax.tree.map_with_path(spec_in, tuple(specs), kinds)
        return placed[0] if len(args) == 1 else tuple(placed)

    def place(self, *args: Any) -> Any:
        """`args` with every array where the plan wants it.

        Arrays that are there already are not copied. Any of the step's arguments may
        be given, alone or together: they are told apart by their structure, shapes and
        dtypes. Where the plan has state in host memory, place all that the step gives
        back, parameters too: what it returns is committed to its devices, and arguments
        that were not would make JAX compile the second step anew.

        **Returns:** one for one argument, a tuple for several.

        **Raises:** `PlanMismatchError` for state of other shapes or dtypes than the
        planned; `ArgumentError` for an array that was donated.

        ```python
        params, state = plan.place(params, state)
        ```
        """
        kinds = planned_kinds(self.arguments, args)
        check_alive(args)
        mesh = mesh_of(args)
        placed = jax.tree.map(lambda leaf, kind: put(leaf, kind, mesh), args, kinds)
        return placed[0] if len(args) == 1 else placed

    def as_code(self) -> str:
        """The same decisions as plain JAX code: checkpoint names and a policy.

        For people who want no dependency. It says in comments what a policy cannot.
        """
        from ._export import plan_as_code

        return plan_as_code(self)

    def _why_it_does_not_fit(self) -> str:
        needs = (
            f"plan: it does not fit: its program needs "
            f"{format_bytes(self.device_bytes)} of the device and "
            f"{format_bytes(self.host_bytes)} of the host"
        )
        if self.host_bytes > self.host_budget_bytes:
            return (
                f"{needs}, and may take {format_bytes(self.host_budget_bytes)} of the "
                "host. Give a larger host_budget, or pin less to 'offload'."
            )
        smallest = format_bytes(self.smallest_budget)
        if self.smallest_budget_is == "predicted":
            smallest = f"about {smallest}, as predicted"
        return f"{needs}. The smallest budget that works is {smallest}."

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
            updates={i: a.output for i, a in mine.items()},
            shards={i: a.shard for i, a in mine.items()},
            partitions={
                i: a.partition for i, a in mine.items() if a.partition is not None
            },
            orders={i: a.order for i, a in mine.items() if a.order is not None},
            in_turn=platform_of(self.target) != "tpu",
            lean=self.lean,
            on_host=tuple(i for i, argument in mine.items() if argument.on_host),
            late=self.late,
            returned=self.gradients_on_host,
            size=BlockSize.least(self.least_bytes),
        )

    def __str__(self) -> str:
        from ..report import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from ..report import plan_html

        return plan_html(self)


def load_plan(path: Any) -> Plan:
    """A plan from a file that `Plan.save` wrote.

    **Raises:** `ArgumentError` for a file that is missing, damaged or no plan;
    `PlanMismatchError` for one written by a stowax with another format.
    """
    return Plan(**read_record(path))
