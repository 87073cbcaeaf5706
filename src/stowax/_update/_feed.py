"""Parameters in host memory on their way into the layers' loops, gradients out of them.

A parameter that a stack of layers reads need not be on the device as a whole: the
stack's loops fetch one layer at a time (`_boundary`). `find_feeds` sees which leaves
are read so, after which casts and transpositions (those are done to one layer's part),
and where the gradients come out that can be left in host memory by the backward loop:
stacked, laid out as the leaf is. What reads such a gradient afterwards has to do it in
blocks, which is for `_find` to see.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._jaxprs._jaxpr import Node, Program
from .._layers._boundary import Emission

_CHAINED = frozenset({"convert_element_type", "name", "transpose"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An array that is one `index` of the leading axis of another, `whole`.

    The gradients of an unrolled model's layers come stacked: blocks are cut from the
    stack, where a compiler might make an array of each layer's part first.
    """

    number: int
    whole: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostValue:
    """A gradient that lies in host memory: an output of a loop, or part of one.

    `made` is the loop's output. The value itself may come after casts and
    transpositions, which the loop does layer by layer; of an unrolled model it is one
    `index` of the buffer's first axis. `leaf` is the parameter it belongs to.
    """

    number: int
    made: int
    index: int | None
    leaf: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Feeds:
    """What passes between host memory and the loops of stacks.

    `chains` maps every value on the way from a leaf to a loop to its leaf and the
    positions of the nodes that make it, first one first; the leaf itself is in it where
    a loop reads it. `served` are the inputs of a loop, by its position, that are such
    values. `gradients` are the host values by number.
    """

    chains: Mapping[int, tuple[int, tuple[int, ...]]]
    served: Mapping[int, tuple[int, ...]]
    gradients: Mapping[int, HostValue]

    def without_gradients_of(self, leaves: Collection[int]) -> "Feeds":
        """The same, those leaves' gradients on the device."""
        kept = {n: v for n, v in self.gradients.items() if v.leaf not in leaves}
        return dataclasses.replace(self, gradients=kept)

    def place(self, number: int) -> int:
        """The value that stands for `number`: of a gradient, what the loop made."""
        value = self.gradients.get(number)
        return value.made if value else number

    def returned(self, program: Program, apart: Collection[int]) -> dict[int, int]:
        """Gradients that the step returns as a loop has left them, in host memory.

        A gradient has the memory of what it is the gradient of, as JAX's own
        derivatives have by their types: a step that only reads parameters in host
        memory, and returns gradients, returns them there. It does so where they are
        stacked as those are: an unrolled model's are parts of one buffer.

        **Arguments:** `apart` are leaves whose gradients do not lie so.

        **Returns:** what the loop made, by the number of the value returned.
        """
        outputs = {o for o in program.outputs if isinstance(o, int)}
        return {
            number: value.made
            for number, value in self.gradients.items()
            if number in outputs and value.index is None and value.leaf not in apart
        }

    def host_outputs(self, program: Program, position: int) -> tuple[int, ...]:
        """Which outputs of the loop at `position` go to host memory."""
        made = {value.made for value in self.gradients.values()}
        outputs = program.nodes[position].outputs
        return tuple(k for k, number in enumerate(outputs) if number in made)


def emission_of(node: Node, boundary: Mapping[str, Emission]) -> Emission | None:
    """The loop of a stack that a node is, if it is one."""
    name = node.equation.params.get("name")
    return boundary.get(name) if isinstance(name, str) else None


def find_feeds(
    program: Program,
    leaves: Collection[int],
    users: Mapping[int, Sequence[int]],
    boundary: Mapping[str, Emission],
) -> Feeds:
    """What of `leaves` loops can fetch, and which gradients they can write.

    **Arguments:** `leaves` are inputs in host memory; `users` has the positions of the
    nodes that read each value.
    """
    chains: dict[int, tuple[int, tuple[int, ...]]] = {}
    for leaf in leaves:
        chains.update(_chains(program, leaf, users, boundary))
    served: dict[int, tuple[int, ...]] = {}
    gradients: dict[int, HostValue] = {}
    for position, node in enumerate(program.nodes):
        emission = emission_of(node, boundary)
        if emission is None:
            continue
        mine: list[int] = []
        for j, numbers in enumerate(emission.layer_inputs):
            found_ways = [chains.get(_number(node, n)) for n in numbers]
            ways = [way for way in found_ways if way is not None]
            if len(ways) < len(found_ways) or not _alike(program, ways):
                continue
            mine += numbers
            for k, of in emission.gradients.items():
                if of == j:
                    found = _gradients(program, node.outputs[k], ways, users)
                    gradients.update(found)
        if mine:
            served[position] = tuple(mine)
    read = {_number(program.nodes[p], n) for p, ns in served.items() for n in ns}
    chains = {number: way for number, way in chains.items() if number in read}
    return Feeds(chains=chains, served=served, gradients=gradients)


NOTHING = Feeds(chains={}, served={}, gradients={})


