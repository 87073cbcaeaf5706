"""From the compiler's buffer assignment to the places in memory that it hands out.

XLA plans memory before the program runs: every array gets a place (an offset in an
allocation) and a time (between two events of the compiler's own heap simulation).
Arrays that take over a place without being moved, such as a loop's carry and what the
loop's body writes into it, are one `Place` here.

The schedule is flattened as XLA does it: what a loop's body runs stands before the loop
itself, once. A place is alive from the event that makes it to the last event before the
one that frees it, so that sums over places are the compiler's own at every event.

What goes silently wrong: the events that free a place carry the name of the instruction
that made it, not of the one that read it last. Their order among the others is all that
they say. Only `_memory_curve` calls this module, inside a function: it reads protobuf.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError

from .._errors import ArgumentError
from .._records._memory_places import Layout, Member, Place
from .._records._program import HOST_SPACE
from ._costs import Function, called, leaves, shape_bytes
from ._loops import body_and_condition
from ._proto import PRIMITIVE_TYPES, BufferAssignment
from ._reader import Reader

_FREE, _SHARE = 1, 2
_MOST_HOPS = 8
"""Operands that are asked in turn for a name that an instruction has not."""


def read_layout(module: bytes, assignment: bytes) -> Layout:
    """The places of a compiled program.

    **Arguments:** the serialized `HloModuleProto` and `BufferAssignmentProto`.

    **Raises:** `ArgumentError` if the bytes are neither.
    """
    try:
        found = BufferAssignment.FromString(assignment)
    except DecodeError as error:
        raise ArgumentError(
            "assignment",
            f"no buffer assignment ({error})",
            "Give what the compiler dumped, or memory_analysis() has.",
        ) from None
    return _LayoutReader(Reader.of(module), found).layout()


class _LayoutReader:
    """What is looked up over and over while places are put together."""

    def __init__(self, reader: Reader, assignment: Any):
        self.reader, self.assignment = reader, assignment
        self.schedule: list[tuple[str, str]] = []
        self.spans: dict[str, tuple[int, int]] = {}
        # What runs within another computation's schedule: that of the loop's body.
        self.within: dict[str, str] = {}
        self.position: dict[int, int] = {}
        self.by_name: dict[str, tuple[Function, Any]] = {}
        self.by_id: dict[int, tuple[Function, Any]] = {}
        for function in reader.functions.values():
            for item in function.message.instructions:
                self.by_name[item.name] = self.by_id[item.id] = (function, item)
        self._flatten(reader.functions[reader.module.entry_computation_id])
        self.buffers = {b.id: b for b in assignment.logical_buffers}

    def _flatten(self, function: Function) -> None:
        first = len(self.schedule)
        name: str = function.message.name
        for item in self.reader.sequence(function):
            below = [self.reader.functions[i] for i in item.called_computation_ids]
            if item.opcode == "while":
                below = [*reversed(body_and_condition(self.reader.functions, item))]
            if item.opcode in ("while", "conditional", "call", "async-start"):
                for inner in below:
                    if item.opcode in ("call", "async-start"):
                        self.within[inner.message.name] = self.within.get(name, name)
                    if inner.message.id in self.reader.sequences:
                        self._flatten(inner)
            self.position[item.id] = len(self.schedule)
            self.schedule.append((name, item.name))
        self.spans[name] = (first, len(self.schedule) - 1)

    def layout(self) -> Layout:
        """See `read_layout`."""
        owner, traced = {}, set()
        for allocation in self.assignment.buffer_allocations:
            for assigned in allocation.assigned:
                owner[assigned.logical_buffer_id] = allocation
        places = []
        for trace in self.assignment.heap_simulator_traces:
            for group, first, last in self._lifetimes(trace):
                traced.update(group)
                if not any(self._elsewhere(owner.get(i)) for i in group):
                    places.append(self._place("temporary", group, first, last))
        end = len(self.schedule) - 1
        for allocation in self.assignment.buffer_allocations:
            if allocation.is_thread_local or not allocation.size:
                continue
            group = [a.logical_buffer_id for a in allocation.assigned]
            if self._elsewhere(allocation) or not traced.intersection(group):
                kind = self._kind(allocation)
                place = self._place(kind, group, 0, end)
                places.append(
                    dataclasses.replace(
                        place, bytes=allocation.size, space=allocation.color
                    )
                )
        return Layout(
            places=tuple(places), schedule=tuple(self.schedule), spans=self.spans
        )

    def _elsewhere(self, allocation: Any) -> bool:
        """Whether an allocation is there for the whole step, whatever it holds."""
        return allocation is None or (
            allocation.is_entry_computation_parameter
            or allocation.maybe_live_out
            or allocation.is_constant
            or allocation.is_thread_local
        )

    def _kind(self, allocation: Any) -> str:
        if allocation.is_entry_computation_parameter:
            return "argument"
        if allocation.is_constant:
            return "constant"
        return "output" if allocation.maybe_live_out else "temporary"

    def _lifetimes(self, trace: Any) -> Iterator[tuple[list[int], int, int]]:
        """Groups of buffers that share a place, with the positions of their life."""
        first_of: dict[Any, Any] = {}  # the buffer that a group is known by
        groups: dict[Any, list[int]] = {}
        alive: dict[Any, int] = {}  # how many of a group are not freed yet
        began: dict[Any, int] = {}
        freed: list[tuple[list[int], int, int]] = []
        now = 0
        for event in trace.events:
            buffer: Any = event.buffer_id
            if event.kind == _FREE:
                group = first_of.get(buffer, buffer)
                alive[group] = alive.get(group, 1) - 1
                if not alive[group]:
                    freed.append((groups.pop(group), began.pop(group), now))
                continue
            if found := self.by_name.get(event.instruction_name):
                now = max(now, self.position.get(found[1].id, now))
            yield from self._ended(freed, now - 1)
            shared = event.share_with_canonical_id
            group = first_of.get(shared, shared) if event.kind == _SHARE else buffer
            if group not in groups:  # new, or all that shared it was freed before
                groups[group], began[group], alive[group] = [], now, 0
            first_of[buffer] = group
            groups[group].append(buffer)
            alive[group] += 1
        yield from self._ended(freed, len(self.schedule) - 1)
        for group, members in groups.items():
            yield members, began[group], len(self.schedule) - 1

    def _ended(
        self, freed: list[tuple[list[int], int, int]], latest: int
    ) -> Iterator[tuple[list[int], int, int]]:
        """What was freed, with its end: in the host's memory the latest it may be.

        There so little is made that the event before may lie a loop back: a stack would
        end where it is full, before anything of it is fetched.
        """
        for group, first, last in freed:
            space = {self.buffers[i].color for i in group if i in self.buffers}
            yield group, first, max(last, latest) if HOST_SPACE in space else last
        freed.clear()

    def _place(self, kind: str, group: list[int], first: int, last: int) -> Place:
        members = [m for i in group if (m := self._member(i)) is not None]
        members.sort(key=lambda member: member.position)
        buffers = [self.buffers[i] for i in group if i in self.buffers]
        argument = source = ""
        for item in self._parameters(group) if kind == "argument" else ():
            argument, source = item.metadata.op_name, self._first_read(item)
        return Place(
            kind=kind,
            argument=argument,
            source=source,
            bytes=max((b.size for b in buffers), default=0),
            space=buffers[0].color if buffers else 0,
            first=first,
            last=last,
            members=tuple(members),
        )

    def _parameters(self, group: list[int]) -> Iterator[Any]:
        """The parameter of the program in a place, if one is: others write there."""
        for i in group:
            found = self._defined(i)
            if found is None or found[0] is not self.reader.entry:
                continue
            if found[1].opcode == "parameter":
                yield found[1]

    def _first_read(self, item: Any) -> str:
        """Where the user's code first reads a parameter."""
        users = [user for user, _ in self.reader.entry.users.get(item.id, ())]
        users.sort(key=lambda user: self.position.get(user.id, 0))
        return next(filter(None, map(self.reader.where, users)), "")

    def _defined(self, buffer: int) -> tuple[Function, Any] | None:
        """The instruction that makes a buffer, and its computation."""
        if buffer not in self.buffers:
            return None
        at = self.buffers[buffer].defined_at
        return self.by_id.get(at.instruction_id) or self.by_name.get(
            at.instruction_name
        )

    def _member(self, buffer: int) -> Member | None:
        found = self._defined(buffer)
        if found is None:
            return None
        (function, item), path = found, self.buffers[buffer].defined_at.shape_index
        shape = item.shape
        for index in path:
            if index >= len(shape.tuple_shapes):
                break
            shape = shape.tuple_shapes[index]
        leaf = None if shape.tuple_shapes else next(leaves(shape), None)
        maker, updates = self._maker(function, item, tuple(path))
        name, source = self._described(*maker)
        computation: str = function.message.name
        return Member(
            instruction=item.name,
            computation=self.within.get(computation, computation),
            opcode=item.opcode,
            position=self.position.get(item.id, 0),
            framework_name=name,
            source=source,
            dimensions=tuple(leaf.dimensions) if leaf is not None else (),
            dtype=PRIMITIVE_TYPES[leaf.element_type][0] if leaf is not None else "",
            array_bytes=shape_bytes(shape) if leaf is not None else 0,
            updates=updates,
        )

    def _maker(
        self, function: Function, item: Any, index: tuple[int, ...]
    ) -> tuple[tuple[Function, Any], bool]:
        """What computes an array: of a stack's slot, what is written there."""
        found, fusion = outer = (function, item)
        inner = called(self.reader.functions, item)
        if item.opcode in ("fusion", "async-start") and inner is not None:
            function, item = inner, inner.root
            if item.opcode == "tuple" and index and index[0] < len(item.operand_ids):
                item = function.operands(item)[index[0]]
                outer = (function, item)
        item = _unwrapped(function, item)
        if item.opcode != "dynamic-update-slice":
            return outer, False
        update = _unwrapped(function, function.operands(item)[1])
        if update.opcode == "parameter" and inner is function:
            operand = found.operands(fusion)[update.parameter_number]
            return (found, operand), True
        return (function, update), True

    def _described(self, function: Function, item: Any) -> tuple[str, str]:
        """Framework name and source of an instruction, or of what it hands on."""
        name = source = ""
        for _ in range(_MOST_HOPS):
            inner = called(self.reader.functions, item)
            parts = ()
            if item.opcode == "fusion" and inner is not None:
                parts = inner.message.instructions
            for part in (item, *reversed(parts)):  # what comes last, a fusion makes
                found = part.metadata.op_name
                # XLA's own names have no scopes.
                name = name or (found if "/" in found else "")
                if found == name:
                    source = source or self.reader.where(part)
            operands = function.operands(item)
            if (name and source) or not operands:
                break
            index = item.tuple_index if item.opcode == "get-tuple-element" else None
            item = max(operands, key=lambda operand: shape_bytes(operand.shape))
            if item.opcode == "while" and index is not None:
                # What the loop's body hands out in that place.
                function, _ = body_and_condition(self.reader.functions, item)
                item = function.operands(function.root)[index]
            source = source or self.reader.where(item)
            if item.opcode == "parameter" and function is self.reader.entry:
                # What is made of an argument without a name of its own: a cast, say.
                name = name or item.metadata.op_name
                source = source or self._first_read(item)
        return name, source


def _unwrapped(function: Function, item: Any) -> Any:
    """What an instruction is, but for its layout and dtype."""
    while item.opcode in ("bitcast", "copy", "convert", "reshape"):
        item = function.operands(item)[0]
    return item
