"""Just enough of XLA's `hlo.proto` to read a compiled program.

A compiled executable gives its scheduled module as a serialized `HloModuleProto`.
JAX ships no Python class for it, so the message types are described here, field by
field, and built by protobuf when this module is imported. `_program` is the only caller
and imports it inside a function: `import stowax` must not pay for protobuf.

What goes silently wrong: protobuf skips fields that it does not know and leaves absent
ones at zero, so a wrong number here reads as an empty value, not as an error. A test
compares every field that we rely on with the text form of the same module.

Field numbers: `xla/service/hlo.proto` and `xla/xla_data.proto` of openxla/xla. Numbers
of a released protobuf message never change meaning.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "stowax.xla"
_SCALARS = {
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
}

# message -> field -> (number, type); a leading "*" is `repeated`. `PrimitiveType` is an
# enum in XLA: on the wire an enum and an int32 are the same varint.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Tile": {"dimensions": (1, "*int64")},
    "Layout": {
        "minor_to_major": (1, "*int64"),
        "tiles": (6, "*Tile"),
        "element_size_in_bits": (7, "int64"),
        "memory_space": (8, "int64"),
    },
    "Shape": {
        "element_type": (2, "int32"),
        "dimensions": (3, "*int64"),
        "tuple_shapes": (4, "*Shape"),
        "layout": (5, "Layout"),
    },
    "Metadata": {
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int32"),
        "stack_frame_id": (15, "int32"),
    },
    "Literal": {
        "preds": (2, "*bool"),
        "s32s": (4, "*int32"),
        "s64s": (5, "*int64"),
        "u32s": (6, "*uint32"),
        "u64s": (7, "*uint64"),
    },
    "DotDimensions": {"lhs_contracting": (1, "*int64")},
    "ConvolutionDimensions": {
        "kernel_input_feature": (3, "int64"),
        "output_batch": (9, "int64"),
        "output_feature": (10, "int64"),
        "input_spatial": (11, "*int64"),
        "output_spatial": (12, "*int64"),
    },
    "WindowDimension": {
        "size": (1, "int64"),
        "stride": (2, "int64"),
        "padding_low": (3, "int64"),
        "window_dilation": (5, "int64"),
        "base_dilation": (6, "int64"),
    },
    "Window": {"dimensions": (1, "*WindowDimension")},
    # `map<string, string>` travels as repeated pairs, like every protobuf map.
    "TextPair": {"key": (1, "string"), "value": (2, "string")},
    "FrontendAttributes": {"map": (1, "*TextPair")},
    "Instruction": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "Shape"),
        "metadata": (7, "Metadata"),
        "literal": (8, "Literal"),
        "parameter_number": (9, "int64"),
        "fusion_kind": (11, "string"),
        "tuple_index": (13, "int64"),
        "window": (15, "Window"),
        "convolution_dimensions": (16, "ConvolutionDimensions"),
        "custom_call_target": (28, "string"),
        "dot_dimensions": (30, "DotDimensions"),
        "id": (35, "int64"),
        "operand_ids": (36, "*int64"),
        "called_computation_ids": (38, "*int64"),
        "backend_config": (43, "bytes"),
        "batch_group_count": (58, "int64"),
        "comparison_direction": (63, "string"),
        "frontend_attributes": (68, "FrontendAttributes"),
        "async_execution_thread": (79, "string"),
    },
    "Computation": {
        "name": (1, "string"),
        "instructions": (2, "*Instruction"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
        "execution_thread": (8, "string"),
    },
    "InstructionSequence": {"instruction_ids": (1, "*int64")},
    "ScheduleEntry": {"key": (1, "int64"), "value": (2, "InstructionSequence")},
    "Schedule": {"sequences": (1, "*ScheduleEntry")},
    "FileLocation": {"file_name_id": (1, "int32"), "line": (3, "int32")},
    "StackFrame": {"file_location_id": (1, "int32"), "parent_frame_id": (2, "int32")},
    "StackFrameIndex": {
        "file_names": (1, "*string"),
        "file_locations": (3, "*FileLocation"),
        "stack_frames": (4, "*StackFrame"),
    },
    "Location": {
        "instruction_name": (2, "string"),
        "shape_index": (3, "*int64"),
        "instruction_id": (4, "int64"),
    },
    "LogicalBuffer": {
        "id": (1, "int64"),
        "size": (2, "int64"),
        "defined_at": (3, "Location"),
        "color": (4, "int64"),
    },
    "Assigned": {"logical_buffer_id": (1, "int64")},
    "Allocation": {
        "size": (2, "int64"),
        "is_thread_local": (3, "bool"),
        "is_entry_computation_parameter": (5, "bool"),
        "maybe_live_out": (7, "bool"),
        "color": (8, "int64"),
        "assigned": (9, "*Assigned"),
        "is_constant": (12, "bool"),
    },
    "HeapEvent": {
        "kind": (1, "int32"),
        "buffer_id": (2, "int64"),
        "instruction_name": (4, "string"),
        "share_with_canonical_id": (5, "int64"),
    },
    "HeapTrace": {"events": (1, "*HeapEvent")},
    "BufferAssignment": {
        "logical_buffers": (1, "*LogicalBuffer"),
        "buffer_allocations": (3, "*Allocation"),
        "heap_simulator_traces": (4, "*HeapTrace"),
    },
    # What XLA dumps: both parts are kept as they are, to be read one by one.
    "Dump": {"hlo_module": (1, "bytes"), "buffer_assignment": (3, "bytes")},
    "Alias": {
        "output_index": (1, "*int64"),
        "parameter_number": (2, "int64"),
        "parameter_index": (3, "*int64"),
    },
    "Aliases": {"entries": (1, "*Alias")},
    "ProgramShape": {"parameters": (1, "*Shape"), "result": (2, "Shape")},
    "Module": {
        "name": (1, "string"),
        "computations": (3, "*Computation"),
        "host_program_shape": (4, "ProgramShape"),
        "entry_computation_id": (6, "int64"),
        "schedule": (7, "Schedule"),
        "input_output_alias": (8, "Aliases"),
        "stack_frame_index": (17, "StackFrameIndex"),
    },
}


def _build_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="stowax/hlo.proto", package=_PACKAGE, syntax="proto3"
    )
    field_type = descriptor_pb2.FieldDescriptorProto
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            repeated = kind.startswith("*")
            kind = kind.lstrip("*")
            field.label = (
                field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            )
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = field_type.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
    # A pool of our own: the default one is shared with every other user of protobuf in
    # the process, TensorFlow's real hlo.proto included.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
        )
        for name in ("Module", "BufferAssignment", "Dump")
    }


_CLASSES = _build_classes()

Module = _CLASSES["Module"]
"""The message class; `Module.FromString(serialized)` reads an `HloModuleProto`."""

BufferAssignment = _CLASSES["BufferAssignment"]
"""Where every array lies, and when: XLA's `BufferAssignmentProto`."""

