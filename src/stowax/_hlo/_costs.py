"""What one instruction of a compiled module computes and touches.

Reads protobuf messages (`_proto`), returns plain numbers; `_program` is the caller.

Counted are the operations of matrix products and convolutions, also inside fusions and
the GPU's gemm calls: a multiply and an add are two. Elementwise arithmetic is not
counted: on every chip that we know it is bound by the bytes, and the bytes are counted.
A fused `dynamic-slice` reads its slice only and a fused `dynamic-update-slice` writes
its update only. Without that rule a scan over stacked layers would pay for the whole
stack in every iteration.

What goes silently wrong: bytes are of the logical shape. A TPU pads the two minor
dimensions to its tiles, so small and odd shapes occupy more than is said here.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._proto import PRIMITIVE_TYPES

_SLICES = {"dynamic-slice", "slice", "gather"}
# What names data and touches none of it.
NAMES_DATA = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "opt-barrier",
    }
)
_NO_TRAFFIC = NAMES_DATA | {"after-all", "partition-id", "replica-id"}
# Targets that only name or reserve memory (TPU and GPU compilers of jax 0.10 to 0.12).
FREE_TARGETS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "Sharding", "AssumeGatherIndicesInBound"}
)


class Function:
    """A computation with its instructions by id and its users."""

    def __init__(self, message: Any):
        self.message = message
        self.by_id = {item.id: item for item in message.instructions}
        self.root = self.by_id[message.root_id]

    def operands(self, instruction: Any) -> list[Any]:
        """The instructions that `instruction` reads."""
        return [self.by_id[i] for i in instruction.operand_ids]

    @functools.cached_property
    def users(self) -> Mapping[int, list[tuple[Any, int]]]:
        """Instruction id -> (reader, position among its operands)."""
        users: dict[int, list[tuple[Any, int]]] = {}
        for item in self.message.instructions:
            for position, operand in enumerate(item.operand_ids):
                users.setdefault(operand, []).append((item, position))
        return users

    @functools.cached_property
    def parameters(self) -> Mapping[int, Any]:
        """Parameter number -> instruction."""
        return {
            item.parameter_number: item
            for item in self.message.instructions
            if item.opcode == "parameter"
        }


Functions = Mapping[int, Function]


def leaves(shape: Any) -> Iterator[Any]:
    """The arrays of a shape, tuples flattened, tokens and opaque values left out."""
    if shape.tuple_shapes:
        for part in shape.tuple_shapes:
            yield from leaves(part)
    elif shape.element_type in PRIMITIVE_TYPES:
        yield shape


def shape_bytes(shape: Any) -> int:
    """Bytes of the logical shape, a tuple being the sum of its parts."""
    total = 0
    for leaf in leaves(shape):
        total += (math.prod(leaf.dimensions) * bits_of(leaf) + 7) // 8
    return total


def bits_of(shape: Any) -> int:
    """Bits of one element of an array."""
    return shape.layout.element_size_in_bits or PRIMITIVE_TYPES[shape.element_type][1]


def dtype_name(shape: Any) -> str:
    """The dtype of the first array in the shape, as NumPy or ml_dtypes call it."""
    for leaf in leaves(shape):
        return PRIMITIVE_TYPES[leaf.element_type][0]
    return ""


def config(instruction: Any) -> Any:
    """The instruction's backend_config as JSON; an empty dict where it is none."""
    try:
        parsed = json.loads(instruction.backend_config or b"{}")
    except ValueError:  # some kernels put their own bytes there
        return {}
    return parsed if isinstance(parsed, dict) else {}


def called(functions: Functions, instruction: Any) -> Function | None:
    """The one computation that the instruction is made of (fusion, async, call)."""
    for identifier in instruction.called_computation_ids:
        return functions[identifier]
    return None


def touched(
    functions: Functions, function: Function, instruction: Any
) -> tuple[tuple[int, ...], int]:
    """Bytes read of each operand, and bytes written of the result.

    **Returns:** `(tuple of int, int)`.
    """
    operands = function.operands(instruction)
    if instruction.opcode in _NO_TRAFFIC or (
        instruction.opcode == "custom-call"
        and instruction.custom_call_target in FREE_TARGETS
    ):
        return (0,) * len(operands), 0
    body = called(functions, instruction)
    if instruction.opcode in ("fusion", "async-start") and body is not None:
        reads = tuple(
            _read_of_parameter(functions, body, number)
            for number in range(len(operands))
        )
        return reads, _written(functions, body, body.root)
    result = shape_bytes(instruction.shape)
    if instruction.opcode in _SLICES:
        rest = [shape_bytes(item.shape) for item in operands[1:]]
        return (result, *rest), result
    sizes = [shape_bytes(item.shape) for item in operands]
    if instruction.opcode == "dynamic-update-slice":
        return (0, *sizes[1:]), sizes[1]
    return tuple(sizes), result


def _read_of_parameter(functions: Functions, body: Function, number: int) -> int:
    parameter = body.parameters.get(number)
    if parameter is None:
        return 0
    return _read_of_value(functions, body, parameter)


def _read_of_value(functions: Functions, body: Function, value: Any) -> int:
    whole = shape_bytes(value.shape)
    total = 0
    for reader, position in body.users.get(value.id, ()):
        if reader.opcode in ("bitcast", "copy", "tuple"):
            # A copy inside a fusion is an access pattern, not a trip to memory.
            total += _read_of_value(functions, body, reader)
            if reader.id == body.root.id and reader.opcode != "tuple":
                total += whole
        elif reader.opcode in _SLICES and position == 0:
            total += shape_bytes(reader.shape)
        elif reader.opcode == "dynamic-update-slice" and position == 0:
            continue
        elif reader.opcode == "fusion":
            inner = called(functions, reader)
            total += (
                whole
                if inner is None
                else _read_of_parameter(functions, inner, position)
            )
        else:
            total += whole
        if total >= whole:
            return whole
    return total