def users_besides(
    program: Program, feeds: Feeds, users: Mapping[int, Sequence[int]]
) -> Mapping[int, list[int]]:
    """`users` of every value, without fed loops and what only leads to such."""
    left = collections.defaultdict(list, {n: [*ps] for n, ps in users.items()})
    for position, numbers in feeds.served.items():
        for flat in numbers:
            number = _number(program.nodes[position], flat)
            if position in left[number]:
                left[number].remove(position)
    returned = {o for o in program.outputs if isinstance(o, int)}
    inside = {p for _, nodes in feeds.chains.values() for p in nodes}
    for position in sorted(inside, reverse=True):
        node = program.nodes[position]
        if not any(left.get(o) or o in returned for o in node.outputs):
            for number in node.inputs:
                if number is not None and position in left[number]:
                    left[number].remove(position)
    return left


def _number(node: Node, flat: int) -> int:
    number = node.inputs[flat]
    return -1 if number is None else number


def _chains(
    program: Program,
    leaf: int,
    users: Mapping[int, Sequence[int]],
    boundary: Mapping[str, Emission],
) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Values made of a leaf by casts and transpositions that loops read."""
    found: dict[int, tuple[int, tuple[int, ...]]] = {}

    def follow(number: int, nodes: tuple[int, ...]) -> None:
        for position in users.get(number, ()):
            node = program.nodes[position]
            if _is_layer_input(node, number, boundary):
                found[number] = (leaf, nodes)
            elif node.equation.primitive.name in _CHAINED and node.inputs == (number,):
                follow(node.outputs[0], (*nodes, position))

    follow(leaf, ())
    return found


def _is_layer_input(node: Node, number: int, boundary: Mapping[str, Emission]) -> bool:
    """Whether a value comes into a loop as per-layer input, and as nothing else."""
    emission = emission_of(node, boundary)
    if emission is None:
        return False
    per_layer = {n for numbers in emission.layer_inputs for n in numbers}
    return all(k in per_layer for k, i in enumerate(node.inputs) if i == number)


def _alike(program: Program, ways: Sequence[tuple[int, tuple[int, ...]]]) -> bool:
    """Whether every layer's array comes from a leaf, and all in the same way."""
    if not ways:
        return False
    kinds = {tuple(_operation(program.nodes[p]) for p in nodes) for _, nodes in ways}
    return len(kinds) == 1 and len({leaf for leaf, _ in ways}) == len(ways)


def _operation(node: Node) -> tuple[str, str]:
    """What a node of a chain does; names tell nothing apart."""
    params = node.equation.params
    what = params.get("new_dtype", params.get("permutation"))
    return node.equation.primitive.name, str(what)


def _gradients(
    program: Program,
    made: int,
    ways: Sequence[tuple[int, tuple[int, ...]]],
    users: Mapping[int, Sequence[int]],
) -> dict[int, HostValue]:
    """The gradients of one per-layer input, where they have the leaf's own type."""
    found = {}
    if len(ways) == 1 and program.avals[made].ndim == program.avals[ways[0][0]].ndim:
        parts: list[View | None] = [None]
    else:
        parts = [_part(program, made, layer, users) for layer in range(len(ways))]
        if None in parts:
            return {}
    for part, (leaf, nodes) in zip(parts, ways, strict=True):
        number = _undone(program, part.number if part else made, nodes, users)
        if number is None or program.avals[number].shape != program.avals[leaf].shape:
            return {}
        found[number] = HostValue(
            number=number, made=made, index=part.index if part else None, leaf=leaf
        )
    return found


def _part(
    program: Program, made: int, layer: int, users: Mapping[int, Sequence[int]]
) -> View | None:
    """The part of a stacked gradient that belongs to a layer, if it is taken so."""
    for position in users[made]:
        (piece,) = program.nodes[position].outputs[:1]
        for second in users[piece]:
            view = view_of(program, program.nodes[second].outputs[0])
            if view is not None and (view.whole, view.index) == (made, layer):
                return view
    return None


def _undone(
    program: Program, number: int, nodes: Sequence[int], users: Mapping[int, Any]
) -> int | None:
    """The value once a leaf's chain is undone, where the program does that in steps."""
    for position in reversed(nodes):
        kind = program.nodes[position].equation.primitive.name
        if kind == "name":
            continue
        following = users[number]
        if len(following) != 1:
            return None
        node = program.nodes[following[0]]
        if node.equation.primitive.name != kind:
            return None
        number = node.outputs[0]
    return number


def view_of(program: Program, number: int) -> View | None:
    """How a value is one index of the leading axis of another, if it is."""
    squeezed = _made_by(program, number, "squeeze")
    if squeezed is None or tuple(squeezed.equation.params["dimensions"]) != (0,):
        return None
    inner = squeezed.inputs[0]
    sliced = None if inner is None else _made_by(program, inner, "slice")
    if sliced is None or sliced.inputs[0] is None:
        return None
    whole, params = sliced.inputs[0], sliced.equation.params
    start, limit = params["start_indices"], params["limit_indices"]
    rest = tuple(program.avals[whole].shape)[1:]
    if params["strides"] is not None or limit[0] - start[0] != 1:
        return None
    if any(start[1:]) or tuple(limit[1:]) != rest:
        return None
    return View(number=number, whole=whole, index=start[0])


def _made_by(program: Program, number: int, primitive: str) -> Node | None:
    position = program.maker.get(number)
    node = None if position is None else program.nodes[position]
    return node if node and node.equation.primitive.name == primitive else None
