"""What operations cost on a chip: counts operations and bytes, then asks for the time.

The planner trades seconds of recomputation against bytes, so it calls
`operation_seconds` on the body of a repeated layer. `_rules` knows the primitives;
this module knows programs: which operations XLA will fuse, how often a loop runs, and
what a chip needs.

**Fusion, in one rule.** XLA joins elementwise operations into loops that read their
inputs once and keep what is in between in registers. Here a program is cut into
*passes*: an operation's pass number is the largest of its inputs', plus one for each
input that a reduction or a kernel (a matrix product, a sort, …) made. Within a pass,
elementwise operations and reductions read a value from memory at most once (the first
reader pays), and what one of them makes for the others costs nothing. Its maker pays
for writing a value only if somebody else needs it: a later pass, a kernel, a loop, or
the caller. Views are free. So a chain of five elementwise operations costs one read and
one write, and a softmax three passes over its input. XLA does better at times (an
epilogue inside a matrix product) and worse at others; nothing is taken off for either.
On a GPU whatever writes to memory is a kernel, and starting one takes its time.

What goes silently wrong: a `while` of unknown length is priced for one trip, and a
kernel without a cost estimate by its bytes and the products in its body. Both are in
`unpriced`, and `operation_seconds` says so for each operation.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from .. import _jax
from .._errors import ArgumentError
from .._hardware._figures import INTERCONNECT_EFFICIENCY, VECTOR_EFFICIENCY, Chip
from ._passes import Flat, Passes, flatten
from ._record import OperationCost
from ._rules import (
    COLLECTIVES,
    LOOPS,
    TRANSCENDENTAL,
    collective_bytes,
    operand_bytes,
    result_bytes,
    rule_of,
)
from ._trips import trip_count

VECTOR_OPERATIONS_PER_BYTE = 4
"""Vector operations per byte of memory bandwidth, for a chip whose vector unit is
unknown: assumed (TPU v5p 5, H100 20)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """One priced operation: of which equation, how often, by how many devices alike."""

    owner: int
    cost: OperationCost
    times: int = 1
    devices: int = 1


_Axes = Mapping[str, int]


def cost_of_jaxpr(jaxpr: Any) -> OperationCost:
    """Operations and bytes of a jaxpr, open or closed, under the fusion rule.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + x)(jnp.ones(8, jnp.float32))
    >>> cost = cost_of_jaxpr(jaxpr)
    >>> cost.bytes_read, cost.bytes_written  # one read and one write of 8 floats
    (32, 32)
    """
    return _total(_leaves(_flat_of(jaxpr), {}))


def seconds(cost: OperationCost, chip: Chip) -> float:
    """Time that one device takes for `cost`, by the roofline.

    The larger of arithmetic (matrix and vector operations one after the other) and
    memory, plus communication: collectives wait for what they send. Rates are what
    programs reach of the chip's (Williams, Waterman and Patterson,
    *Roofline*, 2009). A dtype that the chip's table lacks runs at its slowest matrix
    rate; an unknown vector rate is taken from `VECTOR_OPERATIONS_PER_BYTE`, an unknown
    interconnect is as slow as memory.

    **Raises:** `ArgumentError` for a chip without a memory bandwidth or matrix rate.

    >>> from stowax._hardware._figures import MATRIX_EFFICIENCY
    >>> from stowax._hardware._hardware import CHIPS
    >>> product = OperationCost(matrix_flops=(("bfloat16", 989 * 10**12),))
    >>> round(seconds(product, CHIPS["h100"]) * MATRIX_EFFICIENCY, 6)
    1.0
    """
    nominal, reached = chip.memory_rate(), chip.memory_reached()
    if nominal is None or reached is None:
        raise ArgumentError(
            "chip", "one without a memory bandwidth", "Name a chip with that figure."
        )
    unknown = VECTOR_OPERATIONS_PER_BYTE * nominal * VECTOR_EFFICIENCY
    arithmetic = cost.vector_flops / (chip.vector_reached() or unknown)
    for dtype, flops in cost.matrix_flops:
        arithmetic += flops / _matrix_rate(chip, dtype)
    memory = cost.total_bytes / reached
    one_way = chip.interconnect.value
    wire_rate = one_way / 2 if one_way is not None else nominal
    wire = cost.collective_bytes / (wire_rate * INTERCONNECT_EFFICIENCY)
    return max(arithmetic, memory) + wire


