"""A loss over a large vocabulary, in blocks of tokens.

A model's last product makes an array far larger than what it reads: the logits. What is
made of them, a loss, a mask, a soft cap, works token by token, and ends in sums. So it
can run in a loop over blocks of tokens that never has all logits at once. No form of a
loss is looked for: what counts is that every operation has a lane (`_lanes`) along
which the blocks do not know of one another, and that little comes out whole.

What wide products within a layer make runs so, too (`layer_in_blocks`): there the loop
is part of the layer, and computes its blocks again.

`find_tiling` (`_tile_region`) grows such a region from the product on. `tiled` writes
the program with the region as a scan; that is a stack like every other then, whose
values are kept, or computed again block by block. Numbers are those of the program but
for the order of sums over tokens: of scalars, and of gradients that all blocks add to.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ._jaxpr import Program, bind, spec_of, trace, typed_as
from ._lanes import Axis, on_blocks
from ._narrowed import narrowed
from ._tile_region import ESCAPES, Tiling, find_tiling, values_of

SCOPE = "stowax.tiles"
"""Named scope of the loop over blocks."""

LAYER_SCOPE = "stowax.blocks"
"""The same of a loop within a layer."""

_REGIONS = 4
"""Regions of a program at most: heads of their own for several tokens ahead."""


def all_tiled(program: Program, most: int) -> Program | None:
    """The program with its large losses in at most `most` blocks; none without any."""
    program = narrowed(program)
    found, least = find_tiling(program, most), 0
    if found is None:
        return None
    for _ in range(_REGIONS):
        least = max(least, int(found.bytes * ESCAPES))
        program = tiled(program, found)
        found = find_tiling(program, most, least)
        if found is None:
            break
    return program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InBlocks:
    """A wide product within a layer: its line, its bytes, and in how many blocks."""

    source: str
    bytes: int
    count: int


def layer_in_blocks(
    program: Program, most: int
) -> tuple[Program, tuple[InBlocks, ...]]:
    """A layer with what its wide products make in at most `most` blocks.

    Scores of attention and what feeds forward, say. Blocks are computed again for their
    gradients, so that no more than one of them is there at a time.

    **Returns:** also the products that run in blocks.
    """
    products: list[InBlocks] = []
    least = 0
    while len(products) < _REGIONS:
        found = find_tiling(program, most, least, in_layer=True)
        if found is None:
            break
        source = _jax.source_text(program.nodes[min(found.own)].equation)
        product = InBlocks(source=source, bytes=found.bytes, count=found.count)
        products.append(product)
        least = max(least, int(found.bytes * ESCAPES))
        program = tiled(program, found, again=True)
    return program, tuple(products)


def tiled(program: Program, tiling: Tiling, *, again: bool = False) -> Program:
    """The program with its region as a scan over blocks, computed `again` or not."""
    nodes, beyond = program.nodes, _beyond(program, tiling)
    reads, inside = values_of(program, tiling.lanes)
    wanted = {i for k in beyond for i in nodes[k].read_values} | program.outputs_read
    wanted |= {i for i, _ in reads - inside}
    made = {*tiling.summed, *(i for i, _ in tiling.returned)}
    made |= {o for k in beyond for o in nodes[k].outputs}
    given = range(program.input_count + program.const_count)
    early = program.closure(wanted - made, given, effects=True)

    def run(*inputs: Any) -> list[Any]:
        env = {**program.constants(), **dict(enumerate(inputs))}

        def run_nodes(positions: Sequence[int]) -> None:
            for k in positions:
                out = bind(nodes[k].equation, nodes[k].read(env))
                env.update(zip(nodes[k].outputs, out, strict=True))

        run_nodes(early)
        scope = LAYER_SCOPE if again else SCOPE
        with _jax.source_of(nodes[min(tiling.own)].equation), jax.named_scope(scope):
            env.update(_run_blocks(program, tiling, env, again=again))
        run_nodes(sorted(beyond))
        return program.read_outputs(env, len(program.outputs))

    inputs = [spec_of(aval) for aval in program.avals[: program.input_count]]
    return Program(trace(run, *inputs))


def is_tiled(equation: Any) -> bool:
    """Whether a scan is a region that runs in blocks."""
    return SCOPE in str(equation.source_info.name_stack)


def _run_blocks(
    program: Program, tiling: Tiling, env: Mapping[int, Any], *, again: bool
) -> dict[int, Any]:
    """The values that come out of a region."""
    parts = [_in_blocks(env[i], axis, tiling) for i, axis in tiling.cut]

    def block(totals: list[Any], parts: list[Any], steps: int) -> tuple[Any, Any]:
        made = _run_block(program, tiling, env, parts, steps)
        sums = zip(totals, tiling.summed, strict=True)
        totals = [total + made[i, None].astype(total.dtype) for total, i in sums]
        return totals, [made[key] for key in tiling.returned]

    rest_of = functools.partial(block, steps=tiling.left)
    equal = functools.partial(block, steps=tiling.steps // tiling.count)
    if again:
        # A scan keeps these apart: no barrier has to.
        equal = jax.checkpoint(equal, prevent_cse=False)
        rest_of = jax.checkpoint(rest_of)
    zeros = [_zero(program.avals[i]) for i in tiling.summed]
    totals, blocks = jax.lax.scan(
        equal, zeros, [blocks for blocks, _ in parts], length=tiling.count
    )
    axes = [axis for _, axis in tiling.returned]
    found = [_joined(value, axis) for value, axis in zip(blocks, axes, strict=True)]
    if tiling.left:
        totals, rest = rest_of(totals, [rest for _, rest in parts])
        found = [
            jax.lax.concatenate(both, axis)
            for *both, axis in zip(found, rest, axes, strict=True)
        ]
    numbers = [*tiling.summed, *(i for i, _ in tiling.returned)]
    return {
        i: typed_as(value.astype(program.avals[i].dtype), program.avals[i])
        for i, value in zip(numbers, [*totals, *found], strict=True)
    }


def _run_block(
    program: Program,
    tiling: Tiling,
    env: Mapping[int, Any],
    parts: Sequence[Any],
    steps: int,
) -> dict[tuple[int, Axis], Any]:
    """The region on a block of so many steps, whose `parts` are of what is cut."""
    cut: dict[Any, Any] = dict(zip(tiling.cut, parts, strict=True))
    made: dict[tuple[int, Axis], Any] = {}
    for position, lane in tiling.lanes.items():
        node = program.nodes[position]
        read = [
            atom.val
            if number is None
            else made[number, axis]
            if (number, axis) in made
            else cut[number, axis]
            if axis is not None
            else env[number]
            for number, axis, atom in zip(
                node.inputs, lane.ins, node.equation.invars, strict=True
            )
        ]
        out = bind(on_blocks(node.equation, lane, steps, tiling.steps), read)
        made.update(zip(zip(node.outputs, lane.outs, strict=True), out, strict=True))
    return made


def _zero(aval: Any) -> Any:
    """What a sum over blocks starts from: of narrow floats it is made in float32."""
    narrow = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
    return _jax.zeros(aval, jnp.float32 if narrow else None)


def _in_blocks(value: Any, axis: int, tiling: Tiling) -> tuple[Any, Any]:
    """An array's blocks, along a first axis of their own, and what they leave."""
    shape, count = value.shape, tiling.count
    size = shape[axis] // tiling.steps * (tiling.steps // count)
    equal = jax.lax.slice_in_dim(value, 0, count * size, axis=axis)
    split = (*shape[:axis], count, size, *shape[axis + 1 :])
    rest = jax.lax.slice_in_dim(value, count * size, None, axis=axis)
    return jnp.moveaxis(jnp.reshape(equal, split), axis, 0), rest


def _joined(blocks: Any, axis: int) -> Any:
    """The array that these are the blocks of."""
    value = jnp.moveaxis(blocks, 0, axis)
    shape = value.shape
    whole = shape[axis] * shape[axis + 1]
    return jnp.reshape(value, (*shape[:axis], whole, *shape[axis + 2 :]))


def _beyond(program: Program, tiling: Tiling) -> set[int]:
    """Positions of the nodes that make something of what comes out of the region."""
    made = {i for i, _ in tiling.returned} | {*tiling.summed}
    found: set[int] = set()
    for position in program.closure(program.outputs_read, (), effects=True):
        node = program.nodes[position]
        if position not in tiling.own and not made.isdisjoint(node.inputs):
            found.add(position)
            made.update(node.outputs)
    return found
