"""What a lowered step will need of device memory, before anything is compiled.

`predict_memory(graph)` walks the program in its own order and asks at every operation
what is alive, with XLA's habits as rules:

- *total = arguments + outputs - aliased + temporaries*, as XLA reports it. Arguments and
  outputs have buffers of their own for the whole step; a donated argument's buffer is an
  output's.
- *Fusion.* Elementwise chains, broadcasts, slices are computed where they are read: they
  take no bytes themselves and keep alive what they read.
- *In place.* A loop works on its operands' buffers, an update of a slice on the buffer it
  updates, elementwise results on an operand of the same size that nobody reads later.

It is a prediction: XLA's scheduler may run things in another order, and packing leaves
gaps. The compiled program's own figures are the fact; `tests/test_predict.py` holds the
two within a quarter of each other on training steps of several kinds.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from ._flatten import Block, Flat, Node, flatten, reads
from ._lowered import Graph, TensorValue

_CONSTANT = {"stablehlo.constant", "sdy.constant", "stablehlo.iota"}
_ELEMENTWISE = set(
    """abs add and atan2 cbrt ceil clamp compare complex convert cosine count_leading_zeros
    divide erf exponential exponential_minus_one floor imag is_finite log log_plus_one
    logistic maximum minimum multiply negate not or popcnt power real reduce_precision
    remainder round_nearest_afz round_nearest_even rsqrt select shift_left
    shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh
    xor bitcast_convert""".split()
)
_SLICES = {"dynamic_slice", "slice"}
_PLACEMENT = "annotate_device_placement"
_EXPENSIVE = {"tanh", "exponential", "erf", "power", "logistic", "log"}
_MOVING = set(
    """broadcast_in_dim concatenate dynamic_slice gather pad reshape reverse slice
    transpose""".split()
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Bytes per device, of device and of host memory, as XLA's own figures are split.

    `peak_at` names the operation at which most is alive. `profile` has, for each
    operation of the entry that holds memory, its label and what is alive in temporaries
    while it runs.
    """

    device_total: int
    host_total: int
    argument: int
    output: int
    alias: int
    temp: int
    host_argument: int
    host_output: int
    host_alias: int
    host_temp: int
    peak_at: str
    profile: tuple[tuple[str, int], ...]


def predict_memory(graph: Graph, platform: str) -> MemoryPrediction:
    """The memory that the program will need when it is compiled.

    **Arguments:** `graph` from `_mlir.read_graph`; `platform` is `"tpu"`, `"gpu"` or
    `"cpu"`, whose compilers fuse differently (see `_Rules`).
    """
    flat = flatten(graph)
    rules = _TPU if platform == "tpu" else _GPU
    walk = _Walk(flat, rules)
    entry = flat.entry
    aliases = _aliases(graph, flat)
    sizes = {n: walk.size(n) for n in [*entry.arguments, *entry.results]}
    slots = [
        _Slot(argument=aliases.get(i), number=i) for i in range(len(entry.results))
    ]
    entry_walk = _BlockWalk(walk, entry, slots)
    temp, host_temp, peak_at, profile = entry_walk.peak()
    if rules.counts_loops_again:
        temp += entry_walk.in_loops

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
        host_argument=host_argument,
        host_output=host_output,
        host_alias=host_alias,
        host_temp=host_temp,
        peak_at=peak_at,
        profile=tuple(profile),
    )


