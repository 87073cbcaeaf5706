"""Decisions drawn at random in place of those that a search would make.

A search looks for what is fast, and comes back to the same few ways of storing. Here
every value and every part of the state goes its own way, so that a program is run under
plans that no budget leads to, at a tenth of a search's time.
"""

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import jax

import stowax
from stowax._jaxprs import _tile_region, _wide
from stowax._planner._baselines import named
from stowax._records._stages import Options, least_bytes
from stowax._state._places import Kind, mesh_of, put
from stowax._state._shards import device_bytes
from stowax._step._trace import in_order, record_for, trace_step
from stowax._survey._apply import apply_decisions
from stowax._survey._preferences import Preferences
from stowax._survey._survey import Survey
from stowax._survey._take import take_survey
from stowax._target._target import target as find_target

from .choosers import chance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A step under decisions, and what they move, in words.

    `kinds` are the kinds of memory of its arguments, by flat position.
    """

    step: Any
    moved: tuple[str, ...]
    kinds: tuple[Any, ...]

    def place(self, args):
        """`args`, positional ones and then those by keyword, where they belong."""
        leaves, structure = jax.tree.flatten(args)
        mesh = mesh_of(args)
        pairs = zip(leaves, self.kinds, strict=True)
        return jax.tree.unflatten(structure, [put(a, k, mesh) for a, k in pairs])


WAYS = ("rolled", "straight", "in groups", "in blocks")
"""How a step is read: with loops over layers, as it is written, in groups of layers,
wide products within layers in blocks."""


@contextlib.contextmanager
def small_is_wide():
    """Any product within a layer runs in blocks, of few numbers and of narrow ones.

    With all that can follow it there: of what is small, nothing would be wide enough.
    """
    region = _tile_region._Region

    def anew(one: Any) -> Any:
        return region(one.program, one.free, one.seed, one.side, one.escapes)

    with (
        mock.patch.object(region, "without_end", anew),
        mock.patch.object(_tile_region, "_LEAST_ROWS", 1),
        mock.patch.object(_tile_region, "_ESCAPES_LAYER", 4),
        mock.patch.object(_wide, "_WIDER", 0.5),
    ):
        yield


def surveyed(step, args, keywords, wishes, budget, *, way="rolled"):
    """What is open for `step`, values and state, where it may take `budget` bytes.

    Where it is read "straight", layers of a Python loop run as they are written, and
    what stands outside of layers is planned in segments.

    **Raises:** what `stowax.plan` would meet, and run the step as it is written for.
    """
    attached = wishes.target in ("cpu", "gpu")
    target = find_target(wishes.target if attached else "h200")
    specs = target.specs(*in_order(step, args, keywords))
    options = Options(
        keep_checkpoint=wishes.keep_checkpoint,
        roll=wishes.roll,
        as_written=way == "straight",
        segments=way == "straight",
        group=2 if way == "in groups" else 0,
        layer_blocks=3 if way == "in blocks" else 0,
        early_gradients=True,
    )
    traced = trace_step(record_for(step, specs), specs, options)
    whole = sum(device_bytes(spec) for spec in jax.tree.leaves(specs))
    least = least_bytes(budget, whole)
    return take_survey(step, specs, traced, target, options, least)


def pins_that_hold(survey: Survey, pin):
    """Of these pins, those that some value of the step can be given."""
    held = {}
    for pattern, decision in pin.items():
        alone = Preferences(pin={pattern: decision}, least_bytes=survey.least_bytes)
        try:
            alone.narrow(survey.bodies)
            alone.check_matched()
        except stowax.StowaxError:
            continue
        held[pattern] = decision
    return held


def draw_decisions(survey: Survey, chooser) -> Drawn:
    """A step under decisions that `chooser` makes.

    Each kind of value has its own odds, so that programs that move all of one kind and
    nothing of another are as frequent as those that move some of each.
    """
    odds: dict[tuple[str, str], int] = {}

    def whether(what, value):
        key = what, value.role
        if key not in odds:
            odds[key] = chooser.choose((0, 1, 1, 2, 4))  # never, always, once in …
        return odds[key] > 0 and chance(chooser, odds[key])

    survey = dataclasses.replace(survey, tight=chance(chooser, 2))
    problem = survey.problem(survey.target.device_bytes, survey.target.host_bytes)
    decisions = named(
        problem,
        keep=lambda body, value: value.needed and whether("keep", value),
        offload=lambda body, value: (
            (value.needed or body.phase == "update") and whether("offload", value)
        ),
    )
    return decided(survey, decisions)


def offload_everything(survey: Survey) -> Drawn:
    """A step whose parameters, gradients and state are on the host where they can be.

    Of the activations what the backward pass needs is kept.
    """
    problem = survey.problem(survey.target.device_bytes, survey.target.host_bytes)
    decisions = named(
        problem,
        keep=lambda body, value: value.needed,
        offload=lambda body, value: body.phase == "update",
    )
    return decided(survey, decisions)


def decided(survey: Survey, decisions) -> Drawn:
    """A step under these decisions."""
    moved = {
        f"{how} {value.role}"
        for body, chosen in zip(survey.bodies, decisions, strict=True)
        for value, how in zip(body.values, chosen, strict=True)
        if how and not (body.phase == "update" and how == "keep")
    }
    plan = survey.step_plan(decisions)
    step = apply_decisions(
        survey.function, plan, survey.options, donate=survey.step.donate
    )
    return Drawn(step=step, moved=tuple(sorted(moved)), kinds=_kinds(survey, plan))


def _kinds(survey, plan):
    """As `Plan.place` has them: with state on the host, all that is returned moves."""
    count = len(survey.step.arguments)
    if plan.hosted is None:
        return (None,) * count
    shards, orders = plan.hosted.shards, plan.hosted.orders
    returned = Kind(memory="device")
    return tuple(
        Kind(memory="pinned_host", order=orders.get(i))
        if i in shards
        else returned
        if i in survey.step.updates
        else None
        for i in range(count)
    )
