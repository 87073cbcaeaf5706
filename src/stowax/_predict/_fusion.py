"""Which values of a block have buffers: fusion, as far as memory is concerned.

A compiler computes elementwise chains, broadcasts and slices where they are read. Such
a value takes no bytes itself (it is *virtual*) and keeps alive what it is computed
from, its `sources`. What decides are the readers: a value that one reader wants as an
array is one.

`Rules` has where the compilers differ; each rule says what was seen that it stands for.
"""

import dataclasses
import functools

from ._flatten import Block, Flat, Node, reads

CONSTANTS = frozenset(("stablehlo.constant", "sdy.constant", "stablehlo.iota"))
ELEMENTWISE = frozenset(
    (
        "abs",
        "acos",
        "acosh",
        "add",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i1e",
        "cbrt",
        "ceil",
        "clamp",
        "compare",
        "complex",
        "conj",
        "convert",
        "cosine",
        "cosh",
        "count_leading_zeros",
        "digamma",
        "divide",
        "erf",
        "erf_inv",
        "erfc",
        "exponential",
        "exponential_minus_one",
        "floor",
        "imag",
        "is_finite",
        "is_inf",
        "is_neg_inf",
        "is_pos_inf",
        "lgamma",
        "log",
        "log_plus_one",
        "logistic",
        "maximum",
        "minimum",
        "mulhi",
        "multiply",
        "negate",
        "next_after",
        "not",
        "or",
        "polygamma",
        "popcnt",
        "power",
        "real",
        "reduce_precision",
        "remainder",
        "round_nearest_afz",
        "round_nearest_even",
        "rsqrt",
        "select",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sine",
        "sinh",
        "sqrt",
        "square",
        "subtract",
        "tan",
        "tanh",
        "xor",
        "zeta",
        "bitcast_convert",
    )
)
MOVING = frozenset(
    (
        "broadcast_in_dim",
        "concatenate",
        "dynamic_slice",
        "gather",
        "pad",
        "reshape",
        "reverse",
        "slice",
        "transpose",
    )
)
FUSED = ELEMENTWISE | MOVING
SLICES = frozenset(("dynamic_slice", "slice"))
PLACEMENT = "annotate_device_placement"
ALLOCATION = "AllocateBuffer"
_ABSORBING = FUSED | {"reduce"}
_TAKING_PRODUCTS = ELEMENTWISE | {"dynamic_update_slice"}
EXPENSIVE = frozenset(("tanh", "exponential", "erf", "power", "logistic", "log"))

_MUCH_LIGHTER = 0.6
"""A float32 softmax of bfloat16 scores is computed again from these: half of it, and
a sum in each row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Where compilers differ, as seen in what they made of training steps.

    - `fuses_products`: the result of a matrix product is consumed where it is computed
      by the one elementwise operation that reads it, and elementwise operands are
      computed while they are read (TPU; a GPU calls a library instead).
    - `hoists_converts`: a stack whose slices a loop casts to a narrower type is cast as
      a whole before the loop, and both are alive (TPU).
    - `computes_once`: an expensive function that several kernels read is not computed
      in each of them (GPU; its fusion prices the repetition), unless reading what it is
      computed from takes much less than reading it.
    - `holds_constants`: what a loop reads from outside is an array even if it is a
      broadcast constant, such as the mask of a `where` (GPU; a TPU's compiler sinks it
      into the loop).
    - `turns_stacks`: a stack over a mesh whose layers a loop gathers along an axis
      within rows lies once more, turned, while loops run (GPU: what is gathered has to
      be outermost). Llama2-7B over eight H200: 1.6 GiB for three of its weights.
    - `counts_carries_again`: libtpu's `temp_size_in_bytes` is more than the heap of its
      own buffer assignment where a program has loops. It adds what it takes for
      fragmentation: the heap, less the most that is alive at once by a count which
      loses sight of an array as soon as a loop carries it. Found by varying layers,
      widths, vocabulary, stored values, donation and frozen weights in 28 scanned steps
      (within 16 MiB where the loop's body is predicted right), and held against
      policies by hand of the benchmarks (`docs/notes.md`; v5p and v6e, libtpu
      0.0.42.1). A chip that has only the heap is enough. The host's memory is counted
      so, too: that of offloaded values again, once gradients go there.
    """

    fuses_products: bool
    hoists_converts: bool
    computes_once: bool
    holds_constants: bool
    turns_stacks: bool
    counts_carries_again: bool


