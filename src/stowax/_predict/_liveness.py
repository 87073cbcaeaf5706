"""Liveness in the blocks of a flattened program: buffers, and what is alive when.

`BlockWalk(flat, rules, block, slots).peak()` is what `_predict` asks of the entry, and
what the walk asks itself of every loop body and branch. Which values have buffers at
all is decided in `_fusion`; here they share them and are counted.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from .._records._lowered import TensorValue
from ._flatten import Block, Flat, Node, reads
from ._fusion import ELEMENTWISE, Fusion, Rules, short_name
from ._gathered import communicated, turned_stacks


@dataclasses.dataclass(slots=True, kw_only=True)
class Slot:
    """A buffer that exists outside of the block and takes the block's result `number`.

    `argument` is the value that is in it at the start, if any.
    """

    argument: int | None
    number: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Buffer:
    """Bytes alive from operation `start` to operation `end`, both included.

    `values` are the numbers of what lies there, one after the other. `outside` says
    that it is counted elsewhere, as an argument or in the block around this one; `copy`
    what it is where it is no value of the program's own.
    """

    bytes: int
    start: int
    end: int
    host: bool
    values: list[int]
    outside: bool = False
    copy: str = ""


def _narrowed(body: Block, flat: Flat) -> Iterator[tuple[int, TensorValue]]:
    """Stacks from outside whose slices the body only reads in a narrower type."""
    captured = body.captured() - flat.host
    users: dict[int, list[Node]] = {}
    for node in body.nodes:
        for n in reads(node):
            users.setdefault(n, []).append(node)
    for node in body.nodes:
        if short_name(node.name) != "dynamic_slice" or node.operands[0] not in captured:
            continue
        readers = users.get(node.results[0], [])
        narrow = [flat.values[r.results[0]] for r in readers if r.results]
        if (
            readers
            and all(short_name(r.name) == "convert" for r in readers)
            and narrow[0].item_bytes < flat.values[node.operands[0]].item_bytes
        ):
            yield node.operands[0], narrow[0]


class BlockWalk:
    """One block: its buffers, from when to when they live, and the most at once.

    `peak` fills `alive`, the bytes on the device while each operation runs, and
    `known_to_libtpu`, the most at once of what is not in a loop's carry yet, on the
    device and on the host.
    """

    def __init__(self, flat: Flat, rules: Rules, block: Block, slots: Sequence[Slot]):
        self.flat, self.rules, self.block = flat, rules, block
        self.nodes = block.nodes
        self.fusion = Fusion(flat, rules, block)
        self.size = self.fusion.size
        self.last, self.end = self.fusion.last, self.fusion.end
        self.buffer_of: dict[int, Buffer] = {}
        self.buffers: list[Buffer] = []
        self.known_to_libtpu = [0, 0]
        self.alive: list[int] = []
        self.assign(slots)

    # Which values share a buffer.

    def assign(self, slots: Sequence[Slot]) -> None:
        # An argument that is in a slot: the walk ends its first life at its last read.
        held: dict[int, Buffer] = {}
        for slot in slots:
            if slot.argument is not None:
                held[slot.argument] = Buffer(
                    bytes=self.size(slot.argument),
                    start=-1,
                    end=self.last.get(slot.argument, -1),
                    host=slot.argument in self.flat.host,
                    values=[slot.argument],
                    outside=True,
                )
                self.buffer_of[slot.argument] = held[slot.argument]
        for t, node in enumerate(self.nodes):
            for i, r in enumerate(node.results):
                if not self.fusion.has_buffer(r):
                    continue
                buffer = self.shared(t, node, i, r)
                if buffer is None:
                    buffer = Buffer(
                        bytes=self.size(r),
                        start=t,
                        end=t,
                        host=r in self.flat.host,
                        values=[],
                    )
                    self.buffers.append(buffer)
                buffer.values.append(r)
                buffer.end = max(buffer.end, self.last.get(r, t))
                self.buffer_of[r] = buffer
        self.settle(slots, held)
        if self.rules.hoists_converts:
            self.hoist_converts()
        if self.rules.holds_constants:
            self.hold_constants()
        if self.rules.turns_stacks:
            self.turn_stacks()

    def hold_constants(self) -> None:
        """Constants that loops read from outside, from the first loop to the last."""
        held: dict[int, Buffer] = {}
        for t, node in enumerate(self.nodes):
            if short_name(node.name) != "while":
                continue
            for n in node.blocks[1].captured() & self.fusion.free:
                if n not in held:
                    held[n] = self.copy(n, t, "constant")
                held[n].end = t

    def turn_stacks(self) -> None:
        """Stacks laid out anew, from the first loop that gathers them to the last."""
        turned: dict[int, Buffer] = {}
        for t, node in enumerate(self.nodes):
            if short_name(node.name) != "while":
                continue
            for n in turned_stacks(node.blocks[1], self.flat):
                if n not in turned:
                    turned[n] = self.copy(n, t, "turned")
                turned[n].end = t

    def hoist_converts(self) -> None:
        """Narrowed copies of stacks, made before the first loop that reads them so."""
        copies: dict[tuple[int, str], Buffer] = {}
        for t, node in enumerate(self.nodes):
            if short_name(node.name) != "while":
                continue
            for stack, narrow in _narrowed(node.blocks[1], self.flat):
                key = stack, narrow.dtype
                if key not in copies:
                    whole = self.flat.values[stack]
                    copies[key] = self.copy(stack, t, narrow.dtype)
                    narrowed = whole.device_bytes * narrow.item_bytes
                    copies[key].bytes = narrowed // whole.item_bytes
                copies[key].end = t

    def copy(self, number: int, t: int, what: str) -> Buffer:
        """A buffer for another copy of a value, made before operation `t`."""
        buffer = Buffer(
            bytes=self.size(number),
            start=t,
            end=t,
            host=False,
            values=[number],
            copy=what,
        )
        self.buffers.append(buffer)
        return buffer

    def shared(self, t: int, node: Node, i: int, result: int) -> Buffer | None:
        """The operand's buffer that result number `i` is written to, if any."""
        short = short_name(node.name)
        if short in ("while", "dynamic_update_slice", "scatter"):
            candidates = [node.operands[i]]
        elif short in ELEMENTWISE:
            found = [s for n in node.operands for s in sorted(self.fusion.sources[n])]
            candidates = [s for s in found if self.same_bytes(s, result)]
        else:
            return None
        for n in candidates:
            for source in self.fusion.sources[n] if n in self.fusion.virtual else (n,):
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
        return self.size(left) == self.size(right)

    def settle(self, slots: Sequence[Slot], held: dict[int, Buffer]) -> None:
        """Lets results live in the slots that wait for them."""
        for slot in slots:
            buffer = self.buffer_of.get(self.block.results[slot.number])
            if buffer is None or buffer.outside:
                continue
            if slot.argument is None:
                buffer.outside = True
                continue
            old = held[slot.argument]
            fused = short_name(self.nodes[buffer.start].name) in ELEMENTWISE
            if old.end < buffer.start + fused:
                buffer.outside = True
                old.end = self.end

    # What is alive when.

    def peak(self) -> tuple[int, int]:
        """The most bytes of temporaries at once, on the device and on the host."""
        changes = [[0] * (self.end + 2) for _ in range(2)]
        for buffer in self.buffers:
            if not buffer.outside:
                changes[buffer.host][buffer.start] += buffer.bytes
                changes[buffer.host][buffer.end + 1] -= buffer.bytes
        best = best_host = 0
        at_rest = [self.not_carried(host) for host in (False, True)]
        live = live_host = 0
        for t, node in enumerate(self.nodes):
            live += changes[False][t]
            live_host += changes[True][t]
            inner, inner_host = self.inner(node)
            for host, more in enumerate((inner, inner_host)):
                known = max(self.known_to_libtpu[host], at_rest[host][t] + more)
                self.known_to_libtpu[host] = known
            self.alive.append(live + inner)
            best = max(best, live + inner)
            best_host = max(best_host, live_host + inner_host)
        return best, best_host

    def not_carried(self, host: bool) -> list[int]:
        """Temporaries alive at each operation, but for what loops have taken over.

        What a loop is to take over, filled in before it, is left in `known_to_libtpu`.
        """
        taken: dict[int, int] = {}
        for t, node in enumerate(self.nodes):
            if short_name(node.name) == "while":
                for n in node.results:
                    if n in self.buffer_of:
                        taken.setdefault(id(self.buffer_of[n]), t)
        changes = [0] * (self.end + 2)
        filled = [0] * (self.end + 2)
        for buffer in self.buffers:
            if buffer.outside or buffer.host != host:
                continue
            loop = taken.get(id(buffer))
            changes[buffer.start] += buffer.bytes
            changes[buffer.end + 1 if loop is None else loop] -= buffer.bytes
            if loop is not None:
                filled[loop] += buffer.bytes
        found = list(itertools.accumulate(changes))
        before = (here + loop for here, loop in zip(found, filled, strict=True))
        self.known_to_libtpu[host] = max(before)
        return found

    def alive_at(self, t: int) -> Iterator[Buffer]:
        """The temporaries on the device while operation `t` runs."""
        for buffer in self.buffers:
            counted = not buffer.outside and not buffer.host
            if counted and buffer.start <= t <= buffer.end:
                yield buffer

    def inner(self, node: Node) -> tuple[int, int]:
        """What an operation needs while it runs, beyond operands and results."""
        if not node.blocks:
            return communicated(node, self.flat), 0
        peaks = [walk.peak() for walk in self.inner_walks(node)]
        device = max((peak for peak, _ in peaks), default=0)
        host = max((peak for _, peak in peaks), default=0)
        return device + communicated(node, self.flat), host

    def inner_walks(self, node: Node) -> Iterator["BlockWalk"]:
        """The walks of the blocks that run inside of an operation, one at a time."""
        loop = short_name(node.name) == "while"
        for block in node.blocks[1:] if loop else node.blocks:
            slots = [
                Slot(argument=block.arguments[i] if loop else None, number=i)
                for i in range(len(block.results))
            ]
            yield BlockWalk(self.flat, self.rules, block, slots)
