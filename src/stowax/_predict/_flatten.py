"""A lowered graph as one nest of blocks: calls inlined, names resolved, memories known.

What the memory walk of `_predict` wants to see is what XLA sees after its first passes:
no calls, no values that are other values under a new name (reshapes, barriers,
arguments that a loop hands on unchanged), nothing that nobody reads. And every value in
one memory: the program only says where a value is *placed*; that the buffer it is
stacked in, the loop that carries it and the slice taken from it are then in host memory
too follows from the data flow, here as in XLA.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from .._hlo._host_calls import is_inside_update, leaves_in_scope
from .._records._lowered import Graph, Region, TensorOperation, TensorValue

# Results are their operands, in order.
_SEGMENT = "stowax.backward."
"""Part of the scope of a backward pass in segments (`_layers._stack`)."""

_BARRIER = "stablehlo.optimization_barrier"
_RENAMING = {
    _BARRIER,
    "stablehlo.reshape",
    "sdy.sharding_group",
}
_CALLS = {"func.call", "sdy.named_computation"}
_LOOPS = {"stablehlo.while"}
_BRANCHES = {"stablehlo.case", "stablehlo.if"}
_PURE_ANNOTATIONS = {"Sharding", "annotate_device_placement", "LayoutConstraint"}
_MEMORY_OF_OPERAND = {
    "stablehlo.dynamic_slice",
    "stablehlo.slice",
    "stablehlo.reshape",
    "stablehlo.transpose",
}
# Must run although nobody reads a result.
_EFFECTS = ("stablehlo.send", "stablehlo.recv", "stablehlo.outfeed", "stablehlo.infeed")


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """One operation with the numbers that its operands and results have in the nest.

    `seen` are the operands as the operation sees them: a reshape has a shape of its own
    although it is not a value of its own. `source` is the user's line; `reducer` is
    what a reduction does, such as `stablehlo.maximum`; `within` has the scopes of the
    calls that the operation was inlined from.
    """

    name: str
    target: str
    scope: str
    contracting: tuple[tuple[int, ...], ...]
    operands: list[int]
    seen: tuple[TensorValue, ...]
    results: list[int]
    blocks: list["Block"]
    source: str = ""
    reducer: str = ""
    within: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class Block:
    """Operations in order. A loop's body has one argument and one result per carry."""

    arguments: list[int]
    nodes: list[Node]
    results: list[int]

    def captured(self) -> set[int]:
        """Numbers of outer values that are read in here."""
        made = set(self.arguments)
        read: set[int] = set()
        for node in self.nodes:
            read.update(reads(node))
            made.update(node.results)
        read.update(self.results)
        return read - made


def reads(node: Node) -> Iterator[int]:
    """Numbers of the values that the operation reads, those of its blocks included."""
    yield from node.operands
    for block in node.blocks:
        yield from block.captured()


@dataclasses.dataclass(slots=True, kw_only=True)
class Flat:
    """The nest: entry block, values by number, and which of them are on the host.

    `barred` are those that stand behind a barrier of a segment: the compiler looks
    through none, so they are arrays.
    """

    entry: Block
    values: dict[int, TensorValue]
    host: set[int]
    barred: set[int]
    axis_sizes: dict[str, int]


def flatten(graph: Graph) -> Flat:
    """The graph with calls inlined and unread operations gone."""
    flattener = _Flattener(graph)
    entry = flattener.block(graph.main, {})
    _drop_unread(entry)
    host = _in_host_memory(graph, entry, flattener)
    return Flat(
        entry=entry,
        values=flattener.values,
        host=host,
        barred=flattener.barred,
        axis_sizes=dict(graph.axis_sizes),
    )


