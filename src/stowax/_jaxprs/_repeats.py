"""The repeating block of an unrolled model, found in its flat jaxpr.

A Python loop over layers leaves no loop in the traced program: 40 layers are 40 copies
of the same hundred equations, each with weights of its own. `find_repeats` finds the
copies and says how they hang together, so that they can be run as one `scan` again:
what goes from block to block (`carry`), what every block reads (`constants`), what each
block has of its own (`per_layer`), and what is read of single blocks elsewhere
(`outputs`). `Repeat.body` is one block as a jaxpr.

Equal operations are not enough (heads side by side look like layers in a row), so every
operand of every block is checked; see `_periods`. What would go wrong in silence, and
is refused instead: blocks with effects, rules of `custom_vjp` that differ in what they
close over (`_signatures`), blocks that nothing differentiable connects.

The jaxpr should hold its calls opened and its dead equations *in place*: the last layer
of a model often computes a random key that nobody reads, and without it differs from
the rest.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _jax
from . import _flow, _periods


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Output number `output` of the equation at `Repeat.blocks[k][equation]`."""

    equation: int
    output: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What one block hands to the next.

    `initial` is the variable or literal that the first block reads, `place` where each
    block makes it, `final` the last block's variable.
    """

    initial: Any
    place: Place
    final: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutput:
    """What is read, outside of the stack, of some blocks (not only of the last carry).

    `variables[k]` is block k's variable, `None` where that block's is not read.
    """

    place: Place
    variables: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A block of equations that stands `count` times, each fed by the one before.

    `blocks[k]` are the positions of block k's equations in the flat jaxpr, in order;
    the j-th ones of all blocks do the same. `apart[k]` are positions of equations
    within block k's stretch that take one row of an array made before the stack
    (``weights[k]``): they belong to no block, depend on no block, and run before.
    `constants` are variables that every block reads in the same places. `per_layer`
    holds, per place, one variable or literal per block (repeated where blocks share).
    `body` is a closed jaxpr without constants: ``(*carry, *constants, *per_layer) ->
    (*carry, *outputs)``.
    """

    count: int
    blocks: tuple[tuple[int, ...], ...]
    apart: tuple[tuple[int, ...], ...]
    carry: tuple[Carry, ...]
    constants: tuple[Any, ...]
    per_layer: tuple[tuple[Any, ...], ...]
    outputs: tuple[BlockOutput, ...]
    body: Any


def find_repeats(jaxpr: Any) -> tuple[Repeat, ...]:
    """The stacks of equal blocks in a flat jaxpr, in program order, none overlapping.

    **Arguments:** `jaxpr` may be open or closed, its nested calls opened.

    **Returns:** repeats, those chosen that together remove the most work from the
    program; among equals those that cover more, then the shorter block.

    >>> from stowax._jaxprs._repeats import find_repeats
    >>> def model(x, layers):
    ...     for w in layers:
    ...         x = x + jax.lax.tanh(x @ w)
    ...     return x
    >>> w = jnp.ones((8, 8))
    >>> (repeat,) = find_repeats(jax.make_jaxpr(model)(w, [w, w, w]))
    >>> repeat.count, len(repeat.carry), repeat.blocks
    (3, 1, ((0, 1, 2), (3, 4, 5), (6, 7, 8)))
    """
    opened = _jax.open_jaxpr(jaxpr)
    if len(opened.eqns) < 2:
        return ()
    flow = _flow.read(opened)
    return tuple(_repeat(opened, flow, chain) for chain in _periods.find_chains(flow))


# --- from a chain to a record -------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Sources:
    """Where the body's inputs come from, collected operand by operand."""

    carry: dict[Any, tuple[Any, Place]]
    constants: dict[Any, Any]
    per_layer: dict[Any, tuple[Any, ...]]


def _repeat(opened: Any, flow: _periods.Flow, chain: _periods.Chain) -> Repeat:
    relation, _, apart = _periods.relations(
        flow, chain.start, chain.period, chain.count
    )
    starts = [chain.start + chain.period * k for k in range(chain.count)]
    within = [j for j in range(chain.period) if j not in set(apart)]
    index = {j: i for i, j in enumerate(within)}
    blocks = tuple(tuple(s + j for j in within) for s in starts)
    sources = _Sources(carry={}, constants={}, per_layer={})
    operands = _operands(opened, flow, chain, relation[1], index, sources)
    carry = tuple(
        Carry(
            initial=initial,
            place=place,
            final=_variable(opened, blocks[-1], place),
        )
        for initial, place in sources.carry.values()
    )
    outputs = _outputs(opened, blocks, carry)
    partial = Repeat(
        count=chain.count,
        blocks=blocks,
        apart=tuple(tuple(s + j for j in apart) for s in starts),
        carry=carry,
        constants=tuple(sources.constants.values()),
        per_layer=tuple(sources.per_layer.values()),
        outputs=outputs,
        body=None,
    )
    return dataclasses.replace(partial, body=_body(opened, partial, operands, sources))