def operation_seconds(
    program: Any,
    chip: Chip,
    shards_of: Callable[[int], int] = lambda number: 1,
    virtual: Set[int] = frozenset(),
) -> list[tuple[float, bool]]:
    """Seconds of every node of a program on one device, and whether a rule knew it.

    **Arguments:** `program` is a `_jaxpr.Program`; `shards_of(value_number)`
    says into how many parts a value is split over devices. An operation's work is split
    like the most finely split of its operands and results. `virtual` values are no
    arrays, neither written nor read. Bytes follow the fusion rule of this module, so
    the sum over a program is meaningful, and a value that only its own pass reads is
    cheap to recompute.

    **Returns:** one `(seconds, priced)` per node, in order. `priced` is false where
    something in the node had no rule, or the chip no figure for it.

    >>> import jax, jax.numpy as jnp
    >>> from stowax._hardware._hardware import CHIPS
    >>> from stowax._jaxprs._jaxpr import Program
    >>> program = Program(jax.make_jaxpr(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))))
    >>> [priced for _, priced in operation_seconds(program, CHIPS["v5p"])]
    [True, True]
    """
    totals = [0.0] * len(program.nodes)
    priced = [True] * len(program.nodes)
    computed = [v for v, number in program.numbers.items() if number in virtual]
    for leaf in _leaves(_flat_of(program.jaxpr), {}, computed):
        node = program.nodes[leaf.owner]
        numbers = [n for n in (*node.inputs, *node.outputs) if n is not None]
        shards = max((shards_of(n) for n in numbers), default=1)
        work = leaf.times * leaf.devices / max(shards, leaf.devices)
        totals[leaf.owner] += work * seconds(leaf.cost, chip) + _starting(leaf, chip)
        if leaf.cost.unpriced or not _known(leaf.cost, chip):
            priced[leaf.owner] = False
    return list(zip(totals, priced, strict=True))


def program_seconds(
    jaxpr: Any, chip: Chip, *, shards: int = 1, virtual: Iterable[Any] = ()
) -> float:
    """Seconds of a whole jaxpr on one device, operation by operation.

    `virtual` are variables of it that are no arrays. Larger than
    `seconds(cost_of_jaxpr(jaxpr), chip)`, which lets all arithmetic of the program
    hide behind all of its memory traffic.

    >>> import jax, jax.numpy as jnp
    >>> from stowax._hardware._hardware import CHIPS
    >>> jaxpr = jax.make_jaxpr(jnp.sin)(jnp.ones((1024, 1024)))
    >>> program_seconds(jaxpr, CHIPS["h100"]) > 0
    True
    """
    return sum(
        leaf.times * leaf.devices / max(shards, leaf.devices) * seconds(leaf.cost, chip)
        + _starting(leaf, chip)
        for leaf in _leaves(_flat_of(jaxpr), {}, virtual)
    )


def _starting(leaf: _Leaf, chip: Chip) -> float:
    """Seconds of starting kernels: one for whatever leaves its result in memory.

    Every device starts its own. What is fused into something else starts nothing.
    """
    return leaf.times * chip.launch_seconds if leaf.cost.bytes_written else 0.0


def _matrix_rate(chip: Chip, dtype: str) -> float:
    """What products of `dtype` reach, or of the slowest dtype that the table has."""
    rate = chip.matrix_reached(dtype)
    if rate is not None:
        return rate
    known = [r for d in ("float32", "bfloat16") if (r := chip.matrix_reached(d))]
    if not known:
        raise ArgumentError(
            "chip", "one without a matrix rate", "Name a chip with that figure."
        )
    return min(known)


def _known(cost: OperationCost, chip: Chip) -> bool:
    if cost.collective_bytes and chip.interconnect.value is None:
        return False
    return all(chip.matrix_reached(dtype) is not None for dtype, _ in cost.matrix_flops)


def _flat_of(jaxpr: Any) -> Flat:
    opened = _jax.open_jaxpr(jaxpr)
    inputs = [*opened.invars, *opened.constvars]
    return flatten(inputs, opened.eqns, opened.outvars)


def _total(leaves: Iterator[_Leaf]) -> OperationCost:
    return sum(
        (leaf.cost * (leaf.times * leaf.devices) for leaf in leaves), OperationCost()
    )


def _leaves(flat: Flat, axes: _Axes, virtual: Iterable[Any] = ()) -> Iterator[_Leaf]:
    """The priced operations of a flat program; `axes` are sizes of manual mesh axes."""
    numbers = (flat.numbers[variable] for variable in virtual)
    passes = Passes(flat, frozenset(n for n in numbers if n is not None))
    for position, step in enumerate(flat.steps):
        name = step.equation.primitive.name
        if name in LOOPS:
            for leaf in _LOOP_RULES[name](step.equation, axes):
                yield dataclasses.replace(leaf, owner=step.owner)
            continue
        rule = rule_of(step.equation)
        if rule is None:
            yield _Leaf(owner=step.owner, cost=_without_rule(step.equation, axes))
            continue
        matrix, vector = rule.flops(step.equation)
        read, written = passes.bytes_of(position)
        cost = OperationCost(
            matrix_flops=matrix,
            vector_flops=vector,
            bytes_read=read,
            bytes_written=written,
        )
        yield _Leaf(owner=step.owner, cost=cost)