class _Flattener:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.values: dict[int, TensorValue] = {}
        self.records = {
            value.number: value
            for function in graph.functions.values()
            for value in _records(function)
        }
        # Pairs of values that are in the same memory, and values placed by the program.
        self.together: list[tuple[int, int]] = []
        self.placed: dict[int, str] = {}
        self.barred: set[int] = set()
        self.on_host = False  # inside of what the host's processor computes
        self.calls: list[TensorOperation] = []
        self.within = ""  # their scopes

    def new(self, value: TensorValue) -> int:
        number = len(self.values)
        self.values[number] = value
        if value.memory is not None:
            self.placed[number] = value.memory
        elif self.on_host:
            self.placed[number] = "host"
        return number

    def block(self, region: Region, names: dict[int, int]) -> Block:
        """`names` maps the graph's numbers of outer values to those of the nest."""
        names = dict(names)
        arguments = []
        for value in region.arguments:
            names[value.number] = self.new(value)
            arguments.append(names[value.number])
        nodes: list[Node] = []
        for operation in region.operations:
            self.operation(operation, names, nodes)
        results = [names[n] for n in region.results]
        return Block(arguments=arguments, nodes=nodes, results=results)

    def operation(
        self, operation: TensorOperation, names: dict[int, int], nodes: list[Node]
    ) -> None:
        operands = [names[n] for n in operation.operands]
        inlined = self.inlined(operation)
        if inlined is not None:
            inner = {**names, **self.bound(inlined, operands)}
            outside = self.on_host
            self.on_host = outside or bool(leaves_in_scope(operation.scope))
            self.calls.append(operation)
            within, self.within = self.within, f"{self.within}/{operation.scope}"
            for inside in inlined.operations:
                self.operation(inside, inner, nodes)
            self.calls.pop()
            self.within = within
            self.on_host = outside
            self.rename(operation, [inner[n] for n in inlined.results], names)
        elif self.renames(operation, operands):
            if operation.name == _BARRIER and _SEGMENT in operation.scope:
                self.barred.update(operands)
            self.rename(operation, operands, names)
        elif operation.name in _LOOPS:
            self.loop(operation, operands, names, nodes)
        else:
            blocks = []
            if operation.name in _BRANCHES:
                blocks = [self.block(region, names) for region in operation.regions]
            node = self.node(operation, operands, blocks, names)
            for block in blocks:
                self.together += zip(block.results, node.results, strict=True)
            nodes.append(node)

    def node(
        self,
        operation: TensorOperation,
        operands: list[int],
        blocks: list[Block],
        names: dict[int, int],
    ) -> Node:
        results = []
        outside = self.on_host
        self.on_host = outside or is_inside_update(operation.scope)
        for value in operation.results:
            names[value.number] = self.new(value)
            results.append(names[value.number])
        self.on_host = outside
        self.neighbours(operation.name, operands, results)
        return Node(
            name=operation.name,
            target=operation.target,
            scope=operation.scope,
            contracting=operation.contracting,
            operands=operands,
            seen=tuple(self.records[n] for n in operation.operands),
            results=results,
            blocks=blocks,
            source=self.line_of(operation),
            reducer=_reducer(operation),
            within=self.within,
        )

    def line_of(self, operation: TensorOperation) -> str:
        """The line of the operation, or of the innermost call with one around it."""
        around = (one.source for one in reversed(self.calls) if one.source)
        return operation.source or next(around, "")

    def inlined(self, operation: TensorOperation) -> Region | None:
        if operation.name in _CALLS and operation.target in self.graph.functions:
            return self.graph.functions[operation.target]
        if operation.name == "sdy.manual_computation" or (
            operation.name in _CALLS and operation.regions
        ):
            return operation.regions[0]
        return None

    def bound(self, region: Region, operands: Sequence[int]) -> dict[int, int]:
        numbers = [argument.number for argument in region.arguments]
        return dict(zip(numbers, operands, strict=True))

    def rename(
        self, operation: TensorOperation, sources: Sequence[int], names: dict[int, int]
    ) -> None:
        for value, source in zip(operation.results, sources, strict=True):
            names[value.number] = source

    def renames(self, operation: TensorOperation, operands: Sequence[int]) -> bool:
        """Whether the results are the operands, byte for byte, in the same memory."""
        if len(operands) != len(operation.results):
            return False
        pairs = list(zip(operation.results, operands, strict=True))
        if operation.name == "stablehlo.custom_call":
            return operation.target in _PURE_ANNOTATIONS and all(
                value.memory is None for value, _ in pairs
            )
        if operation.name in ("sdy.sharding_constraint", "sdy.reshard"):
            return all(value.splits == self.values[n].splits for value, n in pairs)
        if operation.name == "stablehlo.reshape":
            return all(v.device_bytes == self.values[n].device_bytes for v, n in pairs)
        return operation.name in _RENAMING

    def loop(
        self,
        operation: TensorOperation,
        operands: list[int],
        names: dict[int, int],
        nodes: list[Node],
    ) -> None:
        """A loop; what its body hands on unchanged is a captured value, not a carry."""
        _, body = operation.regions
        unchanged = {
            i
            for i, argument in enumerate(body.arguments)
            if body.results[i] == argument.number
        }
        carried = [i for i in range(len(operands)) if i not in unchanged]
        blocks = []
        for region in operation.regions:
            inner = dict(names)
            for i in unchanged:
                inner[region.arguments[i].number] = operands[i]
            is_body = region is body
            blocks.append(
                self.block(
                    dataclasses.replace(
                        region,
                        arguments=tuple(region.arguments[i] for i in carried),
                        results=tuple(region.results[i] for i in carried)
                        if is_body
                        else region.results,
                    ),
                    inner,
                )
            )
        for i in unchanged:
            names[operation.results[i].number] = operands[i]
        node = self.node(
            dataclasses.replace(
                operation,
                operands=tuple(operation.operands[i] for i in carried),
                results=tuple(operation.results[i] for i in carried),
            ),
            [operands[i] for i in carried],
            blocks,
            names,
        )
        for block in blocks:
            self.together += zip(block.arguments, node.results, strict=True)
        self.together += zip(blocks[1].results, node.results, strict=True)
        self.together += zip(node.operands, node.results, strict=True)
        nodes.append(node)

    def neighbours(
        self, name: str, operands: Sequence[int], results: Sequence[int]
    ) -> None:
        """Remembers which values of an operation must be in the same memory."""
        if name == "stablehlo.dynamic_update_slice":
            self.together += [(operands[0], results[0]), (operands[1], results[0])]
        elif name in _MEMORY_OF_OPERAND:
            self.together.append((operands[0], results[0]))
        elif name == "stablehlo.broadcast_in_dim":
            # Only one that adds dimensions of size 1 is a change of shape.
            source, result = self.values[operands[0]], self.values[results[0]]
            if source.bytes == result.bytes and source.shape:
                self.together.append((operands[0], results[0]))


