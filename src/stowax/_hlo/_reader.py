"""From a compiled module's protobuf messages to the records of `_records._program`.

The walk starts at the entry and follows what really runs: loop bodies times their
trips, branches, calls, the insides of asynchronous operations. Fusions are leaves:
their inside counts as work of the fusion. Only `_program.read_program` calls this
module, inside the function, because it imports protobuf.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError

from .._errors import ArgumentError
from .._records._program import (
    COLLECTIVES,
    HOST_SPACE,
    Computation,
    Fill,
    Instruction,
    Misplaced,
    Program,
    Transfer,
)
from .._where import OWN_FOLDER, is_jaxs_file, is_users_file
from ._costs import (
    Function,
    called,
    config,
    dtype_name,
    leaves,
    matrix_work,
    shape_bytes,
    touched,
)
from ._known import unknown_parts
from ._loops import Element, body_and_condition, initial, invariant, trip_count
from ._offsets import misplaced
from ._orders import reorders
from ._proto import Module
from ._transfers import transfers_in

HOST_THREAD = "host"
"""The thread of the host's processor. Others are parts of the device: a TPU's
SparseCores (`sparsecore`), a GPU's streams (`parallel`)."""

_INSTEAD = (
    "Give the bytes of executable.hlo_modules()[0].as_serialized_hlo_module_proto()"
    " of a compiled program."
)


@dataclasses.dataclass(slots=True)
class _Visit:
    """One computation as it is found from the entry, possibly from several callers."""

    function: Function
    thread: str
    executions: float
    trips: dict[int, int | None]


class Reader:
    """The module being read, with what is looked up over and over."""

    def __init__(self, module: Any):
        self.module = module
        self.functions = {item.id: Function(item) for item in module.computations}
        self.sequences = {
            item.key: tuple(item.value.instruction_ids)
            for item in module.schedule.sequences
        }
        self.visits: dict[int, _Visit] = {}
        self.uncounted: list[str] = []

    @classmethod
    def of(cls, serialized: bytes) -> "Reader":
        """A reader of a serialized `HloModuleProto`.

        **Raises:** `ArgumentError` if the bytes are no compiled module.
        """
        try:
            module = Module.FromString(serialized)
            problem = "" if module.computations else "no HLO module"
        except (DecodeError, TypeError) as error:
            problem, module = f"no HLO module ({error})", Module()
        reader = cls(module)
        if problem or module.entry_computation_id not in reader.functions:
            raise ArgumentError("serialized", problem or "no HLO module", _INSTEAD)
        return reader

    @property
    def entry(self) -> Function:
        """The computation that a step begins with."""
        return self.functions[self.module.entry_computation_id]

    def sequence(self, function: Function) -> list[Any]:
        """The instructions in schedule order (dependency order where none is kept)."""
        order = self.sequences.get(function.message.id)
        if order is None:
            return list(function.message.instructions)
        return [function.by_id[i] for i in order]

    def visit(
        self, function: Function, thread: str, executions: float, outside: Element
    ) -> None:
        """Counts how often everything below `function` runs."""
        identifier = function.message.id
        seen = self.visits.get(identifier)
        if seen is None:
            seen = self.visits[identifier] = _Visit(function, thread, 0, {})
        seen.executions += executions
        for item in self.sequence(function):
            if item.opcode == "while":
                self._visit_loop(seen, item, executions, outside)
            elif item.opcode == "conditional":
                share = executions / len(item.called_computation_ids)
                for branch in item.called_computation_ids:
                    self.visit(self.functions[branch], thread, share, _nothing)
            elif item.opcode in ("call", "async-start", "custom-call"):
                self._visit_called(seen, item, executions)

    def _visit_called(self, seen: _Visit, item: Any, executions: float) -> None:
        inner = called(self.functions, item)
        if inner is None:
            return
        thread = item.async_execution_thread or inner.message.execution_thread
        thread = thread if thread == HOST_THREAD else seen.thread
        # What a device starts asynchronously is one copy, one collective, or one
        # kernel of a TPU's SparseCore: a leaf, like a fusion. What it starts on the
        # host's thread is a program of its own.
        if item.opcode == "call" or thread != seen.thread or seen.thread:
            self.visit(inner, thread, executions, _nothing)

    def _visit_loop(
        self, seen: _Visit, loop: Any, executions: float, outside: Element
    ) -> None:
        trips = trip_count(self.functions, seen.function, loop, outside)
        seen.trips[loop.id] = trips
        if trips is None:
            self.uncounted.append(loop.name)
        body, _ = body_and_condition(self.functions, loop)
        start = initial(self.functions, seen.function, loop, outside)
        runs = executions * (1 if trips is None else trips)
        self.visit(body, seen.thread, runs, invariant(body, start))

    @functools.cache  # noqa: B019 - the reader lives as long as one call of `read`
    def source(self, identifier: int) -> str:
        """`file:line` of the user's innermost line in a stack of frames; 0 is none.

        Where all frames are a library's, the innermost of those that are not JAX's. Our
        own say nothing, and a library outside of them called us, not the operation.
        """
        index = self.module.stack_frame_index
        others, ours = "", False
        while 0 < identifier <= len(index.stack_frames):
            frame = index.stack_frames[identifier - 1]
            if not 0 < frame.file_location_id <= len(index.file_locations):
                break
            place = index.file_locations[frame.file_location_id - 1]
            if not 0 < place.file_name_id <= len(index.file_names):
                break
            file = index.file_names[place.file_name_id - 1]
            if is_users_file(file):
                return f"{file}:{place.line}"
            ours = ours or file.startswith(OWN_FOLDER)
            if not (others or ours or is_jaxs_file(file)):
                others = f"{file}:{place.line}"
            identifier = frame.parent_frame_id
        return others

    def where(self, item: Any) -> str:
        """`file:line` of an instruction, in either of XLA's two ways of keeping it."""
        found = self.source(item.metadata.stack_frame_id)
        if not found and item.metadata.source_file:
            found = f"{item.metadata.source_file}:{item.metadata.source_line}"
        return found