def _written(functions: Functions, body: Function, value: Any) -> int:
    if value.opcode == "tuple":
        return sum(_written(functions, body, item) for item in body.operands(value))
    if value.opcode == "bitcast":
        source = body.operands(value)[0]
        if source.opcode == "dynamic-update-slice":
            return _written(functions, body, source)
    if value.opcode == "dynamic-update-slice":
        return shape_bytes(body.operands(value)[1].shape)
    if value.opcode == "fusion":
        inner = called(functions, value)
        if inner is not None:
            return _written(functions, inner, inner.root)
    return shape_bytes(value.shape)


def matrix_work(
    functions: Functions, function: Function, instruction: Any
) -> tuple[float, str]:
    """Operations of the matrix products in an instruction, and the dtype they read.

    **Returns:** `(operations, dtype)`; `(0.0, "")` where there is none.
    """
    operands = function.operands(instruction)
    dtype = dtype_name(operands[0].shape) if operands else ""
    if instruction.opcode == "dot":
        numbers = instruction.dot_dimensions
        return _product(instruction, operands[0], numbers.lhs_contracting), dtype
    if instruction.opcode == "convolution":
        result = next(leaves(instruction.shape))
        shapes = operands[0].shape, operands[1].shape, result
        return _convolution(instruction, *shapes), dtype
    if instruction.opcode == "custom-call":
        return _kernel_work(instruction, operands), dtype
    if instruction.opcode not in ("fusion", "async-start", "call"):
        return 0.0, ""
    total, dtype = 0.0, ""
    body = called(functions, instruction)
    if body is None:
        return 0.0, ""
    for item in body.message.instructions:
        work, its_dtype = matrix_work(functions, body, item)
        if work > 0:
            total, dtype = total + work, its_dtype
    return total, dtype


def _product(instruction: Any, left: Any, contracting: Sequence[int]) -> float:
    """2 x elements of the result x length of the contracted dimensions."""
    depth = math.prod(left.shape.dimensions[i] for i in contracting)
    result = next(leaves(instruction.shape))
    return 2.0 * math.prod(result.dimensions) * depth


def _convolution(instruction: Any, inputs: Any, kernel: Any, result: Any) -> float:
    """2 x output elements x input features x window positions that hit real input.

    TPUs write every matrix product as a convolution, batch dimensions as windows with
    padding or dilation, so positions that fall into padding or holes must not count.
    """
    numbers = instruction.convolution_dimensions
    output = result.dimensions
    features = kernel.dimensions[numbers.kernel_input_feature]
    groups = max(instruction.batch_group_count, 1)
    total = 2.0 * output[numbers.output_batch] * output[numbers.output_feature]
    total *= features / groups
    for index, window in enumerate(instruction.window.dimensions):
        total *= _window_hits(
            inputs.dimensions[numbers.input_spatial[index]],
            output[numbers.output_spatial[index]],
            window.size,
            max(window.stride, 1),
            window.padding_low,
            max(window.window_dilation, 1),
            max(window.base_dilation, 1),
        )
    return total


@functools.lru_cache(maxsize=4096)
def _window_hits(
    inputs: int,
    outputs: int,
    size: int,
    stride: int,
    padding: int,
    window_dilation: int,
    base_dilation: int,
) -> int:
    """Pairs of output and window position that read an input element."""
    last = (inputs - 1) * base_dilation
    # Output o and window position w read w * window_dilation - padding + o * stride. It
    # is real if it is in [0, last] and a multiple of base_dilation; in o this repeats
    # with period base_dilation / gcd(stride, base_dilation).
    step = math.gcd(stride, base_dilation)
    period = base_dilation // step
    inverse = pow(stride // step, -1, period) if period > 1 else 0
    hits = 0
    for position in range(size):
        offset = position * window_dilation - padding
        if offset % step:
            continue
        first = max(0, -(offset // stride))  # ceil(-offset / stride)
        final = min(outputs - 1, (last - offset) // stride)
        if period > 1:
            residue = (-(offset // step) * inverse) % period
            first += (residue - first) % period
        if final >= first:
            hits += (final - first) // period + 1
    return hits


def _kernel_work(instruction: Any, operands: Sequence[Any]) -> float:
    """Work of a library call: cuBLAS and cuDNN, and kernels that bring an estimate.

    cuDNN's convolutions name dimensions and windows as in the forward one, also where
    they compute a gradient; that takes as many operations.
    """
    target = instruction.custom_call_target
    if target.startswith("__cublas$"):
        numbers = config(instruction).get("gemm_backend_config", {})
        numbers = numbers.get("dot_dimension_numbers", {})
        contracting = [int(i) for i in numbers.get("lhs_contracting_dimensions", ())]
        return _product(instruction, operands[0], contracting)
    if target.startswith("__cudnn$conv"):
        first, second = (operand.shape for operand in operands[:2])
        result = next(leaves(instruction.shape))
        roles = {
            "__cudnn$convBackwardInput": (result, second, first),
            "__cudnn$convBackwardFilter": (first, result, second),
        }
        shapes = roles.get(target, (first, second, result))
        return _convolution(instruction, *shapes)
    if target == "tpu_custom_call":
        estimate = config(instruction).get("custom_call_config", {})
        return float(estimate.get("cost_estimate", {}).get("flops", 0))
    return 0.0