def _reducer(operation: TensorOperation) -> str:
    """The operation that a reduction combines two items with."""
    if operation.name != "stablehlo.reduce" or not operation.regions:
        return ""
    names = [inside.name for inside in operation.regions[0].operations]
    return names[-1] if names else ""


def _records(region: Region) -> Iterator[TensorValue]:
    yield from region.arguments
    for operation in region.operations:
        yield from operation.results
        for inner in operation.regions:
            yield from _records(inner)


def _drop_unread(block: Block) -> None:
    """Removes, backwards, what has no reader and no effect."""
    needed = set(block.results)
    kept = []
    for node in reversed(block.nodes):
        effect = node.name in _EFFECTS or (
            node.name == "stablehlo.custom_call" and not node.results
        )
        if not effect and needed.isdisjoint(node.results):
            continue
        for inner in node.blocks:
            _drop_unread(inner)
        needed.update(reads(node))
        kept.append(node)
    block.nodes[:] = reversed(kept)


def _in_host_memory(graph: Graph, entry: Block, flattener: _Flattener) -> set[int]:
    """Numbers of what is in host memory: whatever shares a buffer with what is placed.

    Constants are in every memory: the zeros that two stacks start from do not bind
    them.
    """
    constant = set(_constants(entry))
    parent = {n: n for n in flattener.values}

    def root(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for left, right in flattener.together:
        if left not in constant and right not in constant:
            parent[root(left)] = root(right)
    placed = dict(flattener.placed)
    for number, memory in zip(entry.results, graph.result_memory, strict=True):
        placed.setdefault(number, memory)
    seeds = {root(n) for n, memory in placed.items() if memory == "host"}
    return {n for n in flattener.values if root(n) in seeds}


def _constants(block: Block) -> Iterator[int]:
    """Numbers that hold constants, wherever they are."""
    known: set[int] = set()
    for node in block.nodes:
        for inner in node.blocks:
            yield from _constants(inner)
        if node.name in ("stablehlo.constant", "sdy.constant", "stablehlo.iota") or (
            node.name == "stablehlo.broadcast_in_dim" and node.operands[0] in known
        ):
            known.update(node.results)
    yield from known