def _operands(
    opened: Any,
    flow: _periods.Flow,
    chain: _periods.Chain,
    relation: np.ndarray,
    index: dict[int, int],
    sources: _Sources,
) -> list[list[tuple[str, Any]]]:
    """Per equation of the body, what each operand is: a kind and a key in `sources`.

    `relation` is the second block's: the first one's carry may come from anywhere.
    """
    width = _periods.flow_width(flow)
    base = flow.offsets[chain.start]
    result = []
    for j in index:
        line: list[tuple[str, Any]] = []
        column = int(flow.offsets[chain.start + j] - base)
        for slot in range(len(opened.eqns[chain.start + j].invars)):
            code = int(relation[column + slot])
            if code == _periods.OUTSIDE:
                atoms = tuple(
                    opened.eqns[chain.start + chain.period * k + j].invars[slot]
                    for k in range(chain.count)
                )
                line.append(_outer(atoms, sources))
                continue
            distance, output = divmod(code, width)
            place = Place(equation=index[distance % chain.period], output=output)
            if distance >= 0:
                line.append(("inside", place))
                continue
            initial = opened.eqns[chain.start + j].invars[slot]
            key = (_identity(initial), place)
            sources.carry.setdefault(key, (initial, place))
            line.append(("carry", key))
        result.append(line)
    return result


def _outer(atoms: tuple[Any, ...], sources: _Sources) -> tuple[str, Any]:
    names = tuple(_identity(a) for a in atoms)
    if any(name != names[0] for name in names):
        sources.per_layer.setdefault(names, atoms)
        return "per_layer", names
    if isinstance(atoms[0], _jax.Literal):
        return "literal", atoms[0]
    sources.constants.setdefault(names[0], atoms[0])
    return "constants", names[0]


def _identity(atom: Any) -> Any:
    """Equal for the same variable, and for literals of the same bits."""
    if isinstance(atom, _jax.Literal):
        value = np.asarray(atom.val)
        return (str(atom.aval), value.dtype, value.tobytes())
    return atom


def _variable(opened: Any, block: Sequence[int], place: Place) -> Any:
    return opened.eqns[block[place.equation]].outvars[place.output]


def _outputs(
    opened: Any, blocks: tuple[tuple[int, ...], ...], carry: tuple[Carry, ...]
) -> tuple[BlockOutput, ...]:
    """What is read of the blocks elsewhere, but for what the last carry gives."""
    home = {
        variable: (k, j, o)
        for k, block in enumerate(blocks)
        for j, position in enumerate(block)
        for o, variable in enumerate(opened.eqns[position].outvars)
    }
    inside = {position for block in blocks for position in block}
    handed_out = {(c.place.equation, c.place.output) for c in carry}
    read: dict[tuple[int, int], dict[int, Any]] = {}
    atoms = list(opened.outvars)
    for position in range(blocks[0][0], len(opened.eqns)):
        if position not in inside:
            atoms += opened.eqns[position].invars
    for atom in atoms:
        if isinstance(atom, _jax.Literal) or atom not in home:
            continue
        k, equation, output = home[atom]
        read.setdefault((equation, output), {})[k] = atom
    last = len(blocks) - 1
    return tuple(
        BlockOutput(
            place=Place(equation=equation, output=output),
            variables=tuple(found.get(k) for k in range(len(blocks))),
        )
        for (equation, output), found in sorted(read.items())
        if not ((equation, output) in handed_out and set(found) == {last})
    )


def _body(
    opened: Any,
    repeat: Repeat,
    operands: list[list[tuple[str, Any]]],
    sources: _Sources,
) -> Any:
    """One block as a closed jaxpr, made of the first block's equations."""
    first = repeat.blocks[0]

    def fresh(atoms: Sequence[Any]) -> Any:
        variables = [a for a in atoms if not isinstance(a, _jax.Literal)]
        return _jax.Var((variables or list(atoms))[0].aval)

    given: dict[tuple[str, Any], Any] = {}
    for key, (_, place) in sources.carry.items():
        given["carry", key] = fresh([_variable(opened, first, place)])
    for key, variable in sources.constants.items():
        given["constants", key] = fresh([variable])
    for key, atoms in sources.per_layer.items():
        given["per_layer", key] = fresh(atoms)

    made: dict[Place, Any] = {}

    def read(kind: str, key: Any) -> Any:
        if kind == "inside":
            return made[key]
        return key if kind == "literal" else given[kind, key]

    equations = []
    for j, (position, line) in enumerate(zip(first, operands, strict=True)):
        equation = opened.eqns[position]
        # New variables throughout: what only later blocks' readers use is written to a
        # placeholder in the first block, which cannot be an output.
        results = [fresh([v]) for v in equation.outvars]
        made |= {Place(equation=j, output=o): v for o, v in enumerate(results)}
        inputs = [read(*operand) for operand in line]
        equations.append(equation.replace(invars=inputs, outvars=results))
    places = [c.place for c in repeat.carry] + [o.place for o in repeat.outputs]
    body = opened.replace(
        constvars=[],
        invars=list(given.values()),
        outvars=[made[place] for place in places],
        eqns=equations,
        effects=set(),
    )
    return _jax.ClosedJaxpr(body, [])
