"""A marked function, evaluated with its repeated layers as stacks.

A step is recorded once, and replayed for every program of a plan (`_step._recording`).
In a replay the calls of marked functions come here, each with its jaxpr. Its scans and
the repeating blocks of its unrolled loops become `Stack`s, which run through
`_pipeline.run_stack`; everything else runs as written, `jax.checkpoint` calls without a
loop inside included. A `jax.shard_map` that holds layers is a program to be evaluated
so, in there.

A call is known by the digest of its program, not by its place in the step: a loss that
is traced twice (gradient accumulation under a scan, say) is one call with one set of
stacks.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _jax
from .._jax_primitives import only_prints
from .._jaxprs._control_flow import rebuild
from .._jaxprs._jaxpr import Program, bind, inline, is_loop, loops_in
from .._jaxprs._repeats import Repeat, find_repeats
from .._jaxprs._tiles import all_tiled
from .._records._stages import Options
from ._boundary import Boundary
from ._calls import Call, flattened
from ._linearize import Linearized, linearizer
from ._loop_units import LoopUnit, ScanUnit, constants_first
from ._pipeline import Choose, Running, run_stack
from ._segment import in_segments


class Rewriter:
    """Runs marked calls: finds their stacks, and runs these as `choose` says.

    `prepare` sees each call's inputs before they are used and may replace them (the
    trace of a step marks them, to see later where they came from). `label` and
    `boundary` are `Running`'s. `linearized` has the bodies of earlier traces of the
    same step (see `linearizer`).
    """

    def __init__(
        self,
        choose: Choose,
        options: Options,
        prepare: Callable[[Call], Sequence[Any]] = lambda call: call.inputs,
        *,
        label: bool = False,
        boundary: Boundary = None,
        linearized: Linearized | None = None,
    ):
        self.prepare = prepare
        self.running = Running(
            choose=choose,
            options=options,
            linearize=linearizer(options.keep_checkpoint, linearized),
            label=label,
            boundary=boundary,
        )

    def run(self, call: Call) -> list[Any]:
        """The outputs of a call, its stacks run as `choose` says."""
        options = self.running.options
        key = (
            "units",
            dataclasses.replace(
                options, row_major=False, as_written=False, group=0, layer_blocks=0
            ),
        )
        if key not in call.known:
            program = call.program(options.keep_checkpoint)
            call.known[key] = _read(call.jaxpr, program, options)
        runner = functools.partial(run_stack, running=self.running)
        program, units = call.known[key]
        return _run(program, units, self.prepare(call), runner)


def _read(jaxpr: Any, flat: Program, options: Options) -> tuple[Program, list[Any]]:
    """What runs in place of a jaxpr that is `flat`: a program, and its units."""
    program = _in_tiles(jaxpr, flat, options) if options.tiles else flat
    return program, _ordered_units(program, options)


def _in_tiles(jaxpr: Any, flat: Program, options: Options) -> Program:
    """A program with its losses in blocks; in a `jax.checkpoint`, if not outside."""
    found = all_tiled(flat, options.tiles)
    if found is None and not options.keep_checkpoint:
        found = all_tiled(Program(inline(jaxpr)), options.tiles)
    return found or flat


def _run(
    program: Program,
    units: Sequence[Any],
    inputs: Sequence[Any],
    runner: Callable[..., Any],
) -> list[Any]:
    """Evaluates a program, as `units` in their order: nodes, stacks, and such parts."""
    env = {**program.constants(), **dict(enumerate(inputs))}
    for unit in units:
        if isinstance(unit, int):
            node = program.nodes[unit]
            out = bind(node.equation, node.read(env))
            env.update(zip(node.outputs, out, strict=True))
        else:
            unit.run(program, env, runner)
    return program.read_outputs(env, len(program.outputs))


def _ordered_units(program: Program, options: Options) -> list[Any]:
    """A program as single nodes and stacks, in an order in which they can run.

    Blocks of an unrolled loop run together, so what they read must come first, and what
    reads them later; a loop whose blocks cannot be brought together (something outside
    reads one block and feeds a later one) stays as it is written.
    """
    repeats = find_repeats(program.jaxpr) if options.roll else ()
    repeats = tuple(r for r in repeats if not _is_loop_of_scans(program, r))
    while True:
        stacks = _stack_units(program, repeats)
        try:
            order = _with_mapped(program, _topological(program, stacks), options)
            return in_segments(program, order) if options.segments else order
        except _Entangled as entangled:
            repeats = tuple(r for r in repeats if r is not entangled.repeat)


_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def _is_loop_of_scans(program: Program, repeat: Repeat) -> bool:
    """Whether the layers of a repeat are rather those of the scan in every block.

    Two scanned models one after the other repeat, too. A block is taken for a model
    if a scan of at least as many trips as there are blocks does all of its products.
    """
    equations = [program.nodes[k].equation for k in repeat.blocks[0]]
    outside = {e.primitive.name for e in equations}
    return _PRODUCTS.isdisjoint(outside) and any(
        e.primitive.name == "scan"
        and e.params["length"] >= repeat.count
        and _products(e)
        for e in equations
    )


def loops_with_effects(call: Call) -> list[str]:
    """Where a call scans layers that run as they are written, for their effects."""
    return [
        _jax.source_text(loop) or "unknown source"
        for loop in loops_in(call.jaxpr)
        if not only_prints(loop)
    ]


def _stack_units(program: Program, repeats: Sequence[Repeat]) -> list[Any]:
    rolled = {k for r in repeats for block in r.blocks for k in block}
    found: list[tuple[int, Any]] = [(r.blocks[0][0], r) for r in repeats]
    for position, node in enumerate(program.nodes):
        is_free = position not in rolled and is_loop(node.equation)
        if is_free and only_prints(node.equation):
            found.append((position, position))
    units = []
    for number, (_, what) in enumerate(sorted(found, key=lambda f: f[0])):
        name = f"{program.fingerprint[:8]}.{number}"
        units.append(
            ScanUnit(name=name, position=what)
            if isinstance(what, int)
            else LoopUnit(name=name, repeat=what, body=constants_first(what))
        )
    return units


class _Entangled(Exception):
    """A loop whose blocks cannot run together."""

    def __init__(self, repeat: Repeat):
        super().__init__()
        self.repeat = repeat


def _topological(program: Program, stacks: Sequence[Any]) -> list[Any]:
    owner: dict[int, Any] = {k: unit for unit in stacks for k in unit.positions}
    order: list[Any] = []
    state: dict[Any, str] = {}
    for position in range(len(program.nodes)):
        pending = [owner.get(position, position)]
        while pending:
            unit = pending[-1]
            key = unit if isinstance(unit, int) else unit.name
            if state.get(key) == "done":
                pending.pop()
                continue
            waiting = [
                other
                for other in _needs(program, owner, unit)
                if state.get(other if isinstance(other, int) else other.name) != "done"
            ]
            if not waiting:
                state[key] = "done"
                order.append(unit)
                pending.pop()
                continue
            if any(other in pending for other in waiting):
                loops = [u for u in pending if isinstance(u, LoopUnit)]
                raise _Entangled(loops[-1].repeat)
            state[key] = "open"
            pending.extend(waiting)
    return order


def _needs(program: Program, owner: Mapping[int, Any], unit: Any) -> list[Any]:
    """The units that make what `unit` reads."""
    positions = (unit,) if isinstance(unit, int) else unit.positions
    needs = []
    for position in positions:
        for number in program.nodes[position].inputs:
            maker = program.maker.get(number) if number is not None else None
            if maker is None:
                continue
            other = owner.get(maker, maker)
            if other is not unit and other not in needs:
                needs.append(other)
    return needs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _MappedUnit:
    """A `jax.shard_map` that holds the layers: a device's part of them is a program.

    It is read where it runs: only there have the mesh's axes names.
    """

    position: int
    options: Options
    known: list[Any] = dataclasses.field(default_factory=list, repr=False)

    @property
    def positions(self) -> tuple[int, ...]:
        return (self.position,)

    def run(
        self, program: Program, env: dict[int, Any], runner: Callable[..., Any]
    ) -> None:
        node = program.nodes[self.position]

        def inside(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
            if not self.known:
                part = flattened(jaxpr, self.options.keep_checkpoint)
                self.known[:] = _read(jaxpr, part, self.options)
            part, units = self.known
            return _run(part, units, inputs, runner)

        with _jax.source_of(node.equation):
            out = rebuild(node.equation, node.read(env), inside)
        env.update(zip(node.outputs, out, strict=True))


_LARGE = 0.25
"""Part of a program's matrix products in a `jax.shard_map` that is planned inside."""


def _with_mapped(program: Program, order: list[Any], options: Options) -> list[Any]:
    """The units, a `jax.shard_map` that holds a stack of layers as one of its own.

    One in each layer of a Python loop holds none: the layer is what is planned.
    """
    products = [_products(node.equation) for node in program.nodes]

    def holds_the_layers(unit: Any) -> bool:
        return (
            isinstance(unit, int)
            and program.nodes[unit].equation.primitive.name == "shard_map"
            and products[unit] > _LARGE * sum(products)
        )

    return [
        _MappedUnit(position=unit, options=options) if holds_the_layers(unit) else unit
        for unit in order
    ]


def _products(equation: Any) -> int:
    """How many matrix products an equation is, and runs inside."""
    trips = equation.params.get("length", 1) if is_loop(equation) else 1
    inner = _jax.jaxprs_in(equation.params)
    return (equation.primitive.name in _PRODUCTS) + trips * sum(
        _products(e) for jaxpr in inner for e in jaxpr.eqns
    )
