"""The ways to write a step beside its layers as loops: one function each.

A variant is a `Space` of its own; the search over them is the same loop.
"""

import dataclasses
from collections.abc import Callable

import jax

from .._cost._record import bytes_of
from .._errors import ArgumentError
from .._layers._stack import Stack, moves
from .._records._stages import Options, Problem
from .._state._shards import device_bytes
from .._state._state import has_host_memory, search_state
from .._step._trace import Step, TracedStack, available
from .._survey._groups import best_group, is_open
from .._survey._options import wants_early_gradients
from .._survey._survey import Survey
from .._survey._take import take_survey
from .._update._blocks import BlockSize
from ._correction import Memory
from ._space import Space, new_space, unmet

_PART = 0.1
"""Part of what backward passes read that is worth planning outside of layers."""

_TILES = 8
"""Blocks of tokens at most: of each the weights are read anew."""

_SMALL_TILES = 32
"""The same, where nothing fits."""

_FINER = 16
"""Where nothing fits, arrays so many times smaller may be offloaded."""


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
    name, options = found
    space = new_space(name, rolled.asked, budget, _surveyed(rolled.survey, options))
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
    own = rolled.survey
    tiled = dataclasses.replace(own.options, tiles=most)
    name, options = _written(rolled, tiles=most) or ("", tiled)
    little = _held(_step(own, options), lambda stack: stack.tiles) < least
    if little and not rolled.preferences.tiles:
        return None
    name = f"the loss in {blocks} of tokens" + (f", {name}" if name else "")
    return new_space(name, rolled.asked, budget, _surveyed(own, options))


def _has_tiles(rolled: Space) -> bool:
    """Whether the step has a loss that can run in blocks, and the user allows it."""
    options = dataclasses.replace(rolled.survey.options, tiles=_TILES)
    return any(traced.stack.tiles for traced in _read(rolled, options))


def _read(rolled: Space, options: Options) -> list[TracedStack]:
    """The step's stacks where it is read so; none if it cannot be, or must not."""
    if rolled.preferences.tiles is False:
        return []
    try:
        step = _step(rolled.survey, options)
    except Exception:  # it is planned in the other ways
        return []
    return [*step.stacks.values()]


def in_blocks(rolled: Space, budget: int) -> Space | None:
    """What wide products within layers make in blocks, each computed again.

    Scores of attention, say, or what feeds forward. Not where one layer's take little
    of the budget.
    """
    return _all_in_blocks(rolled, budget, _TILES, "blocks", _PART * budget)


def _all_in_blocks(
    rolled: Space, budget: int, most: int, blocks: str, large: float = 0.0
) -> Space | None:
    """Products within layers of over so many bytes in blocks, and the loss."""
    options, widest = _blocks(rolled, most)
    if widest <= large:
        return None
    name = f"wide products in {blocks}"
    if _has_tiles(rolled):
        options = dataclasses.replace(options, tiles=most)
        name += ", the loss too"
    free = _surveyed(rolled.survey, options)
    space = new_space(name, rolled.asked, budget, free)
    return space if unmet(space) is None else None


def _blocks(rolled: Space, most: int) -> tuple[Options, int]:
    """Layers in at most `most` blocks; without layers, straight-line code is.

    Also the bytes of the widest product; 0 where there is none, or some of what is in
    blocks must not be computed again.
    """
    own, asked = rolled.survey, rolled.asked
    straight = not rolled.layers and own.target.platform != "cpu"
    segments = own.options.segments or straight
    options = dataclasses.replace(own.options, layer_blocks=most, segments=segments)
    closed = (asked.pin or asked.forbid) if straight else ()
    open_ = not closed and all(map(is_open, rolled.layers))
    read = _read(rolled, options) if open_ else ()
    products = [product.bytes for traced in read for product in traced.body.blocks]
    return options, max(products, default=0)


def _written(rolled: Space, *, tiles: int) -> tuple[str, Options] | None:
    """How to read layers of a Python loop and straight-line code as they are."""
    own, unrolled = rolled.survey, rolled.is_straight
    if own.target.platform == "cpu" or (unrolled and _wants_a_loop(rolled)):
        return None
    options = dataclasses.replace(
        own.options, as_written=unrolled, segments=True, tiles=tiles
    )
    step, name = _step(own, options), "straight-line code in segments"
    if step.recording.left != own.step.recording.left:
        return None  # it could not be read so
    if _held(step, lambda stack: stack.segment) < _PART:
        if not unrolled:
            return None
        name = "layers as they are written"
        options = dataclasses.replace(options, segments=False)
    return (name, options) if _step(own, options).stacks else None