Dump = _CLASSES["Dump"]
"""XLA's `HloProto`, as it is dumped: a module and its buffer assignment, serialized."""

# xla_data.proto, enum PrimitiveType: number -> (name of the dtype in NumPy or
# ml_dtypes, bits per element). Tokens, opaque values and tuples have no bits.
PRIMITIVE_TYPES: dict[int, tuple[str, int]] = {
    1: ("bool", 8),
    2: ("int8", 8),
    3: ("int16", 16),
    4: ("int32", 32),
    5: ("int64", 64),
    6: ("uint8", 8),
    7: ("uint16", 16),
    8: ("uint32", 32),
    9: ("uint64", 64),
    10: ("float16", 16),
    11: ("float32", 32),
    12: ("float64", 64),
    15: ("complex64", 64),
    16: ("bfloat16", 16),
    18: ("complex128", 128),
    19: ("float8_e5m2", 8),
    20: ("float8_e4m3fn", 8),
    21: ("int4", 4),
    22: ("uint4", 4),
    23: ("float8_e4m3b11fnuz", 8),
    24: ("float8_e5m2fnuz", 8),
    25: ("float8_e4m3fnuz", 8),
    26: ("int2", 2),
    27: ("uint2", 2),
    28: ("float8_e4m3", 8),
    29: ("float8_e3m4", 8),
    30: ("int1", 1),
    31: ("uint1", 1),
    32: ("float4_e2m1fn", 4),
    33: ("float8_e8m0fnu", 8),
}
