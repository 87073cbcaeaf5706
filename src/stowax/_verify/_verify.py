"""`verify`, the gate before a long run: the step with its plan beside the step without.

Compilers get host offloading wrong without an error: residuals read in the wrong order,
a reload that races the scheduler, a donated buffer that is overwritten and shows at the
eighth step. Memory figures look right each time. So the very programs that will train
are run here, several steps in a row, and everything they return is compared
(`_compare`) with what rounding can explain (`_tolerance`). What is wrong
is bisected to the decision that makes it so (`_blame`).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax

from .._calling._calling import Taken, flattened
from .._calling._known import known
from .._calling._objects import together
from .._errors import ArgumentError, CallError
from .._jax import argument_path
from .._plan import _asked
from .._plan._plan import Plan
from .._records import _verification
from .._records._verification import Blame, LeafCheck
from .._records._verification import Reference as ReferenceName
from .._state._places import check_alive
from .._step._trace import Step, trace_step
from .._survey._apply import check_arguments
from ._blame import find_blame
from ._gate import Gate
from ._learns import check_learns

STEPS = 10
"""By default; a clobbered buffer has been seen to show at step 8."""


class Verification(_verification.Verification):
    """What `stowax.verify` found; true if all is well. `print` shows it as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        from ..report import verification_text

        return verification_text(self)


def verify(
    step: Callable[..., Any],
    plan: Plan,
    *args: Any,
    steps: int = STEPS,
    reference: ReferenceName = "device",
    blame: bool = True,
    progress: _asked.Progress = None,
    **kwargs: Any,
) -> Verification:
    """Runs `step` with its plan and without, and compares everything it returns.

    The programs are the ones that train. Both make `steps` steps in a row, each on the
    state that the one before returned and on the same batch; the first step and the
    last are compared whole, scalars and other small results after every step. So is
    what they leave in objects that the step changes in place (an `nnx.Module`, an
    `nnx.Optimizer`). The planned step runs twice, and must give the same bits.
    Gradients of what the marked function is given are compared besides, in programs of
    their own; where that cannot be, `notes` says so, and they are judged by what they
    do: an optimizer's first moment is a sum of them, and parameters are held to their
    change, not to their size.

    **Arguments:**

    - `step`, `plan`: the training step, and the plan that was made for it.
    - `args`, `kwargs`: what the step is called with, arrays. They are left as they
      are: the runs get copies. What is on the device takes its room beside the run's
      own state; where that is too much, give numpy arrays (`jax.device_get(state)`).
    - `steps`: how many in a row.
    - `reference`: what runs the plain step: `"device"`, or `"cpu"`, the host's
      processor, for a step that does not fit on the device without its plan.
    - `blame`: whether to look for the decision at fault where something is wrong.
      Every look compiles the step under a part of the plan.
    - `progress`: as for `stowax.plan`.

    **Returns:** a `Verification`: true if all is well; `leaves` has error and tolerance
    of every array, `blamed` the decisions at fault. The tolerance is what rounding in
    the step's own types can explain.

    **Raises:** `ArgumentError` for arguments that cannot be run, `StepError` for a step
    that neither returns new parameters nor writes them into its objects,
    `PlanMismatchError` for a plan of another step or another attached device,
    `VerifyMemoryError` where the device has no room for one of the runs.

    ```python
    assert stowax.verify(train_step, plan, state, batch)
    ```
    """
    started = time.perf_counter()
    with together():
        taken, flat = _taken(step, args, kwargs)
        _check(plan, steps, reference)
        _asked.check_kinds(None, (), None, None, progress)
        say = _asked.sayer(progress, started)
        return _verified(
            flat,
            dataclasses.replace(
                plan, program=dataclasses.replace(plan.program, taken_apart=False)
            ),
            taken.arrays,
            objects=0 if taken.definition is None else len(taken.arrays),
            steps=steps,
            reference=reference,
            blame=blame,
            say=say,
            started=started,
        )


