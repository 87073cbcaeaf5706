"""Sums, maxima and the like of whole arrays, made block by block.

A gradient in host memory has a norm that the step needs: it is read once for it, in
blocks, and again for the update. The order of the additions is not that of a sum of the
whole array: the last digits may differ.

Under a mesh a block's sum would be one of all devices', in every iteration. There
blocks are added up element by element, and their sum is taken after the last one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs._jaxpr import Program

_WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "reduce_sum": (jnp.sum, jnp.add),
    "reduce_max": (jnp.max, jnp.maximum),
    "reduce_min": (jnp.min, jnp.minimum),
    "reduce_and": (jnp.all, jnp.logical_and),
    "reduce_or": (jnp.any, jnp.logical_or),
}
"""How a block's elements become one number, and how two such numbers become one."""


def first_total(program: Program, number: int, piece: Sequence[int]) -> Any:
    """What a total is before the first block, of the shape `piece`.

    Narrow sums are kept in 32 bits.
    """
    node = program.nodes[program.maker[number]]
    start = _start(program, number)
    on_mesh = node.equation.invars[0].aval.sharding.mesh.size > 1
    return jax.lax.broadcast(start, tuple(piece)) if on_mesh else start


def _start(program: Program, number: int) -> Any:
    name = program.nodes[program.maker[number]].equation.primitive.name
    dtype = program.avals[number].dtype
    floating = jnp.issubdtype(dtype, jnp.floating)
    if name == "reduce_sum":
        return jnp.zeros((), jnp.float32 if floating and dtype.itemsize < 4 else dtype)
    if name in ("reduce_and", "reduce_or"):
        return jnp.asarray(name == "reduce_and")
    largest = name == "reduce_max"
    if floating:
        return jnp.asarray(-jnp.inf if largest else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if largest else limits.max, dtype)


def next_total(
    program: Program, number: int, total: Any, values: Mapping[int, Any]
) -> Any:
    """`total` with one more block in it; `values` are the block's, by number."""
    node = program.nodes[program.maker[number]]
    within, between = _WAYS[node.equation.primitive.name]
    (operand,) = node.inputs
    block = values[operand if operand is not None else -1].astype(total.dtype)
    return between(total, block if total.ndim else within(block)).astype(total.dtype)


def last_total(program: Program, number: int, total: Any) -> Any:
    """The number that a total is, after the last block."""
    within, _ = _WAYS[program.nodes[program.maker[number]].equation.primitive.name]
    return within(total) if total.ndim else total


def joined_totals(program: Program, number: int, one: Any, other: Any) -> Any:
    """The number that two totals are together, each of blocks of its own."""
    _, between = _WAYS[program.nodes[program.maker[number]].equation.primitive.name]
    parts = (last_total(program, number, total) for total in (one, other))
    return between(*parts).astype(one.dtype)
