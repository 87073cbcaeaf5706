"""The runs of one verification, in their order, and what they have found so far."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._errors import ArgumentError, VerifyMemoryError
from .._plan._plan import Plan
from .._records._verification import LeafCheck
from .._records._verification import Reference as ReferenceName
from .._step._trace import Step
from ._compare import GONE, STATE_ROLES, Difference, Digest, Reference, State
from ._gradients import NoGradients, common_names, gradient_version
from ._own import fed_back
from ._run import StepFails, Version, plain_version, planned_version, run_steps
from ._tolerance import MORE_SHAKES, SHAKES, Rounding, rounding_of, shaken

Found = dict[int, dict[int, Difference]]
"""What `Reference.compare` returned, by step."""


class Gate:
    """The runs of one verification, and what they have found so far.

    `random` says that the plain step does not repeat itself, by more than what is
    tolerated: then nothing that differs can be put down to the plan.

    **Arguments:** the first `objects` results of `step` are what became of objects
    among the user's arguments.
    """

    def __init__(
        self,
        step: Any,
        plan: Plan,
        traced: Step,
        args: tuple[Any, ...],
        objects: int,
        steps: int,
        reference: ReferenceName,
        say: Callable[[str], None],
    ):
        self.step, self.plan, self.args, self.steps = step, plan, args, steps
        self.traced, self.say, self.runs = traced, say, 0
        self.notes: list[str] = []
        device = _cpu() if reference == "cpu" else None
        self.pairs = self._pairs()
        self.plain = plain_version(
            step, plan.program.arguments, self.pairs, traced.donate, device
        )
        platform = (device or jax.devices()[0]).platform
        self.rounding = self._rounding(platform)
        state = State(
            records=plan.program.arguments,
            starts=jax.tree.leaves(args),
            pairs=self.pairs,
            objects=objects,
        )
        self.reference = Reference(steps, self.rounding, state)
        self.repeats = self.steps_are_right = True
        self.random = False
        self.gradients: Reference | None = None
        self.names: frozenset[str] = frozenset()

    def _pairs(self) -> Mapping[int, int]:
        """Which result takes the place of which array of the arguments."""
        out = jax.eval_shape(self.step, *self.args)
        arguments = jax.tree.leaves_with_path(self.args)
        given = enumerate(self.traced.arguments)
        batch = {i for i, a in given if a.role not in STATE_ROLES}
        results = jax.tree.leaves_with_path(out)
        return fed_back(arguments, results, self.traced.updates, batch)

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
        self.say("running the plain step from arguments a rounding away")
        self._shake(self.reference, self.plain, range(SHAKES))

    def _shake(self, reference: Reference, plain: Version, seeds: range) -> None:
        """Runs a plain step from arguments a rounding away."""
        for seed in seeds:

            def change(number: int, leaf: Any, seed: int = seed) -> Any:
                return shaken(leaf, self.rounding, seed, number)

            visit = functools.partial(reference.shake, change=change)
            run_steps(plain, self.args, reference.steps, visit, change)

    def run_planned(self) -> tuple[list[LeafCheck], bool]:
        """The planned step, twice: its leaves, and whether it repeats itself."""
        self.say("running the planned step")
        self.runs += 1
        version = planned_version(self.plan, self.step, self.args, self.pairs)
        reference = self.reference.under(self.plan.program)
        found: Found = {}
        digest, again = Digest(), Digest()

        def compare(number: int, out: Any) -> bool:
            found[number] = reference.compare(number, out, digest)
            return any(one.problem == GONE for one in found[number].values())

        try:
            self._run(version, compare)
            self.say("running the planned step again")
            self._run(version, self._take(again, len(found)))
        except StepFails as error:
            found[error.step] = reference.all_are(str(error))
            again = digest
        differing = digest.differing(again)
        if differing or _any(reference.is_wrong, found):
            self._look_again(reference, self.plain, found, differing)
        self.steps_are_right = not _any(reference.is_wrong, found)
        return reference.check(found), self.repeats

    def _look_again(
        self,
        reference: Reference,
        plain: Version,
        found: Found,
        differing: list[tuple[int, int]],
    ) -> None:
        """Sees whether the plain step differs from itself, or scatters more than known.

        **Arguments:** `found` is how far the planned run is off, `differing` in what
        two planned runs differ, if in anything.
        """
        self.say("running the plain step again")
        first, second = Digest(), Digest()
        for (step, k), kept in reference.kept.items():
            first.add(step, k, kept.value)

        def visit(number: int, out: Any) -> None:
            own = reference.apart(number, out, second)
            self.random |= reference.is_wrong(number, own, measured=False)
            reference.shake(number, out)

        run_steps(plain, self.args, reference.steps, visit)
        self._say_what_differs(reference.paths, differing, first.differing(second))
        if _any(reference.is_off, found):
            self.say("running the plain step from more arguments a rounding away")
            self._shake(reference, plain, range(SHAKES, SHAKES + MORE_SHAKES))

    def _say_what_differs(
        self,
        paths: Sequence[str],
        planned: Sequence[tuple[int, int]],
        plain: Sequence[tuple[int, int]],
    ) -> None:
        """Says in a note which runs differ from themselves.

        **Arguments:** by step and number of the leaf, the earliest first.
        """
        if not planned and not plain:
            return
        step, leaf = (planned or plain)[0]
        where = f"first in {paths[leaf]} after step {step}"
        if not plain:
            self.repeats = False
            note = (
                f"Two planned runs on the same arguments differ, {where}; two plain "
                "runs do not. That is a race."
            )
        elif planned:
            note = (
                f"Two planned runs differ, {where}. So do two plain ones: the step "
                "itself is not deterministic on this device."
            )
        else:
            note = (
                f"Two plain runs differ, {where}: the step itself is not deterministic "
                "on this device."
            )
        self.notes.append(note)

    def _take(self, digest: Digest, steps: int) -> Callable[[int, Any], bool]:
        def take(number: int, out: Any) -> bool:
            for k, _, value in self.reference.looked_at(number, out):
                digest.add(number, k, value)
            return number >= steps

        return take

    def run_gradients(self) -> list[LeafCheck]:
        """The gradients by themselves, plain and planned, where that can be done.

        Nothing where the plan leaves layers alone: the two would be one program.
        """
        if not self.plan.program.rewritten:
            return []
        self.say("comparing the gradients")
        reference = Reference(1, self.rounding, State(), "gradient")
        try:
            names = common_names(self.step, self.plan, self.args)
            plain = gradient_version(self.plain, self.step, None, self.args, names)
            run_steps(plain, self.args, 1, reference.store)
            self._shake(reference, plain, range(SHAKES))
            self.gradients, self.names = reference, names
            found = {1: self._planned_gradients(self.plan)}
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
        if _any(reference.is_wrong, found):
            self._look_again(reference, plain, found, [])
        return reference.check(found)

    def _planned_gradients(self, plan: Plan) -> dict[int, Difference]:
        """How far the gradients are off under a plan."""
        assert self.gradients is not None
        version = gradient_version(self.plain, self.step, plan, self.args, self.names)
        found: dict[int, Difference] = {}
        compare = self.gradients.compare
        try:
            run_steps(
                version, self.args, 1, lambda n, out: found.update(compare(n, out))
            )
        except StepFails as error:
            return self.gradients.all_are(str(error))
        return found

    def wrong(self, plan: Plan) -> bool:
        """Whether the step goes wrong under another plan: off, or not repeatable."""
        self.runs += 1
        self.say(f"run {self.runs}")
        if self.steps_are_right and self.repeats and self.gradients is not None:
            return self.gradients.is_wrong(1, self._planned_gradients(plan))
        version = planned_version(plan, self.step, self.args, self.pairs)
        reference = self.reference.under(plan.program)
        digest, again, off = Digest(), Digest(), [False]

        def compare(number: int, out: Any) -> bool:
            found = reference.compare(number, out, digest)
            off.append(reference.is_wrong(number, found))
            return off[-1]

        try:
            self._run(version, compare)
            if off[-1] or self.repeats:
                return off[-1]
            self._run(version, self._take(again, self.steps))
        except StepFails:
            return True
        return bool(digest.differing(again))

    def _run(self, version: Version, visit: Any) -> None:
        run_steps(version, self.args, self.steps, visit)


def _any(judge: Callable[[int, Any], bool], found: Found) -> bool:
    return any(judge(step, one) for step, one in found.items())


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
