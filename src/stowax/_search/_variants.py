"""The ways to write a step beside its layers as loops: one function each.

A variant is a `Space` of its own; the search over them is the same loop. First in here
is the step as it is, which is compiled where it may fit.
"""

import dataclasses
from collections.abc import Callable

import jax

from .._layers._stack import Stack, moves
from .._records._stages import Options, Problem
from .._state._shards import device_bytes
from .._state._state import search_state
from .._survey._groups import best_group
from .._survey._options import wants_early_gradients
from .._survey._survey import Survey, predict
from .._survey._take import take_survey
from .._trial._compiled import compile_and_read, outcome
from .._update._blocks import BlockSize
from ._correction import Memory
from ._space import Attempt, Space, new_space, rolled_space, unmet

_DOUBT, _DOUBT_UNROLLED = 1.08, 1.35
"""How far predictions of layers as they are written may be above the truth.

Measured on the models of the benchmarks and of the tutorial: scans by 8 %, unrolled
loops by up to 31 %. A compile that is not needed costs less than a plan that is not.
"""

_PART = 0.1
"""Part of what backward passes read that is worth planning outside of layers."""

_TILES = 8
"""Blocks of tokens at most: of each the weights are read anew."""

_SMALL_TILES = 32
"""The same, where nothing fits."""

_FINER = 16
"""Where nothing fits, arrays so many times smaller may be offloaded."""


# --- the step as it is ----------------------------------------------------------------


def is_straight(space: Space) -> bool:
    """Whether layers are a Python loop's: XLA orders what is in one as it likes.

    It updates a parameter as soon as its gradient is there, where the step as it is
    traced has all gradients first. A prediction knows nothing of that.
    """
    return any(t.stack.separate for t in space.survey.step.stacks.values())


def plain_bytes(space: Space, *, donate: bool) -> int:
    """Device bytes that the step as it is may need at least.

    By what its other program needed, or by how far a prediction may be off.
    """
    if known := space.asked.written:
        excess = sum(a.measured.excess for a in known.values())
        return _foreseen(space, donate=donate) + excess
    needed = foreseen_bytes(space, donate=donate)
    return int(needed / (_DOUBT_UNROLLED if is_straight(space) else _DOUBT))


def foreseen_bytes(space: Space, *, donate: bool) -> int:
    """Device bytes that are predicted for the step as it is; nothing is compiled."""
    needed = _foreseen(space, donate=donate)
    if donate and is_straight(space):
        return min(needed, _foreseen(space, donate=False) - _returned(space))
    return needed


def _foreseen(space: Space, *, donate: bool) -> int:
    return predict(space.survey, None, donate=donate).device_total


def plain(space: Space, budget: int | None, *, donate: bool) -> Attempt:
    """The step as it is, compiled, or as it was for another search.

    Where it is to say what a share of it is, there is no `budget` yet.
    """
    asked = space.asked
    if donate in asked.written:
        return dataclasses.replace(asked.written[donate], space=space)
    asked.say(f"compiling the step as it is{', its state donated' * donate}")
    measured = compile_and_read(
        space.survey,
        "as written",
        None,
        asked.compiler_options,
        cache=asked.cache,
        correction=sum(a.measured.excess for a in asked.written.values()),
        donate=donate,
    )
    asked.say(outcome(measured, budget, asked.host_budget))
    attempt = Attempt(
        space=space,
        decisions=None,
        solution=None,
        options=asked.compiler_options,
        donated=donate,
        measured=measured,
    )
    asked.written[donate] = attempt
    return attempt


def _returned(space: Space) -> int:
    """Bytes of the arguments that results may overwrite."""
    leaves, step = jax.tree.leaves(space.survey.specs), space.survey.step
    return sum(
        device_bytes(leaves[i])
        for i in step.updates
        if step.arguments[i].position in step.donate
    )


# --- the variants beside the rolled one -----------------------------------------------


def as_written(rolled: Space, budget: int) -> Space | None:
    """Layers of a Python loop, and straight-line code, as they are.

    Each value of them is kept or recomputed. What can leave is optimizer state: in
    straight-line code XLA drops other copies. But no weights are picked for one layer
    at a time, no gradients stacked, and the compiler fuses across layers. Straight-line
    code is planned in segments where it holds a part of what backward passes read. Not
    where more is wanted, and not on a CPU, whose compiler looks through the barriers.
    """
    found = _written(rolled, tiles=0)
    if found is None:
        return None
    space = new_space(found[0], rolled.asked, budget, found[1])
    known = rolled.asked.written
    space.memory.plain = sum(a.measured.excess for a in known.values())
    return space


def in_tiles(rolled: Space, budget: int) -> Space | None:
    """A loss over a large vocabulary in blocks of tokens, all else as it would be.

    Not where it holds little of what backward passes read.
    """
    return _in_tiles(rolled, budget, _TILES, "blocks", _PART)


