"""Which decision of a plan is to blame, by halves.

A plan is a set of decisions, and each can be taken back: what is offloaded or computed
again can be kept, what is kept can be computed again, state can stay on the device. So
the set is cut in two, one half is put into effect at a time, and the half that is wrong
is cut again: two runs a level at the most. What is left is put to the proof: alone it
has to be wrong, and the rest of the plan without it right; else there is more than one,
or none. Where neither half is wrong by itself, decisions are wrong together: then what
can be left out is.

One kind of decision is searched at a time, offloads first, the others staying in
effect: an offloaded value may be read by nothing but the computing again of another.
Keeping everything may need more memory than there is; then what was offloaded is
computed again in the search.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from .. import _jax
from .._errors import VerifyMemoryError
from .._plan._plan import Plan
from .._records._plan import ArgumentRecord, DecisionRecord
from .._records._verification import Blame
from .._step._trace import TracedStack, available

_MOST = 3
"""Decisions that are named; if more are at fault it is not the decision's."""

_MOST_LOOKS = 24
"""Runs for decisions that are wrong together only."""

Way = Literal["keep", "recompute"]

Wrong = Callable[[Plan], bool]
"""Whether a step goes wrong under a plan. May raise `VerifyMemoryError`."""


def find_blame(
    plan: Plan,
    stacks: Mapping[str, TracedStack],
    wrong: Wrong,
    say: Callable[[str], None],
) -> tuple[tuple[Blame, ...], str]:
    """The decisions at fault, and what there is to say about it.

    **Arguments:** `plan` is one for which `wrong` is true; `stacks` are those of its
    step, by name.
    """
    no_room, seen = False, {_key(plan): True}

    def look(part: Plan) -> bool:
        key = _key(part)
        if key not in seen:
            seen[key] = wrong(part)
        return seen[key]

    for stage in _stages(plan, stacks):
        if stage.instead_of_another and not no_room:
            continue
        say(f"looking for the decision to blame: {len(stage.choices)} to choose from")
        search = _Search(stage, stacks, look)
        try:
            if not look(stage.plan) or search.is_wrong(()):
                continue
            found = search.culprits()
        except VerifyMemoryError:
            no_room = True
            continue
        return tuple(_blame(d, stacks, stage) for d in found.decisions), found.words()
    if no_room:
        return (), (
            "No decision could be told from the others: with some of them taken back "
            "the step does not fit on the device. Verify a plan for a smaller batch "
            "with the same pins."
        )
    return (), (
        "No decision is to blame: with everything kept on the device, and with "
        "everything computed again, the step is wrong, too. What all of them have in "
        "common is how stowax runs the step's layers, and donation."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A search: which decisions are taken back, and what they become.

    `plan` is the one in which all of them are in effect; `others` says what becomes of
    those that are not.
    """

    plan: Plan
    choices: tuple[DecisionRecord, ...]
    way: Way
    others: str
    instead_of_another: bool = False


def _stages(plan: Plan, stacks: Mapping[str, TracedStack]) -> Iterator[_Stage]:
    offloads = tuple(d for d in plan.decisions if d.decision == "offload")
    again = tuple(d for d in plan.decisions if d.decision == "recompute")
    stored = tuple(
        d
        for d in plan.decisions
        if d.decision == "offload"
        or (d.stack in stacks and not _is_given(stacks[d.stack], d.value))
    )
    if offloads:
        nothing = "nothing else offloaded"
        yield _Stage(plan=plan, choices=offloads, way="keep", others=nothing)
        yield _Stage(
            plan=plan,
            choices=offloads,
            way="recompute",
            others=nothing,
            instead_of_another=True,
        )
    if again:
        kept = without(plan, stacks, offloads, "keep")
        others = "everything else kept on the device"
        yield _Stage(plan=kept, choices=again, way="keep", others=others)
    stored = tuple(d for d in stored if d.decision != "recompute")
    if stored:
        others = "everything else computed again"
        yield _Stage(plan=plan, choices=stored, way="recompute", others=others)


def _is_given(traced: TracedStack, value: int) -> bool:
    """Whether a value cannot be computed again: an input, or made by an effect."""
    program = traced.body.forward
    maker = program.maker.get(value)
    return maker is None or _jax.has_effects(program.nodes[maker].equation)


class _Search:
    """Runs under parts of a plan; what is not in effect is as the stage says."""

    def __init__(self, stage: _Stage, stacks: Mapping[str, TracedStack], wrong: Wrong):
        self.stage, self.stacks, self.wrong = stage, stacks, wrong
        self.choices = stage.choices

    def is_wrong(self, in_effect: Collection[int]) -> bool:
        """Whether the step is wrong with these decisions in effect."""
        out = [c for k, c in enumerate(self.choices) if k not in in_effect]
        return self.wrong(without(self.stage.plan, self.stacks, out, self.stage.way))

    def culprits(self) -> "_Found":
        """The decisions at fault."""
        left = list(range(len(self.choices)))
        found: list[int] = []
        while True:
            part = self._narrow(left)
            found += part
            left = [k for k in left if k not in part]
            clean = not left or not self.is_wrong(left)
            if clean or len(part) > 1 or len(found) >= _MOST:
                return _Found(
                    decisions=tuple(self.choices[k] for k in found),
                    each_alone=len(part) == 1,
                    all_of_them=clean,
                    others=self.stage.others,
                )

    def _narrow(self, suspects: list[int]) -> list[int]:
        """The smallest part that was found to be wrong by halving."""
        while len(suspects) > 1:
            middle = len(suspects) // 2
            for half in (suspects[:middle], suspects[middle:]):
                if self.is_wrong(half):
                    suspects = half
                    break
            else:
                return self._without_bystanders(suspects)
        return suspects

    def _without_bystanders(self, suspects: list[int]) -> list[int]:
        """Those that are wrong together only, without what they are wrong without.

        Ever smaller parts are left out (Zeller and Hildebrandt, "Simplifying and
        Isolating Failure-Inducing Input", IEEE Trans. Softw. Eng. 28(2), 2002), as long
        as there are looks left.
        """
        size, looks = max(1, len(suspects) // 4), _MOST_LOOKS
        while size:
            at = 0
            while at < len(suspects) and looks:
                rest = suspects[:at] + suspects[at + size :]
                looks -= 1
                if rest and self.is_wrong(rest):
                    suspects = rest
                else:
                    at += size
            size //= 2
        return suspects


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Decisions at fault; whether each of them alone is, and whether that is all."""

    decisions: tuple[DecisionRecord, ...]
    each_alone: bool
    all_of_them: bool
    others: str

    def words(self) -> str:
        """What there is to say about them."""
        if not self.each_alone:
            return (
                f"No single decision is to blame: these {len(self.decisions)} are "
                "wrong together. With some of them taken back the step is right."
            )
        if not self.all_of_them:
            return (
                f"Each of these is wrong with {self.others}, and so is the rest "
                "of the plan without them: look for what they have in common."
            )
        if len(self.decisions) == 1:
            return (
                f"With it, and {self.others}, the step is wrong; with all of the plan "
                "but for it the step is right."
            )
        return (
            f"Each of these is wrong with {self.others}; with all of the plan "
            "but for them the step is right."
        )


def _blame(
    decision: DecisionRecord, stacks: Mapping[str, TracedStack], stage: _Stage
) -> Blame:
    traced = stacks.get(decision.stack)
    return Blame(
        stack=decision.stack,
        value=decision.value,
        name=decision.name,
        source=decision.source,
        decision=decision.decision,
        instead=_instead(decision, traced, stage.way).decision,
    )


def _key(plan: Plan) -> Any:
    """What tells plans for one step apart that are parts of one plan."""
    ways = tuple((d.stack, d.value, d.way) for d in plan.decisions)
    return ways, tuple(a.memory_kind for a in plan.program.arguments)


def without(
    plan: Plan,
    stacks: Mapping[str, TracedStack],
    left_out: Collection[DecisionRecord],
    way: Way,
) -> Plan:
    """`plan` with some of its decisions made `way` instead."""
    decisions = [
        _instead(d, stacks.get(d.stack), way) if d in left_out else d
        for d in plan.decisions
    ]
    for name in {d.stack for d in left_out} & stacks.keys():
        decisions += _needed(stacks[name], [d for d in decisions if d.stack == name])
    names = {d.name for d in left_out if d.stack not in stacks}
    arguments = tuple(
        dataclasses.replace(a, memory_kind="device") if _is_named(a, names) else a
        for a in plan.program.arguments
    )
    program = dataclasses.replace(plan.program, arguments=arguments)
    return dataclasses.replace(plan, program=program, decisions=tuple(decisions))


def _instead(
    decision: DecisionRecord, traced: TracedStack | None, way: Way
) -> DecisionRecord:
    """A decision taken back: kept, or computed again where that goes."""
    stays = traced is None or _is_given(traced, decision.value)
    return dataclasses.replace(decision, decision="keep" if stays else way, travel=None)


def _needed(
    traced: TracedStack, decisions: Sequence[DecisionRecord]
) -> list[DecisionRecord]:
    """The layer's inputs that so far were not stored, and have to be.

    What is computed again may need them.
    """
    body, program = traced.body, traced.body.forward
    at_hand = available(traced.stack, body)
    at_hand |= {d.value for d in decisions if d.decision != "recompute"}
    run = program.closure(body.residuals, at_hand)
    read = {*body.residuals, *(i for k in run for i in program.nodes[k].inputs)}
    needed = (i for i in traced.stack.carry_inputs if i in read and i not in at_hand)
    like = dataclasses.replace(decisions[0], decision="keep", travel=None)
    return [dataclasses.replace(like, value=i, name=f"layer input {i}") for i in needed]


def _is_named(argument: ArgumentRecord, names: Collection[str]) -> bool:
    """Whether a decision of one of these names is about an argument.

    Arguments that are alike but for numbers in their paths share one (`_state`).
    """
    return argument.path in names or re.sub(r"\d+", "*", argument.path) in names