def _aliases(graph: Graph, flat: Flat) -> dict[int, int]:
    """Output index → number of the donated argument whose buffer it gets.

    Where JAX leaves the pairing to the compiler (sharded programs), an output gets the
    first free donated argument of the same size and memory, as XLA does it.
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
    return (
        a.local_shape == b.local_shape
        and a.item_bytes == b.item_bytes
        and (left in flat.host) == (right in flat.host)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """Where compilers differ. `fuses_products`: the result of a matrix product is consumed
    where it is computed by the one elementwise operation that reads it, and elementwise
    operands are computed while they are read (TPU; a GPU calls a library instead).
    `hoists_converts`: a stack whose slices a loop casts to a narrower type is cast as a
    whole before the loop, and both are alive (TPU: seen in its optimized programs).
    `computes_once`: an expensive function that several operations read is not computed in
    each of them (GPU; its fusion prices the repetition).
    `holds_constants`: what a loop reads from outside is an array even if it is a broadcast
    constant, such as the mask of a `where` (GPU; a TPU's compiler sinks it into the loop).
    `counts_loops_again`: libtpu's `temp_size_in_bytes` holds more than its own buffer
    assignment (`peak_memory_in_bytes`), by 0.5 to 4 % of the total in straight-line
    programs and 3 to 27 % in programs with loops. In 21 training steps with loops the
    excess was 0.4 to 4 times the temporaries inside of the loops, 1.2 times in the middle,
    so these are added once more. Measured on v5p, jaxlib 0.10.2; the cause is not known.
    """

    fuses_products: bool
    hoists_converts: bool
    computes_once: bool
    holds_constants: bool
    counts_loops_again: bool


_TPU = _Rules(
    fuses_products=True,
    hoists_converts=True,
    computes_once=False,
    holds_constants=False,
    counts_loops_again=True,
)
_GPU = _Rules(
    fuses_products=False,
    hoists_converts=False,
    computes_once=True,
    holds_constants=True,
    counts_loops_again=False,
)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Slot:
    """A buffer that exists outside of the block and takes the block's result `number`.

    `argument` is the value that is in it at the start, if any.
    """

    argument: int | None
    number: int


@dataclasses.dataclass(slots=True, kw_only=True)
class _Buffer:
    """Bytes alive from operation `start` to operation `end`, both included."""

    bytes: int
    start: int
    end: int
    host: bool
    outside: bool = False


def _narrowed(body: Block, flat: Flat) -> Iterator[tuple[int, TensorValue]]:
    """Stacks from outside whose slices the body only reads in a narrower type."""
    captured = body.captured() - flat.host
    users: dict[int, list[Node]] = {}
    for node in body.nodes:
        for n in reads(node):
            users.setdefault(n, []).append(node)
    for node in body.nodes:
        if _short(node.name) != "dynamic_slice" or node.operands[0] not in captured:
            continue
        readers = users.get(node.results[0], [])
        narrow = [flat.values[r.results[0]] for r in readers]
        if (
            readers
            and all(_short(r.name) == "convert" for r in readers)
            and narrow[0].item_bytes < flat.values[node.operands[0]].item_bytes
        ):
            yield node.operands[0], narrow[0]


def _short(name: str) -> str:
    return name.rpartition(".")[2]


class _Walk:
    def __init__(self, flat: Flat, rules: _Rules):
        self.flat = flat
        self.rules = rules

    def size(self, number: int) -> int:
        return self.flat.values[number].device_bytes

    def block(
        self, block: Block, slots: Sequence[_Slot]
    ) -> tuple[int, int, str, list[tuple[str, int]]]:
        """Most bytes alive in the block beyond what exists outside of it."""
        return _BlockWalk(self, block, slots).peak()


class _BlockWalk:
    """Liveness in one block: which values have buffers, from when to when."""

    def __init__(self, walk: _Walk, block: Block, slots: Sequence[_Slot]):
        self.walk, self.flat, self.rules = walk, walk.flat, walk.rules
        self.nodes = block.nodes
        self.block = block
        self.maker = {r: t for t, node in enumerate(self.nodes) for r in node.results}
        self.users: dict[int, list[int]] = {}
        for t, node in enumerate(self.nodes):
            for n in dict.fromkeys(reads(node)):
                self.users.setdefault(n, []).append(t)
        self.end = len(self.nodes)
        for n in dict.fromkeys(block.results):
            self.users.setdefault(n, []).append(self.end)
        self.free: set[int] = set()
        self.virtual: set[int] = set()
        self.sources: dict[int, frozenset[int]] = {}
        self.classify()
        self.last = self.last_reads()
        self.buffer_of: dict[int, _Buffer] = {}
        self.buffers: list[_Buffer] = []
        self.in_loops = 0
        self.assign(slots)

    # Which values exist only while they are read.

    def classify(self) -> None:
        for node in self.nodes:
            short = _short(node.name)
            if node.name in _CONSTANT or (
                short in _ELEMENTWISE | _MOVING
                and all(n in self.free for n in node.operands)
            ):
                self.free.update(node.results)
        self.origins = self.find_origins()
        for node in reversed(self.nodes):
            if not self.free.isdisjoint(node.results):
                continue
            if self.is_virtual(node):
                self.virtual.update(node.results)
        for n in self.users:
            self.sources[n] = frozenset((n,))
        for node in self.nodes:
            for r in node.results:
                if r in self.free:
                    self.sources[r] = frozenset()
                elif r in self.virtual:
                    parts = [self.sources[n] for n in node.operands]
                    self.sources[r] = frozenset().union(*parts)

    def is_virtual(self, node: Node) -> bool:
        short = _short(node.name)
        (result, *more) = node.results
        users = self.users.get(result, [])
        if more or self.end in users:
            return False
        readers = [self.nodes[t] for t in users]
        if short in _ELEMENTWISE | _MOVING:
            if short in _EXPENSIVE and len(users) > 1 and self.rules.computes_once:
                return False
            return all(self.absorbs(reader, result) for reader in readers)
        if node.target == _PLACEMENT and result in self.flat.host:
            # The copy goes straight to where it is stacked.
            return all(self.absorbs(reader, result) for reader in readers)
        if short in ("dot_general", "convolution") and self.rules.fuses_products:
            return (
                len(readers) == 1
                and _short(readers[0].name) in _ELEMENTWISE | {"dynamic_update_slice"}
                and self.absorbs(readers[0], result)
            )
        return False

    def absorbs(self, reader: Node, value: int) -> bool:
        """Whether `reader` computes `value` for itself instead of reading it."""
        short = _short(reader.name)
        if short in _ELEMENTWISE | _MOVING | {"reduce"}:
            return True
        if short == "dynamic_update_slice":
            return value != reader.operands[0]
        if reader.target == _PLACEMENT:  # a copy between memories reads slices in place
            return _short(self.nodes[self.maker[value]].name) in _SLICES
        if short in ("dot_general", "convolution"):
            return self.rules.fuses_products and (
                len(self.users[value]) == 1 or self.is_light(value)
            )
        return False

    def is_light(self, value: int) -> bool:
        """Whether computing `value` again reads no more than reading it would.

        An activation function of a product does; a norm or a softmax, which also needs
        the result of a reduction, does not.
        """
        origins = self.origins[value]
        return sum(map(self.walk.size, origins)) <= self.walk.size(value)

    def find_origins(self) -> dict[int, frozenset[int]]:
        """What each value is computed from if every elementwise chain is fused."""
        origins = {n: frozenset((n,)) for n in self.users}
        for node in self.nodes:
            fused = _short(node.name) in _ELEMENTWISE | _MOVING
            for r in node.results:
                if r in self.free:
                    origins[r] = frozenset()
                elif fused:
                    origins[r] = frozenset().union(
                        *(origins[n] for n in node.operands)
                    )
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

    # Which values share a buffer.

    def assign(self, slots: Sequence[_Slot]) -> None:
        # An argument that is in a slot: the walk ends its first life at its last read.
        held: dict[int, _Buffer] = {}
        for slot in slots:
            if slot.argument is not None:
                held[slot.argument] = _Buffer(
                    bytes=self.walk.size(slot.argument),
                    start=-1,
                    end=self.last.get(slot.argument, -1),
                    host=slot.argument in self.flat.host,
                    outside=True,
                )
                self.buffer_of[slot.argument] = held[slot.argument]
        for t, node in enumerate(self.nodes):
            for i, r in enumerate(node.results):
                if r in self.free or r in self.virtual:
                    continue
                buffer = self.shared(t, node, i, r)
                if buffer is None:
                    buffer = _Buffer(
                        bytes=self.walk.size(r),
                        start=t,
                        end=t,
                        host=r in self.flat.host,
                    )
                    self.buffers.append(buffer)
                buffer.end = max(buffer.end, self.last.get(r, t))
                self.buffer_of[r] = buffer
        self.settle(slots, held)
        if self.rules.hoists_converts:
            self.hoist_converts()
        if self.rules.holds_constants:
            self.hold_constants()

    def hold_constants(self) -> None:
        """Constants that loops read from outside, from the first such loop to the last."""
        held: dict[int, _Buffer] = {}
        for t, node in enumerate(self.nodes):
            if _short(node.name) != "while":
                continue
            for n in node.blocks[1].captured() & self.free:
                if n not in held:
                    held[n] = _Buffer(
                        bytes=self.walk.size(n), start=t, end=t, host=False
                    )
                    self.buffers.append(held[n])
                held[n].end = t

    def hoist_converts(self) -> None:
        """Narrowed copies of stacks, made before the first loop that reads them so."""
        copies: dict[tuple[int, str], _Buffer] = {}
        for t, node in enumerate(self.nodes):
            if _short(node.name) != "while":
                continue
            for stack, narrow in _narrowed(node.blocks[1], self.flat):
                key = stack, narrow.dtype
                if key not in copies:
                    whole = self.flat.values[stack]
                    copies[key] = _Buffer(
                        bytes=whole.device_bytes
                        * narrow.item_bytes
                        // whole.item_bytes,
                        start=t,
                        end=t,
                        host=False,
                    )
                    self.buffers.append(copies[key])
                copies[key].end = t

    def shared(self, t: int, node: Node, i: int, result: int) -> _Buffer | None:
        """The operand's buffer that result number `i` is written to, if there is one."""
        short = _short(node.name)
        if short in ("while", "dynamic_update_slice", "scatter"):
            candidates = [node.operands[i]]
        elif short in _ELEMENTWISE:
            found = [s for n in node.operands for s in sorted(self.sources[n])]
            candidates = [s for s in found if self.same_bytes(s, result)]
        else:
            return None
        for n in candidates:
            for source in self.sources[n] if n in self.virtual else (n,):
                buffer = self.buffer_of.get(source)
                if (
                    buffer is not None
                    and buffer.end <= t
                    and self.same_bytes(source, result)
                    and buffer.host == (result in self.flat.host)
                ):
                    return buffer
        return None

    def same_bytes(self, left: int, right: int) -> bool:
        return self.walk.size(left) == self.walk.size(right)

    def settle(self, slots: Sequence[_Slot], held: dict[int, _Buffer]) -> None:
        """Lets results live in the slots that wait for them."""
        for slot in slots:
            buffer = self.buffer_of.get(self.block.results[slot.number])
            if buffer is None or buffer.outside:
                continue
            if slot.argument is None:
                buffer.outside = True
                continue
            old = held[slot.argument]
            fused = _short(self.nodes[buffer.start].name) in _ELEMENTWISE
            if old.end < buffer.start + fused:
                buffer.outside = True
                old.end = self.end

    # What is alive when.

    def peak(self) -> tuple[int, int, str, list[tuple[str, int]]]:
        changes = [[0] * (self.end + 2) for _ in range(2)]
        for buffer in self.buffers:
            if not buffer.outside:
                changes[buffer.host][buffer.start] += buffer.bytes
                changes[buffer.host][buffer.end + 1] -= buffer.bytes
        best, best_host, label = 0, 0, "the entry"
        profile = []
        live = live_host = 0
        for t, node in enumerate(self.nodes):
            live += changes[False][t]
            live_host += changes[True][t]
            inner, inner_host, inside = self.inner(node)
            here = f"{node.scope or node.name}"
            if _short(node.name) == "while":
                self.in_loops += inner
            if inner or not self.virtual.issuperset(node.results):
                profile.append((here, live + inner))
            if live + inner > best:
                best, label = live + inner, f"{here}: {inside}" if inside else here
            best_host = max(best_host, live_host + inner_host)
        return best, best_host, label, profile

    def inner(self, node: Node) -> tuple[int, int, str]:
        """What an operation needs while it runs, beyond operands and results."""
        if _short(node.name) == "while":
            _, body = node.blocks
            slots = [
                _Slot(argument=argument, number=i)
                for i, argument in enumerate(body.arguments)
            ]
            device, host, label, _ = self.walk.block(body, slots)
            return device, host, label
        device = host = 0
        label = ""
        for block in node.blocks:
            slots = [_Slot(argument=None, number=i) for i in range(len(block.results))]
            one, other, where, _ = self.walk.block(block, slots)
            if one > device:
                device, label = one, where
            host = max(host, other)
        if _short(node.name) == "dot_general":
            device += self.communicated(node)
        return device, host, label

    def communicated(self, node: Node) -> int:
        """Bytes of operands gathered, and of results not yet summed, across devices."""
        left, right = node.seen
        result = self.flat.values[node.results[0]]
        if not (left.shards > 1 or right.shards > 1):
            return 0
        sizes = self.flat.axis_sizes
        contracted = _axes(left, node.dimensions[2]) & _axes(right, node.dimensions[3])
        kept = _axes(result, range(len(result.shape))) - contracted
        extra = 0
        for operand in (left, right):
            usable = contracted | kept
            own = _axes(operand, range(len(operand.shape)))
            contracting = node.dimensions[2 if operand is left else 3]
            lost = own - usable
            lost |= (_axes(operand, contracting) - contracted) & own
            if lost:
                extra += operand.device_bytes * math.prod(sizes[a] for a in lost)
        summed = _axes(result, range(len(result.shape))) & contracted
        if summed:
            extra += result.device_bytes * math.prod(sizes[a] for a in summed)
        return extra


def _axes(value: TensorValue, dimensions: Iterable[int]) -> set[str]:
    if len(value.axes) != len(value.shape):
        return set()
    return {axis for d in dimensions for axis in value.axes[d]}