def _taken(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Taken, Callable[..., Any]]:
    """The step's arguments taken apart, and the step as a function of their arrays.

    **Raises:** `CallError` for a name that neither the step nor `verify` has.
    """
    try:
        taken, _, flat = flattened(known(step), args, kwargs)
    except CallError as error:
        options = "steps", "reference", "blame", "progress"
        raise error.near(options) from None
    return taken, flat


def _verified(
    step: Callable[..., Any],
    plan: Plan,
    args: tuple[Any, ...],
    *,
    objects: int,
    steps: int,
    reference: ReferenceName,
    blame: bool,
    say: Callable[[str], None],
    started: float,
) -> Verification:
    """`verify` for a step that takes and returns arrays."""
    _check_arrays(plan, args)
    traced = trace_step(step, args, plan.program.options)
    check_learns(step, args, traced)
    gate = Gate(step, plan, traced, args, objects, steps, reference, say)
    gate.run_plain()
    leaves, repeatable = gate.run_planned()
    leaves = [*gate.run_gradients(), *leaves]
    blamed, why = (), ""
    if blame and not (repeatable and all(leaf.ok for leaf in leaves)):
        blamed, why = _blame(plan, traced, gate, say)
    return Verification(
        step=traced.name,
        target=plan.target,
        device=_kind_of(jax.devices()[0]),
        reference=_kind_of(gate.plain.device or jax.devices()[0]),
        steps=steps,
        leaves=tuple(leaves),
        repeatable=repeatable,
        blamed=blamed,
        why=why,
        notes=(*_notes(plan, gate, leaves), *gate.notes),
        runs=gate.runs,
        seconds=time.perf_counter() - started,
    )


def _blame(
    plan: Plan,
    traced: Step,
    gate: Gate,
    say: Callable[[str], None],
) -> tuple[tuple[Blame, ...], str]:
    """The decisions at fault, and what there is to say about it."""
    if gate.random:
        return (), (
            "No decision can be blamed: the step itself gives other numbers in every "
            "run, so what differs may not be the plan's. Verify it with its source of "
            "randomness fixed (a random key among its arguments)."
        )
    return find_blame(plan, traced.stacks, gate.wrong, say)


def _check(plan: Any, steps: Any, reference: Any) -> None:
    if not isinstance(plan, Plan):
        raise ArgumentError(
            "plan",
            type(plan).__name__,
            "Write stowax.verify(step, plan, *args), the plan from stowax.plan or "
            "stowax.load_plan.",
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError("steps", f"{steps!r}", "Write a whole number from 1 on.")
    if reference not in get_args(ReferenceName):
        raise ArgumentError(
            "reference",
            f"{reference!r}",
            'Write "device", or "cpu" for the host\'s processor.',
        )


def _check_arrays(plan: Plan, args: tuple[Any, ...]) -> None:
    for path, leaf in jax.tree.leaves_with_path(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ArgumentError(
                argument_path(path),
                "a jax.ShapeDtypeStruct, which has no numbers",
                "Give arrays: verify runs the step.",
            )
    check_alive(args)
    check_arguments(args, plan.program.arguments)


def _kind_of(device: Any) -> str:
    return device.device_kind


def _notes(plan: Plan, gate: Gate, leaves: Sequence[LeafCheck]) -> list[str]:
    notes = []
    here = jax.devices()[0].device_kind
    if plan.program.compile_only:
        notes.append(
            f"The plan is for {plan.target}, and ran on {here} here: this shows that "
            "its decisions leave the step's numbers alone, and nothing of what the "
            f"compiler for {plan.target} makes of them. Verify again on that machine."
        )
    if not gate.reference.finite:
        notes.append(
            "The plain step returns NaN or infinity: there the two can only be "
            "compared in where they do."
        )
    dull = sum(not leaf.decisive for leaf in leaves)
    if dull:
        notes.append(
            f"In {dull} of {len(leaves)} leaves rounding alone explains as much as the "
            "steps have changed: they would not show an error, the others have to."
        )
    moved = any(a.memory_kind != "device" for a in plan.program.arguments)
    if not moved and not plan.program.rewritten:
        notes.append(
            "The plan moves nothing: both runs are of the step as it is written."
        )
    return notes