def read(serialized: bytes) -> Program:
    """See `_program.read_program`."""
    reader = Reader.of(serialized)
    module, entry = reader.module, reader.entry
    reader.visit(entry, "", 1, _nothing)
    computations: dict[str, Computation] = {}
    transfers: list[Transfer] = []
    for visit in reader.visits.values():
        sequence = reader.sequence(visit.function)
        computations[visit.function.message.name] = Computation(
            name=visit.function.message.name,
            instructions=tuple(_instruction(reader, visit, item) for item in sequence),
            execution_thread=visit.thread,
            executions=_whole(visit.executions),
        )
        if not visit.thread:
            transfers.extend(
                transfers_in(
                    reader.functions,
                    visit.function,
                    sequence,
                    _whole(visit.executions),
                    reader.where,
                )
            )
    return Program(
        name=module.name,
        entry=entry.message.name,
        computations=computations,
        transfers=tuple(transfers),
        uncounted_loops=tuple(reader.uncounted),
        aliased=frozenset(_aliased(module)),
        crossing=frozenset(_crossing(module)),
        scheduled=entry.message.id in reader.sequences,
        misplaced=tuple(
            Misplaced(
                name=item.name,
                op_name=item.metadata.op_name,
                source=reader.where(item),
            )
            for item in misplaced(reader.functions)
        ),
        fills=tuple(
            fill
            for visit in reader.visits.values()
            for item in visit.function.message.instructions
            for fill in _fills(reader, item)
        ),
        unread=unknown_parts(visit.function for visit in reader.visits.values()),
    )