def in_small_tiles(rolled: Space, budget: int) -> Space | None:
    """The same in smaller blocks, however little it holds."""
    return _in_tiles(rolled, budget, _SMALL_TILES, "small blocks", 0.0)


def _in_tiles(
    rolled: Space, budget: int, most: int, blocks: str, least: float
) -> Space | None:
    """The loss in blocks that hold `least` of what backward passes read, or more."""
    if not _has_tiles(rolled):
        return None
    options = dataclasses.replace(rolled.survey.options, tiles=most)
    found = _written(rolled, tiles=most)
    name, free = found or ("", _surveyed(rolled.survey, options))
    little = _held(free, lambda stack: stack.tiles) < least
    if little and not rolled.preferences.tiles:
        return None
    name = f"the loss in {blocks} of tokens" + (f", {name}" if name else "")
    return new_space(name, rolled.asked, budget, free)


def _has_tiles(rolled: Space) -> bool:
    """Whether the step has a loss that can run in blocks, and the user allows it."""
    own = rolled.survey
    options = dataclasses.replace(own.options, tiles=_TILES)
    if rolled.preferences.tiles is False:
        return False
    try:
        step = own.programs.step(own.step.recording, own.specs, options)
    except Exception:  # what cannot be read in this way is planned in the others
        return False
    return any(traced.stack.tiles for traced in step.stacks.values())


def _written(rolled: Space, *, tiles: int) -> tuple[str, Survey] | None:
    """Layers of a Python loop and straight-line code as they are, under a name."""
    own, unrolled = rolled.survey, is_straight(rolled)
    if own.target.platform == "cpu" or (unrolled and _wants_a_loop(rolled)):
        return None
    options = dataclasses.replace(
        own.options, as_written=unrolled, segments=True, tiles=tiles
    )
    free = _surveyed(own, options)
    name = "straight-line code in segments"
    if free.step.recording.left != own.step.recording.left:
        return None  # it could not be read so
    if _held(free, lambda stack: stack.segment) < _PART:
        if not unrolled:
            return None
        name = "layers as they are written"
        free = _surveyed(own, dataclasses.replace(options, segments=False))
    return (name, free) if free.bodies else None


def in_segments(rolled: Space, budget: int) -> Space | None:
    """A Python loop's layers in segments, each with decisions of its own.

    Blocks that repeat in turn, as layers with two windows do, are one body: all of it
    is computed again at once. In segments no more than one layer of it is.
    """
    own = rolled.survey
    if not is_straight(rolled) or own.target.platform == "cpu" or _wants_a_loop(rolled):
        return None
    free = _surveyed(own, dataclasses.replace(own.options, roll=False, segments=True))
    if free.step.recording.left != own.step.recording.left or not free.bodies:
        return None
    space = new_space("all layers in segments", rolled.asked, budget, free)
    return space if unmet(space) is None else None  # a pin may name what is a layer's


def _surveyed(own: Survey, options: Options, **wishes: bool) -> Survey:
    """A step surveyed anew, to be read in another way."""
    return take_survey(
        own.function,
        own.specs,
        own.programs.step(own.step.recording, own.specs, options),
        own.target,
        options,
        own.least_bytes,
        programs=own.programs,
        **wishes,
    )


def _held(survey: Survey, which: Callable[[Stack], bool]) -> float:
    """Part of what backward passes read that some of the stacks hold."""
    stacks = survey.step.stacks
    whole, mine = 0, 0
    for body in survey.bodies:
        if body.phase == "layers":
            read = sum(v.bytes for v in body.values if v.needed and not v.available)
            whole += read * body.count
            mine += read * body.count * which(stacks[body.name].stack)
    return mine / whole if whole else 0.0


def _wants_a_loop(rolled: Space) -> bool:
    """Whether the user wants something of the layers in host memory."""
    return any(
        value.needed and not value.available and value.allowed == {"offload"}
        for body in rolled.survey.bodies
        for value in body.values
        if value.role != "optimizer state"
    )


def in_groups(rolled: Space, budget: int) -> Space | None:
    """Loops that store the input of every k-th layer only, where that may be faster.

    A group runs forward once more before its backward pass. The planner says of how
    many layers groups should be; of those that are as fast, groups that need the least.
    """
    return _grouped(rolled, budget, rolled.problem(budget))


def least(rolled: Space, budget: int) -> Space | None:
    """Layers in groups and losses in small blocks, each where that needs less."""
    space = rolled
    if _has_tiles(rolled):
        options = dataclasses.replace(rolled.survey.options, tiles=_SMALL_TILES)
        free = _surveyed(rolled.survey, options)
        space = new_space("the loss in small blocks", rolled.asked, budget, free)
    problem = dataclasses.replace(space.problem(budget), device_bytes=0)
    return _grouped(space, budget, problem)


