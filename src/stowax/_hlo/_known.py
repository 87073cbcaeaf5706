"""What of a compiled module the reader knows, so that it can say what it does not.

XLA goes on: a module of a later compiler may have operations and dtypes that this
reader has never heard of. Such an operation is priced at the bytes of its result and
operands, such an array counts no bytes at all. Neither may pass in silence.
"""

import collections
from collections.abc import Iterable
from typing import Any

from ._costs import Function
from ._proto import PRIMITIVE_TYPES

# xla/hlo/ir/hlo_opcode.h of openxla/xla, November 2026.
# fmt: off
_OPCODES = frozenset((
    "abs", "acos", "acosh", "add", "add-dependency", "after-all", "all-gather",
    "all-gather-done", "all-gather-start", "all-reduce", "all-reduce-done",
    "all-reduce-start", "all-to-all", "and", "asin", "asinh", "async-done",
    "async-start", "async-update", "atan2", "atanh", "batch-norm-grad",
    "batch-norm-inference", "batch-norm-training", "bitcast", "bitcast-convert",
    "broadcast", "call", "cbrt", "ceil", "cholesky", "clamp", "collective-broadcast",
    "collective-permute", "collective-permute-done", "collective-permute-start",
    "compare", "complex", "concatenate", "conditional", "constant", "convert",
    "convolution", "copy", "copy-done", "copy-start", "cosh", "cosine",
    "count-leading-zeros", "custom-call", "divide", "domain", "dot", "dynamic-reshape",
    "dynamic-slice", "dynamic-update-slice", "erf", "exponential",
    "exponential-minus-one", "fft", "floor", "fusion", "gather", "get-dimension-size",
    "get-tuple-element", "imag", "infeed", "iota", "is-finite", "log", "log-plus-one",
    "logistic", "map", "maximum", "minimum", "multiply", "negate", "not",
    "opt-barrier", "or", "outfeed", "pad", "parameter", "partition-id", "popcnt",
    "power", "ragged-all-to-all", "ragged-dot", "real", "recv", "recv-done", "reduce",
    "reduce-precision", "reduce-scatter", "reduce-window", "remainder", "replica-id",
    "reshape", "reverse", "rng", "rng-bit-generator", "rng-get-and-update-state",
    "round-nearest-afz", "round-nearest-even", "rsqrt", "scaled-dot", "scan",
    "scatter", "select", "select-and-scatter", "send", "send-done",
    "set-dimension-size", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "sinh", "slice", "sort", "sqrt",
    "stochastic-convert", "subtract", "tan", "tanh", "topk", "transpose",
    "triangular-solve", "tuple", "while", "xor",
))
# fmt: on

# Invalid, tuples, opaque values, tokens: of these the number of bytes is known, zero.
_KNOWN_DTYPES = frozenset({0, 13, 14, 17, *PRIMITIVE_TYPES})


def unknown_parts(functions: Iterable[Function]) -> tuple[str, ...]:
    """In words, the operations and dtypes in `functions` that the reader does not know.

    **Returns:** one line for each, with how often it stands in the program.
    """
    opcodes: collections.Counter[str] = collections.Counter()
    dtypes: collections.Counter[int] = collections.Counter()
    for function in functions:
        for item in function.message.instructions:
            if item.opcode not in _OPCODES:
                opcodes[item.opcode] += 1
            dtypes.update(_unknown_dtypes(item.shape))
    return (
        *(
            f"operation {name} ({count} times): priced at the bytes it touches"
            for name, count in opcodes.items()
        ),
        *(
            f"arrays of dtype number {number} ({count}): their bytes are not counted"
            for number, count in dtypes.items()
        ),
    )


def _unknown_dtypes(shape: Any) -> Iterable[int]:
    if shape.tuple_shapes:
        for part in shape.tuple_shapes:
            yield from _unknown_dtypes(part)
    elif shape.element_type not in _KNOWN_DTYPES:
        yield shape.element_type