TPU_RULES = Rules(
    fuses_products=True,
    hoists_converts=True,
    computes_once=False,
    holds_constants=False,
    turns_stacks=False,
    counts_carries_again=True,
)
GPU_RULES = Rules(
    fuses_products=False,
    hoists_converts=False,
    computes_once=True,
    holds_constants=True,
    turns_stacks=True,
    counts_carries_again=False,
)


@functools.lru_cache(maxsize=1024)
def short_name(name: str) -> str:
    """An operation's name without its dialect."""
    return name.rpartition(".")[2]


class Fusion:
    """The values of one block: constant, virtual, or with a buffer of their own.

    `users` has, per value, the places in the block that read it (the place after the
    last operation is the block's result), `sources` the values with buffers that it is
    computed from, `last` when each of those is read for the last time.
    """

    def __init__(self, flat: Flat, rules: Rules, block: Block):
        self.flat, self.rules, self.block = flat, rules, block
        self.nodes = block.nodes
        self.end = len(self.nodes)
        self.maker = {r: t for t, node in enumerate(self.nodes) for r in node.results}
        self.users: dict[int, list[int]] = {}
        for t, node in enumerate(self.nodes):
            for n in dict.fromkeys(reads(node)):
                self.users.setdefault(n, []).append(t)
        for n in dict.fromkeys(block.results):
            self.users.setdefault(n, []).append(self.end)
        self.free = self.find_free()
        self.origins = self.find_origins()
        self.virtual: set[int] = set()
        self.kernels: dict[int, frozenset[int]] = {}
        for node in reversed(self.nodes):
            if self.free.isdisjoint(node.results) and self.is_virtual(node):
                self.virtual.update(node.results)
                self.kernels[node.results[0]] = self.read_by(node.results[0])
        self.sources = self.find_sources()
        self.last = self.last_reads()

    def size(self, number: int) -> int:
        """Bytes of the value on one device."""
        return self.flat.values[number].device_bytes

    def has_buffer(self, number: int) -> bool:
        """Whether the value is an array in memory."""
        return number not in self.free and number not in self.virtual

    def find_free(self) -> set[int]:
        """Values that are constant, or no more than a place in host memory."""
        free: set[int] = set()
        for node in self.nodes:
            if node.name in CONSTANTS or (
                short_name(node.name) in FUSED and free.issuperset(node.operands)
            ):
                free.update(node.results)
        for node in self.nodes:
            if node.target == ALLOCATION and self.placed_on_host(node):
                free.update(node.results)
        return free

    def find_sources(self) -> dict[int, frozenset[int]]:
        """The values with buffers that each value is computed from."""
        sources = {n: frozenset((n,)) for n in self.users}
        for node in self.nodes:
            for r in node.results:
                if r in self.free:
                    sources[r] = frozenset()
                elif r in self.virtual:
                    sources[r] = frozenset().union(*(sources[n] for n in node.operands))
        return sources

    def placed_on_host(self, node: Node) -> bool:
        """Whether an allocation is one of host memory, once it is placed."""
        readers = [t for n in node.results for t in self.users.get(n, ())]
        return all(
            t < self.end
            and self.nodes[t].target == PLACEMENT
            and self.flat.host.issuperset(self.nodes[t].results)
            for t in readers
        )

    def is_virtual(self, node: Node) -> bool:
        short = short_name(node.name)
        if len(node.results) != 1:  # a callback has none
            return False
        (result,) = node.results
        users = self.users.get(result, [])
        if self.end in users or result in self.flat.barred:
            return False
        readers = [self.nodes[t] for t in users]
        if short in FUSED:
            several = len(users) > 1 and len(self.read_by(result)) > 1
            dear = short in EXPENSIVE and several and self.rules.computes_once
            if dear and not self.is_light(result, _MUCH_LIGHTER):
                return False
            return all(self.absorbs(reader, result) for reader in readers)
        if node.target == PLACEMENT and result in self.flat.host:
            # The copy goes straight to where it is stacked.
            return all(self.absorbs(reader, result) for reader in readers)
        if short in ("dot_general", "convolution") and self.rules.fuses_products:
            return (
                len(readers) == 1
                and short_name(readers[0].name) in _TAKING_PRODUCTS
                and self.absorbs(readers[0], result)
                and not self.widens(readers[0], result)
                and not self.loops_between(self.maker[result], users[0])
            )
        return False

    def loops_between(self, first: int, last: int) -> bool:
        """Whether a product would wait for a loop, its operands held meanwhile."""
        between = self.nodes[first + 1 : last]
        return any(short_name(node.name) == "while" for node in between)

    def widens(self, reader: Node, value: int) -> bool:
        """Whether `reader` makes of `value` one of a wider type."""
        types = self.flat.values
        made = [types[r].item_bytes for r in reader.results[:1]]
        return any(size > types[value].item_bytes for size in made)

    def read_by(self, value: int) -> frozenset[int]:
        """Places of the kernels that would compute the value, were it virtual.

        The readers of a chain end in few of them: the derivative of an activation
        function reads its `tanh` many times, in one kernel that computes it once.
        """
        places: set[int] = set()
        for t in self.users.get(value, ()):
            results = self.nodes[t].results if t < self.end else []
            found = self.kernels.get(results[0]) if results else None
            places |= {t} if found is None else found
        return frozenset(places)

    def absorbs(self, reader: Node, value: int) -> bool:
        """Whether `reader` computes `value` for itself instead of reading it."""
        short = short_name(reader.name)
        if short in _ABSORBING:
            return True
        if short == "dynamic_update_slice":
            return value != reader.operands[0]
        if reader.target == PLACEMENT:  # a copy between memories reads slices in place
            return short_name(self.nodes[self.maker[value]].name) in SLICES
        if short in ("dot_general", "convolution"):
            return self.rules.fuses_products and (
                len(self.users[value]) == 1 or self.is_light(value)
            )
        return False

    def is_light(self, value: int, part: float = 1.0) -> bool:
        """Whether computing `value` again reads no more than `part` of what it is.

        An activation function of a product does; a norm or a softmax, which also needs
        the result of a reduction, does not.
        """
        origins = self.origins[value]
        return sum(map(self.size, origins)) <= part * self.size(value)

    def find_origins(self) -> dict[int, frozenset[int]]:
        """What each value is computed from if every elementwise chain is fused."""
        origins = {n: frozenset((n,)) for n in self.users}
        for node in self.nodes:
            fused = short_name(node.name) in FUSED
            for r in node.results:
                if r in self.free:
                    origins[r] = frozenset()
                elif fused:
                    origins[r] = frozenset().union(*(origins[n] for n in node.operands))
        return origins

    def last_reads(self) -> dict[int, int]:
        """When each value that has a buffer is read for the last time."""
        last: dict[int, int] = {}
        for t, node in enumerate(self.nodes):
            if any(r in self.virtual or r in self.free for r in node.results):
                continue
            for n in reads(node):
                for source in self.sources[n]:
                    last[source] = max(last.get(source, t), t)
        for n in self.block.results:
            for source in self.sources[n]:
                last[source] = self.end
        return last