def _without_rule(equation: Any, axes: _Axes) -> OperationCost:
    """Collectives, kernels that state their cost, and everything listed."""
    name = equation.primitive.name
    cost = OperationCost(
        bytes_read=sum(operand_bytes(equation)),
        bytes_written=sum(result_bytes(equation)),
    )
    kind = COLLECTIVES.get(name.removesuffix("_start"))
    if kind is not None:
        sent = collective_bytes(equation, kind, _group_size(equation, axes))
        return cost + OperationCost(collective_bytes=sent)
    if name == "pallas_call":
        return _pallas(equation, cost)
    label = equation.params.get("target_name")
    return dataclasses.replace(cost, unpriced=(f"{name}:{label}" if label else name,))


def _group_size(equation: Any, axes: _Axes) -> int | None:
    """Number of devices that a collective joins, `None` where the axes are unknown."""
    params = equation.params
    if params.get("axis_size") is not None:
        return int(params["axis_size"])
    names = params.get("axes", params.get("axis_name", ()))
    names = (
        names
        if isinstance(names, Sequence) and not isinstance(names, str)
        else (names,)
    )
    if not names or any(n not in axes for n in names):
        return None
    return math.prod(axes[n] for n in names)


def _pallas(equation: Any, cost: OperationCost) -> OperationCost:
    """Its own estimate; else the body's arithmetic times the grid, and listed."""
    dtypes = [v.aval.dtype for v in equation.invars if hasattr(v.aval, "dtype")]
    dtype = str(max(dtypes, key=lambda d: d.itemsize)) if dtypes else "float32"
    estimate = equation.params.get("cost_estimate")
    if estimate is not None:
        return OperationCost(
            matrix_flops=((dtype, estimate.flops),) if estimate.flops else (),
            vector_flops=TRANSCENDENTAL * estimate.transcendentals,
            bytes_read=max(0, estimate.bytes_accessed - cost.bytes_written),
            bytes_written=min(cost.bytes_written, estimate.bytes_accessed),
            collective_bytes=getattr(estimate, "remote_bytes_transferred", 0),
        )
    grid = getattr(equation.params.get("grid_mapping"), "grid", ())
    blocks = math.prod(n for n in grid if isinstance(n, int))
    body = equation.params.get("jaxpr")
    work = cost_of_jaxpr(body) * blocks if body is not None else OperationCost()
    return dataclasses.replace(
        work,
        bytes_read=cost.bytes_read,
        bytes_written=cost.bytes_written,
        unpriced=("pallas_call", *work.unpriced),
    )


def _repeated(leaves: Iterator[_Leaf], times: int) -> Iterator[_Leaf]:
    for leaf in leaves:
        yield dataclasses.replace(leaf, times=leaf.times * times)


def _scan(equation: Any, axes: _Axes) -> Iterator[_Leaf]:
    body = _leaves(_flat_of(equation.params["jaxpr"]), axes)
    return _repeated(body, int(equation.params["length"]))


def _while(equation: Any, axes: _Axes) -> Iterator[_Leaf]:
    params = equation.params
    trips = trip_count(equation)
    for part, extra in (("body_jaxpr", 0), ("cond_jaxpr", 1)):
        leaves = _leaves(_flat_of(params[part]), axes)
        yield from _repeated(leaves, extra + (1 if trips is None else trips))
    if trips is None:
        cost = OperationCost(unpriced=("while (number of trips)",))
        yield _Leaf(owner=0, cost=cost)


def _cond(equation: Any, axes: _Axes) -> Iterator[_Leaf]:
    """The dearest branch; what the others leave unpriced is listed as well."""

    def measure(leaves: list[_Leaf]) -> int:
        total = _total(iter(leaves))
        # Operations per byte of today's chips are in the hundreds for matrix units.
        return (
            total.total_matrix_flops
            + total.vector_flops
            + 100 * (total.total_bytes + total.collective_bytes)
        )

    branches = [list(_leaves(_flat_of(b), axes)) for b in equation.params["branches"]]
    yield from max(branches, key=measure)
    missing = [name for b in branches for name in _total(iter(b)).unpriced]
    if missing:
        yield _Leaf(owner=0, cost=OperationCost(unpriced=tuple(missing)))


def _shard_map(equation: Any, axes: _Axes) -> Iterator[_Leaf]:
    """The body is one device's share: all devices of the manual axes run it."""
    sizes = dict(equation.params["mesh"].shape)
    manual = equation.params["newly_manual_axes"]
    devices = math.prod(sizes[n] for n in manual)
    inner = {**axes, **{n: sizes[n] for n in manual}}
    for leaf in _leaves(_flat_of(equation.params["jaxpr"]), inner):
        yield dataclasses.replace(leaf, devices=leaf.devices * devices)


def _linear_solve(equation: Any, axes: _Axes) -> Iterator[_Leaf]:
    """One solve: the products are there for its derivatives only."""
    return _leaves(_flat_of(equation.params["jaxprs"].solve), axes)


_LOOP_RULES: dict[str, Callable[[Any, _Axes], Iterator[_Leaf]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_linear_solve": _linear_solve,
}