def _grouped(space: Space, budget: int, problem: Problem) -> Space | None:
    own = space.survey
    size = 0 if _wants_a_loop(space) else best_group(own, problem)
    if not size:
        return None
    free = _surveyed(own, dataclasses.replace(own.options, group=size))
    name = f"{space.name}, layers in groups of {size}"
    return new_space(name, space.asked, budget, free)


def early(rolled: Space, budget: int) -> Space | None:
    """On a GPU, weights' gradients computed where they arise.

    They hold nothing then, but copies hid behind those that waited.
    """
    del budget
    own = rolled.survey
    if not wants_early_gradients(own.target, rolled.asked.specs):
        return None
    options = dataclasses.replace(own.options, early_gradients=True)
    survey = dataclasses.replace(own, options=options)
    return _sparing(rolled, "gradients early", survey, own)


def tight(rolled: Space, budget: int) -> Space | None:
    """Copies are waited for that take memory ahead.

    Gradients are written before the next layer begins, and what is offloaded early in
    a layer is written in it, and fetched when it is read. It can be slower, and needs
    up to two layers' gradients and one layer's values less. On a GPU gradients are
    early, too.
    """
    than = (early(rolled, budget) or rolled).survey
    survey = dataclasses.replace(than, tight=True)
    return _sparing(rolled, "copies waited for", survey, than)


def _sparing(rolled: Space, how: str, survey: Survey, than: Survey) -> Space | None:
    """The variant of a survey, unless its smallest plans are programs of another's."""
    if not any("offload" in v.allowed for body in survey.bodies for v in body.values):
        return None  # without copies it is the same program
    known, is_early = rolled.memory, survey.options.early_gradients
    new = is_early and not than.options.early_gradients
    pairs = [(survey.step_plan(d), than.step_plan(d)) for d in rolled.least]
    if pairs and not any(
        mine.hosted
        or mine.stacks != other.stacks
        or (new and any(moves(stack.stored) for stack in mine.stacks.values()))
        for mine, other in pairs
    ):
        return None
    # What gradients that waited held is no measure where none wait.
    plain = known.plain if is_early else known.mean_excess()
    memory = Memory(survey=survey, scale=known.scale, plain=plain)
    return rolled.afresh(name=f"{rolled.name}, {how}", survey=survey, memory=memory)


def returned(rolled: Space, budget: int) -> Space | None:
    """Gradients that the step returns of parameters in host memory come there, too.

    By themselves they come on the device: what computes with them next would refuse
    host memory.
    """
    own = rolled.survey
    if own.state is None or not own.state.read_only or rolled.refusals:
        return None
    leaves = jax.tree.leaves(own.specs)
    least = own.least_bytes
    found = search_state(own.step, leaves, own.target, least, returned=True)
    outputs = {n for n in found.program.outputs if isinstance(n, int)}
    if found.feeds.gradients.keys().isdisjoint(outputs):
        return None
    free = _surveyed(own, own.options, gradients_on_host=True)
    return new_space("gradients in host memory", rolled.asked, budget, free)


def returned_tight(rolled: Space, budget: int) -> Space | None:
    """The same, copies waited for."""
    space = returned(rolled, budget)
    return None if space is None else tight(space, budget)


def finer(rolled: Space, budget: int) -> Space | None:
    """Small arrays may be offloaded, too, where they could make it fit.

    Their copies take longer than their bytes say.
    """
    own, asked = rolled.survey, rolled.asked
    small = BlockSize.least(own.least_bytes).leaf_bytes
    sizes = [device_bytes(spec) for spec in jax.tree.leaves(asked.specs)]
    # One of them may have a gradient that waits for it, of its size.
    freed = 2 * sum(size for size in sizes if size < small)
    least = own.least_bytes // _FINER
    needed = min(map(rolled.memory.expected, rolled.least), default=own.reserved_bytes)
    if asked.donate is False or rolled.refusals or not least or needed - freed > budget:
        return None
    asked.say("nothing fits: smaller arrays may be offloaded, too")
    space = rolled_space(asked, budget, least)
    return dataclasses.replace(space, name="smaller arrays, too")


Variant = Callable[[Space, int], Space | None]
"""Of the rolled variant and a budget, another one under a name of its own, or `None`
where it would be no other program.

One that surveys anew is a `new_space`; one that does not comes of `Space.afresh`, with
a `Memory` whose predictions and programs are its own. Compiler options come of the
survey (`options_for`).
"""

BESIDE: tuple[Variant, ...] = (as_written, in_tiles, in_groups)
"""What may be faster than layers as loops: searched with these from the start."""

WHERE_NOTHING_FITS: tuple[Variant, ...] = (
    *(in_segments, early, tight, in_small_tiles, least),
    *(returned, returned_tight, finer),
)
"""What needs less: opened in turn until one is expected to fit, the dearest last.

Of those of which that is not foretold one program each is compiled, after all are open.
"""
