"""`verify`, the gate before a long run: the step with its plan beside the step without.

Compilers get host offloading wrong without an error: residuals read in the wrong order,
a reload that races the scheduler, a donated buffer that is overwritten and shows at the
eighth step. Memory figures look right each time. So the very programs that will train
are run here, several steps in a row, and everything they return is compared
(`_compare`) with what rounding can explain (`_tolerance`). What is wrong
is bisected to the decision that makes it so (`_blame`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax

from .._errors import ArgumentError, VerifyMemoryError
from .._layers._rewrite import Options
from .._plan import _asked
from .._plan._plan import Plan
from .._records import _verification
from .._records._verification import LeafCheck
from .._records._verification import Reference as ReferenceName
from .._state._places import check_alive
from .._step._trace import Step, check_step, trace_step
from .._survey._apply import check_arguments
from ._blame import find_blame
from ._compare import Difference, Digest, Reference
from ._gradients import NoGradients, common_names, gradient_version
from ._run import Version, plain_version, planned_version, run_steps
from ._tolerance import SHAKES, Rounding, rounding_of, shaken

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
) -> Verification:
    """Runs `step` with its plan and without, and compares everything it returns.

    The programs are the ones that train. Both make `steps` steps in a row, each on the
    state that the one before returned and on the same batch; the first step and the
    last are compared whole, scalars and other small results after every step. The
    planned step runs twice, and must give the same bits. Gradients of what the marked
    function is given are compared besides, in programs of their own; where that cannot
    be, `notes` says so, and they are judged by what they do: an optimizer's first
    moment is a sum of them, and parameters are held to their change, not to their size.

    **Arguments:**

    - `step`, `plan`: the training step, not jitted, and the plan that was made for it.
    - `args`: what the step is called with, arrays. They are left as they are: the runs
      get copies. What is on the device takes its room beside the run's own state;
      where that is too much, give numpy arrays (`jax.device_get(state)`).
    - `steps`: how many in a row.
    - `reference`: what runs the plain step: `"device"`, or `"cpu"`, the host's
      processor, for a step that does not fit on the device without its plan.
    - `blame`: whether to look for the decision at fault where something is wrong.
      Every look compiles the step under a part of the plan.
    - `progress`: as for `stowax.plan`.

    **Returns:** a `Verification`: true if all is well; `leaves` has error and tolerance
    of every array, `blamed` the decisions at fault. The tolerance, and where it comes
    from, is told in `_tolerance`.

    **Raises:** `ArgumentError` for arguments that cannot be run, `PlanMismatchError`
    for a plan of another step or another attached device, `VerifyMemoryError` where
    the device has no room for one of the runs.

    ```python
    assert stowax.verify(train_step, plan, state, batch)
    ```
    """
    started = time.perf_counter()
    _check(step, plan, args, steps, reference)
    _asked.check_kinds(None, (), None, None, progress)
    say = _asked.sayer(progress, started)
    options = Options(
        keep_checkpoint=plan.keep_checkpoint,
        roll=plan.roll,
        row_major=plan.row_major,
        parts=tuple(plan.parts.items()),
    )
    traced = trace_step(step, args, options)
    gate = _Gate(step, plan, traced, args, steps, reference, say)
    gate.run_plain()
    leaves, repeatable = gate.run_planned()
    leaves = [*gate.run_gradients(), *leaves]
    blamed, why = (), ""
    if blame and not (repeatable and all(leaf.ok for leaf in leaves)):
        blamed, why = find_blame(plan, traced.stacks, gate.wrong, say)
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


def _check(step: Any, plan: Any, args: Any, steps: Any, reference: Any) -> None:
    check_step(step)
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
    for path, leaf in jax.tree.leaves_with_path(tuple(args)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            name = f"args[{path[0].idx}]{jax.tree_util.keystr(path[1:])}"
            raise ArgumentError(
                name,
                "a jax.ShapeDtypeStruct, which has no numbers",
                "Give arrays: verify runs the step.",
            )
    check_alive(args)
    check_arguments(args, plan.arguments)


class _Gate:
    """The runs of one verification, and what they have found so far."""

    def __init__(
        self,
        step: Any,
        plan: Plan,
        traced: Step,
        args: tuple[Any, ...],
        steps: int,
        reference: ReferenceName,
        say: Callable[[str], None],
    ):
        self.step, self.plan, self.args, self.steps = step, plan, args, steps
        self.traced, self.say, self.runs = traced, say, 0
        self.notes: list[str] = []
        device = _cpu() if reference == "cpu" else None
        self.plain = plain_version(
            step, plan.arguments, traced.updates, traced.donate, device
        )
        platform = (device or jax.devices()[0]).platform
        self.rounding = self._rounding(platform)
        flat = jax.tree.leaves(args)
        state = {k: (plan.arguments[i], flat[i]) for i, k in traced.updates.items()}
        self.reference = Reference(steps, self.rounding, state)
        self.repeats = self.steps_are_right = True
        self.gradients: Reference | None = None
        self.names: frozenset[str] = frozenset()

    def _rounding(self, platform: str) -> Rounding:
        """The coarser of the two machines', where they are two."""
        platforms = {platform, jax.devices()[0].platform}
        found = [rounding_of(self.traced.jaxpr, p) for p in platforms]
        return max(found, key=lambda rounding: rounding.unit)

    def run_plain(self) -> None:
        """The plain step: kept, and then shaken."""
        self.say("running the plain step")
        self.runs += 1
        self._run(self.plain, self.reference.store)
        for seed in range(SHAKES):
            self.say("running the plain step from arguments a rounding away")

            def change(leaf: Any, seed: int = seed) -> Any:
                return shaken(leaf, self.rounding, seed)

            self._run(self.plain, self.reference.shake, change)

    def run_planned(self) -> tuple[list[LeafCheck], bool]:
        """The planned step, twice: its leaves, and whether it repeats itself."""
        self.say("running the planned step")
        self.runs += 1
        version = planned_version(self.plan, self.step, self.args, self.traced.updates)
        reference = self._under(self.plan)
        found: dict[int, dict[int, Difference]] = {}
        digest, again = Digest(), Digest()

        def compare(number: int, out: Any) -> None:
            found[number] = reference.compare(number, out, digest)

        self._run(version, compare)
        self.steps_are_right = all(c.ok for c in reference.check(found))
        self.say("running the planned step again")
        self._run(version, self._take(again))
        differing = digest.differing(again)
        if differing:
            self.repeats = self._plain_is_as_random(differing)
        return reference.check(found), self.repeats

    def _under(self, plan: Plan) -> Reference:
        updates, on_host = self.traced.updates, plan.gradients_on_host
        return self.reference.under(plan.arguments, updates, on_host)

    def _plain_is_as_random(self, differing: list[tuple[int, int]]) -> bool:
        """Whether the plain step gives other bits in a second run, too."""
        self.say("two planned runs differ: running the plain step again")
        number, leaf = differing[0]
        name = self.reference.paths[leaf]
        plain, again = Digest(), Digest()
        for (step, k), kept in self.reference.kept.items():
            plain.add(step, k, kept.value)
        take = self._take(again)

        def shake(number: int, out: Any) -> None:
            take(number, out)
            self.reference.shake(number, out)

        self._run(self.plain, shake)
        if plain.differing(again):
            self.notes.append(
                f"Two planned runs differ, first in {name} after step {number}. So do "
                "two plain ones: the step itself is not deterministic on this device."
            )
            return True
        self.notes.append(
            f"Two planned runs on the same arguments differ, first in {name} after "
            f"step {number}; two plain runs do not. That is a race."
        )
        return False

    def _take(self, digest: Digest) -> Callable[[int, Any], None]:
        def take(number: int, out: Any) -> None:
            for k, _, value in self.reference.looked_at(number, out):
                digest.add(number, k, value)

        return take

    def run_gradients(self) -> list[LeafCheck]:
        """The gradients by themselves, plain and planned, where that can be done.

        Nothing where the plan leaves layers alone: the two would be one program.
        """
        if all(stack.stored is None for stack in self.plan.stacks):
            return []
        self.say("comparing the gradients")
        reference = Reference(1, self.rounding, {}, "gradient")
        try:
            names = common_names(self.step, self.plan, self.args)
            plain = gradient_version(self.plain, self.step, None, self.args, names)
            run_steps(plain, self.args, 1, reference.store)
            for seed in range(SHAKES):
                change = functools.partial(shaken, rounding=self.rounding, seed=seed)
                run_steps(plain, self.args, 1, reference.shake, change)
            self.gradients, self.names = reference, names
            found = self._planned_gradients(self.plan)
        except (NoGradients, VerifyMemoryError) as error:
            self.gradients = None
            full = isinstance(error, VerifyMemoryError)
            why = "the device has no room for them beside the state" if full else error
            self.notes.append(
                f"The gradients are not compared by themselves: {why}. They are judged "
                "by the state that they make."
            )
            return []
        self.runs += 2
        return reference.check({1: found})

    def _planned_gradients(self, plan: Plan) -> dict[int, Difference]:
        """How far the gradients are off under a plan."""
        assert self.gradients is not None
        version = gradient_version(self.plain, self.step, plan, self.args, self.names)
        found: dict[int, Difference] = {}
        compare = self.gradients.compare
        run_steps(version, self.args, 1, lambda n, out: found.update(compare(n, out)))
        return found

    def wrong(self, plan: Plan) -> bool:
        """Whether the step goes wrong under another plan: off, or not repeatable."""
        self.runs += 1
        self.say(f"run {self.runs}")
        if self.steps_are_right and self.repeats and self.gradients is not None:
            return self.gradients.is_wrong(1, self._planned_gradients(plan))
        version = planned_version(plan, self.step, self.args, self.traced.updates)
        reference = self._under(plan)
        digest, again, off = Digest(), Digest(), []

        def compare(number: int, out: Any) -> bool:
            found = reference.compare(number, out, digest)
            off.append(reference.is_wrong(number, found))
            return off[-1]

        self._run(version, compare)
        if off[-1] or self.repeats:
            return off[-1]
        self._run(version, self._take(again))
        return bool(digest.differing(again))

    def _run(self, version: Version, visit: Any, change: Any = None) -> None:
        options = {} if change is None else {"change": change}
        run_steps(version, self.args, self.steps, visit, **options)


def _cpu() -> Any:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        raise ArgumentError(
            "reference",
            "'cpu', and JAX was told to leave the host's processor out",
            "Set JAX_PLATFORMS to what it is now with ',cpu' at the end, such as "
            "cuda,cpu.",
        ) from error


def _kind_of(device: Any) -> str:
    return device.device_kind


def _notes(plan: Plan, gate: _Gate, leaves: Sequence[LeafCheck]) -> list[str]:
    notes = []
    here = jax.devices()[0].device_kind
    if plan.compile_only:
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
    moved = any(a.memory_kind != "device" for a in plan.arguments)
    if not moved and all(s.stored is None for s in plan.stacks):
        notes.append(
            "The plan moves nothing: both runs are of the step as it is written."
        )
    return notes
