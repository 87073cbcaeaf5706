"""One iteration over layers as one row of operations, run while weights arrive.

A backward iteration is two programs: what is computed again of the forward one, and
the backward one that reads it. When weights are fetched depends on both
(`_host_turns`),
and a weight may be fetched in their midst, once something else has been read. So both
are put in a row here, under one numbering: values of the forward program keep their
numbers, those of the backward program follow.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._jaxprs._jaxpr import Node, Program, bind, inline
from ._host_turns import Step, step_of
from ._linearize import LinearizedBody
from ._stack import Stack, Stored


class Row:
    """Operations in an order in which they can run.

    `avals` are the types of all values by number, `given` the values that are constant,
    `wanted` the numbers of the results.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[Node, tuple[int | None, ...], tuple[int, ...]]] = []
        self.avals: list[Any] = []
        self.given: dict[int, Any] = {}
        self.wanted: list[int] = []

    @property
    def steps(self) -> list[Step]:
        """The operations as `_host_turns` sees them."""
        return [step_of(node, reads, makes) for node, reads, makes in self.nodes]

    def add(
        self,
        program: Program,
        wanted: Sequence[int],
        at_hand: Iterable[int],
        *,
        numbers: Mapping[int, int] | None = None,
        effects: bool,
    ) -> None:
        """Appends what it takes to get `wanted`, the program's values after those here.

        **Arguments:** `at_hand` are values of the program that need not be computed;
        `numbers` maps values of the program to those of the row that they are;
        `effects` as for `Program.closure`.
        """
        offset, known = len(self.avals), numbers or {}
        self.avals.extend(program.avals)

        def number(n: int) -> int:
            return known.get(n, n + offset)

        constants = program.constants()
        self.given.update((number(n), value) for n, value in constants.items())
        hand = {*at_hand, *constants}
        for position in program.closure(wanted, hand, effects=effects):
            node = program.nodes[position]
            reads = tuple(None if i is None else number(i) for i in node.inputs)
            self.nodes.append((node, reads, tuple(number(o) for o in node.outputs)))
        self.wanted = [number(w) for w in wanted]

    def run(
        self,
        at_hand: Mapping[int, Any],
        missing: Callable[[int, Mapping[int, Any]], Any],
    ) -> dict[int, Any]:
        """Every value of the row, by number.

        `missing(number, values)` gives a value that is not at hand when it is first
        read; `values` are those that are there by then.
        """
        values = {**self.given, **at_hand}

        def read(number: int) -> Any:
            if number not in values:
                values[number] = missing(number, values)
            return values[number]

        for node, reads, makes in self.nodes:
            operands = [
                atom.val if number is None else read(number)
                for number, atom in zip(reads, node.equation.invars, strict=True)
            ]
            for number, value in zip(makes, bind(node.equation, operands), strict=True):
                values.setdefault(number, value)
        for number in self.wanted:
            read(number)
        return values


def forward_row(program: Program, wanted: Sequence[int]) -> Row:
    """What a forward iteration runs; its inputs are at hand."""
    row = Row()
    row.add(program, wanted, range(program.input_count), effects=True)
    return row


class BackwardRow(Row):
    """What a backward iteration runs, given what is `stored` of a layer.

    At hand are constants, weights and what is stored, as the forward program numbers
    them, and the cotangents, with the totals of the constants after them.
    """

    def __init__(self, stack: Stack, body: LinearizedBody, stored: Stored):
        super().__init__()
        forward = body.forward
        weights = range(stack.first_layer_input, forward.input_count)
        at_hand = {*range(stack.const_count), *weights, *stored}
        self.add(forward, body.residuals, at_hand, effects=False)
        program, offset = Program(inline(body.backward)), len(self.avals)
        leaves = dict(enumerate(body.residual_leaves))
        same = {k: leaf for k, leaf in leaves.items() if isinstance(leaf, int)}
        fixed = {k + offset: v.val for k, v in leaves.items() if k not in same}
        self.given.update(fixed)
        wanted = [o for o in program.outputs if isinstance(o, int)]
        inputs = range(program.input_count)
        self.add(program, wanted, inputs, numbers=same, effects=True)
        self.cotangents = offset + len(leaves)
        """The number of the first cotangent."""
        self.gradients = tuple(
            same.get(o, o + offset) if isinstance(o, int) else o
            for o in program.outputs
        )
        """Of every active input the number of its gradient, or a literal."""

    def results(self, values: Mapping[int, Any]) -> list[Any]:
        """The gradients of the active inputs."""
        return [values[g] if isinstance(g, int) else g.val for g in self.gradients]