def _instruction(reader: Reader, visit: _Visit, item: Any) -> Instruction:
    functions, function = reader.functions, visit.function
    reads, written = touched(functions, function, item)
    flops, dtype = matrix_work(functions, function, item)
    inner = called(functions, item) if item.opcode == "async-start" else None
    return Instruction(
        name=item.name,
        opcode=item.opcode,
        wrapped=inner.root.opcode if inner is not None else _fused(reader, item),
        target=(inner.root if inner is not None else item).custom_call_target,
        result_bytes=shape_bytes(item.shape),
        operands=tuple(operand.name for operand in function.operands(item)),
        called=tuple(
            functions[i].message.name
            for i in item.called_computation_ids
            if i in reader.visits
        ),
        op_name=item.metadata.op_name,
        source=reader.where(item),
        estimated_cycles=_estimated_cycles(item),
        flops=flops,
        dtype=dtype or dtype_name(item.shape),
        bytes_accessed=sum(reads) + written,
        execution_thread=visit.thread or _compute_type(item),
        trips=visit.trips.get(item.id),
        tuple_index=item.tuple_index if item.opcode == "get-tuple-element" else None,
        reorders=reorders(functions, function, item),
    )


def _fused(reader: Reader, item: Any) -> str:
    """The collective inside a fusion: TPUs fuse slicing into reduce-scatters."""
    inner = called(reader.functions, item) if item.opcode == "fusion" else None
    for part in inner.message.instructions if inner is not None else ():
        if part.opcode.removesuffix("-start") in COLLECTIVES:
            return part.opcode
    return ""


def _fills(reader: Reader, item: Any) -> Iterator[Fill]:
    """Arrays that an instruction writes a slice of, alone or in a fusion.

    Those in a device's main memory: a TPU has small ones in VMEM. Where a fusion's
    results lie its own type says, and not that of what is in it.
    """
    written = collections.Counter(
        shape_bytes(part.shape)
        for part in _parts(reader, item)
        if part.opcode == "dynamic-update-slice"
    )
    for leaf in leaves(item.shape) if written else ():
        size = shape_bytes(leaf)
        if written[size] > 0 and not leaf.layout.memory_space:
            written[size] -= 1
            yield Fill(name=item.name, bytes=size)


def _parts(reader: Reader, item: Any) -> Iterator[Any]:
    """What an instruction is made of; a GPU starts a fusion of slices by another."""
    inner = called(reader.functions, item)
    if item.opcode not in ("fusion", "async-start") or inner is None:
        yield item
        return
    for part in inner.message.instructions:
        yield from _parts(reader, part)


def _estimated_cycles(item: Any) -> int | None:
    if b"estimated_cycles" not in item.backend_config:
        return None
    for part in (config(item), *config(item).values()):
        if isinstance(part, dict) and "estimated_cycles" in part:
            cycles = int(part["estimated_cycles"])
            # The compiler writes 0 or the largest integer where it has no estimate.
            return cycles if 0 < cycles < 2**62 else None
    return None


def _compute_type(item: Any) -> str:
    """GPU compilers mark what they moved to the host by an attribute, not a thread."""
    for pair in item.frontend_attributes.map:
        if pair.key == "_xla_compute_type":
            return pair.value
    return ""


def _nothing(_: int) -> None:
    return None


def _whole(number: float) -> float:
    return round(number) if abs(number - round(number)) < 1e-9 else number


def _aliased(module: Any) -> Iterator[int]:
    """Numbers of the arguments that outputs take the place of.

    Where there are very many, the compiler passes them as one tuple.
    """
    for alias in module.input_output_alias.entries:
        yield next(iter(alias.parameter_index), alias.parameter_number)


def _crossing(module: Any) -> Iterator[int]:
    """Those of them that lie in another memory than the output.

    No program is to have any: the runtime takes an output for an array that lies where
    its type says, and the figures count it there.
    """
    shape = module.host_program_shape
    for alias in module.input_output_alias.entries:
        argument = _part(
            shape.parameters[alias.parameter_number], alias.parameter_index
        )
        output = _part(shape.result, alias.output_index)
        spaces = argument.layout.memory_space, output.layout.memory_space
        if (HOST_SPACE in spaces) and spaces[0] != spaces[1]:
            yield next(iter(alias.parameter_index), alias.parameter_number)


def _part(shape: Any, index: Any) -> Any:
    for number in index:
        shape = shape.tuple_shapes[number]
    return shape
