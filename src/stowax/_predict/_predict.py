"""What a lowered step will need of device memory, before anything is compiled.

`predict_memory(graph)` walks the program in its own order and asks at every operation
what is alive, with XLA's habits as rules:

- *total = arguments + outputs - aliased + temporaries*, as XLA reports it. Arguments
  and outputs have buffers of their own for the whole step; a donated argument's buffer
  is an output's.
- *Fusion.* Elementwise chains, broadcasts, slices are computed where they are read:
  they take no bytes themselves and keep alive what they read.
- *In place.* A loop works on its operands' buffers, an update of a slice on the buffer
  it updates, elementwise results on an operand of the same size that nobody reads
  later.

It is a prediction: XLA's scheduler may run things in another order, and packing leaves
gaps. The compiled program's own figures are the fact; `tests/test_predict.py` holds the
two within a quarter of each other on training steps of several kinds.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from .._records._lowered import Graph
from ._flatten import Block, Flat, Node, flatten
from ._fusion import GPU_RULES, TPU_RULES
from ._liveness import BlockWalk, Slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Bytes per device, of device and of host memory, as XLA's own figures are split.

    `temp` is the larger of `layers_temp`, up to the end of the last loop over layers,
    and `update_temp`, after it; without such loops all three are one. `temps` has the
    largest by named scope, of those that were asked for.
    """

    device_total: int
    host_total: int
    argument: int
    output: int
    alias: int
    temp: int
    layers_temp: int
    update_temp: int
    temps: Mapping[str, int] = dataclasses.field(default_factory=dict)


def predict_memory(
    graph: Graph,
    platform: str,
    layers: str | None = None,
    scopes: re.Pattern[str] | None = None,
) -> MemoryPrediction:
    """The memory that the program will need when it is compiled.

    **Arguments:** `graph` from `_mlir.read_graph`; `platform` is `"tpu"`, `"gpu"` or
    `"cpu"`, whose compilers fuse differently (see `Rules`); `layers` is the named scope
    that layers are under; `scopes` meets those of which `temps` is wanted, in its first
    group.
    """
    entry_walk, aliases = entry_of(graph, platform)
    flat, rules, entry = entry_walk.flat, entry_walk.rules, entry_walk.block
    sizes = {n: flat.values[n].device_bytes for n in [*entry.arguments, *entry.results]}
    temp, host_temp = entry_walk.peak()
    until = _last_of(entry, layers) + 1 if layers else 0
    layers_temp = max(entry_walk.alive[:until], default=temp)
    # A step that ends with the loop (gradients only) needs nothing after it.
    update_temp = max(entry_walk.alive[until:], default=0 if until else temp)
    if rules.counts_carries_again:
        known, known_on_host = entry_walk.known_to_libtpu
        again = max(0, temp - known)
        if update_temp == temp:
            update_temp += again
        if layers_temp == temp:
            layers_temp += again
        temp += again
        host_temp += max(0, host_temp - known_on_host)

    def total(numbers: Iterable[int], host: bool) -> int:
        return sum(sizes[n] for n in numbers if (n in flat.host) == host)

    aliased = [entry.results[i] for i in aliases]
    argument, host_argument = (total(entry.arguments, h) for h in (False, True))
    output, host_output = (total(entry.results, h) for h in (False, True))
    alias, host_alias = (total(aliased, h) for h in (False, True))
    return MemoryPrediction(
        device_total=argument + output - alias + temp,
        host_total=host_argument + host_output - host_alias + host_temp,
        argument=argument,
        output=output,
        alias=alias,
        temp=temp,
        layers_temp=layers_temp,
        update_temp=update_temp,
        temps=_by_scope(entry, entry_walk.alive, scopes) if scopes else {},
    )


def _by_scope(
    block: Block, alive: Sequence[int], scopes: re.Pattern[str]
) -> dict[str, int]:
    """The most that is alive while operations under each scope run."""
    found: dict[str, int] = {}
    for node, mine in zip(block.nodes, alive, strict=True):
        if match := scopes.search(node.scope):
            found[match[1]] = max(found.get(match[1], 0), mine)
    return found


def entry_of(graph: Graph, platform: str) -> tuple[BlockWalk, dict[int, int]]:
    """The walk of the whole program, and which outputs donated arguments make room for.

    **Returns:** the walk, and output index → number of the argument.
    """
    flat = flatten(graph)
    rules = TPU_RULES if platform == "tpu" else GPU_RULES
    aliases = _aliases(graph, flat)
    results = range(len(flat.entry.results))
    slots = [Slot(argument=aliases.get(i), number=i) for i in results]
    return BlockWalk(flat, rules, flat.entry, slots), aliases


def _last_of(block: Block, scope: str) -> int:
    """Where in the block the last layer under this scope ends, -1 if there is none."""

    def has(node: Node) -> bool:
        inner = (n for inner in node.blocks for n in inner.nodes)
        return scope in node.scope or any(map(has, inner))

    return max((t for t, node in enumerate(block.nodes) if has(node)), default=-1)


def _aliases(graph: Graph, flat: Flat) -> dict[int, int]:
    """Output index → number of the donated argument whose buffer it gets.

    Where JAX leaves the pairing to the compiler (sharded programs), an output gets the
    first free donated argument of the same size and memory, as XLA does it. Not of the
    same shape: a result that is a reshaped value is known here by the value's.
    """
    arguments, results = flat.entry.arguments, flat.entry.results
    paired: dict[int, int] = {}
    free = []
    for donation in graph.donations:
        if donation.output is None:
            free.append(arguments[donation.argument])
        else:
            paired[donation.output] = arguments[donation.argument]
    for i, result in enumerate(results):
        if i in paired:
            continue
        for argument in free:
            if _alike(flat, argument, result):
                paired[i] = argument
                free.remove(argument)
                break
    return paired


def _alike(flat: Flat, left: int, right: int) -> bool:
    a, b = flat.values[left], flat.values[right]
    sizes = [math.prod(value.local_shape) * value.item_bytes for value in (a, b)]
    return sizes[0] == sizes[1] and (left in flat.host) == (right in flat.host)