def in_segments(rolled: Space, budget: int) -> Space | None:
    """A Python loop's layers in segments, each with decisions of its own.

    Blocks that repeat in turn, as layers with two windows do, are one body: all of it
    is computed again at once. In segments no more than one layer of it is.
    """
    own = rolled.survey
    if not rolled.is_straight or own.target.platform == "cpu" or _wants_a_loop(rolled):
        return None
    options = dataclasses.replace(own.options, roll=False, segments=True)
    step = _step(own, options)
    cut = any(traced.stack.segment for traced in step.stacks.values())
    if step.recording.left != own.step.recording.left or not cut:
        return None
    free = _surveyed(own, options)
    space = new_space("all layers in segments", rolled.asked, budget, free)
    return space if unmet(space) is None else None  # a pin may name what is a layer's


def _step(own: Survey, options: Options) -> Step:
    """The step read in another way; each is traced once."""
    return own.programs.step(own.step.recording, own.specs, options)


def _surveyed(own: Survey, options: Options, **wishes: bool) -> Survey:
    """A step surveyed anew, to be read in another way."""
    return take_survey(
        own.function,
        own.specs,
        _step(own, options),
        own.target,
        options,
        own.least_bytes,
        programs=own.programs,
        **wishes,
    )


def _held(step: Step, which: Callable[[Stack], bool]) -> float:
    """Part of what backward passes read that some of the stacks hold."""
    whole, mine = 0, 0
    for traced in step.stacks.values():
        stack, avals = traced.stack, traced.body.forward.avals
        read = {*traced.body.residuals} - available(stack, traced.body)
        held = stack.count * sum(bytes_of(avals[number]) for number in read)
        whole += held
        mine += held * which(stack)
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
    """Losses and wide products in small blocks, and layers in groups: what there is."""
    blocks = space = _all_in_blocks(rolled, budget, _SMALL_TILES, "small blocks")
    if space is None and _has_tiles(rolled):
        options = dataclasses.replace(rolled.survey.options, tiles=_SMALL_TILES)
        free = _surveyed(rolled.survey, options)
        space = new_space("the loss in small blocks", rolled.asked, budget, free)
    space = space or rolled
    problem = dataclasses.replace(space.problem(budget), device_bytes=0)
    return _grouped(space, budget, problem) or blocks


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


def finer(known: Space, budget: int) -> Space | None:
    """Small arrays may be offloaded, too, where they could make a variant fit.

    Their copies take longer than their bytes say.
    """
    own, asked = known.survey, known.asked
    if not has_host_memory(asked.machine):
        return None
    small = BlockSize.least(own.least_bytes).leaf_bytes
    sizes = [device_bytes(spec) for spec in jax.tree.leaves(asked.specs)]
    # One of them may have a gradient that waits for it, of its size.
    freed = 2 * sum(size for size in sizes if size < small)
    least = own.least_bytes // _FINER
    needed = min(map(known.memory.expected, known.least), default=own.reserved_bytes)
    if asked.donate is False or known.refusals or not least or needed - freed > budget:
        return None
    asked.say("nothing fits: smaller arrays may be offloaded, too")
    small_too = dataclasses.replace(own, least_bytes=least)
    survey = _surveyed(small_too, own.options, gradients_on_host=own.gradients_on_host)
    free = dataclasses.replace(survey, tight=own.tight)
    space = new_space(f"{known.name}, smaller arrays, too", asked, budget, free)
    space.memory.plain = known.memory.mean_excess()
    return space


Variant = Callable[[Space, int], Space | None]
"""Of the rolled variant and a budget, another one under a name of its own, or `None`
where it would be no other program. `finer` is then asked of what needs the least.

One that surveys anew is a `new_space`; one that does not comes of `Space.afresh`, with
a `Memory` whose predictions and programs are its own. Compiler options come of the
survey (`Space.options_for`).
"""

BESIDE: tuple[Variant, ...] = (
    *(in_segments, as_written, in_tiles, in_groups, in_blocks),
)
"""What may be faster than layers as loops: searched with these from the start."""

WHERE_NOTHING_FITS: tuple[Variant, ...] = (
    *(early, tight, in_small_tiles, least),
    *(returned, returned_tight, finer),
)
"""What needs less: opened in turn until one is expected to fit, the dearest last.

Of those of which that is not foretold one program each is compiled, after all are open.
"""


def matching(rolled: Space, budget: int, error: ArgumentError) -> list[Space]:
    """The variants that have what a user's pins meet, where layers as loops do not.

    **Raises:** where none has, what is wrong of the first that plans more than state:
    it names the values that could be meant. `error`, of layers as loops, if none does.
    """
    found = [s for variant in BESIDE if (s := variant(rolled, budget)) is not None]
    ways = [(space, unmet(space)) for space in found]
    if met := [space for space, wrong in ways if wrong is None]:
        return met
    tried = [(rolled, error), *ways]
    raise next((e for s, e in tried if e and s.survey.step.stacks), error)
