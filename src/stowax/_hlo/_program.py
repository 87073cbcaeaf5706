"""Reading a compiled program: the front door.

`read_program` takes the serialized `HloModuleProto` of an executable, of a TPU or a
GPU, attached or compile-only, and returns a `Program`: every computation with its
instructions in the order of the compiler's schedule, with bytes, operations, source
lines and the compiler's own cycle estimates, and every copy between device and host.

What goes silently wrong: XLA drops scope names from the copies that a scan makes of its
own inputs and outputs. `jax.named_scope` around a `device_put` inside a scan body
leaves no trace in the compiled copy, on TPU and GPU alike: the copy is fused into the
scan's own dynamic slice and takes its name. A scope around the whole scan, or around an
explicit `dynamic_slice` or `dynamic_update_slice` of a host buffer in the carry, does
survive.
"""

import re

from .._records._inspection import Inspection
from .._records._program import Program, Transfer


def read_program(serialized: bytes) -> Program:
    """The program in a serialized `HloModuleProto`.

    **Arguments:** `serialized` comes from
    `executable.hlo_modules()[0].as_serialized_hlo_module_proto()` of a compiled
    program, where the module is scheduled and its memory spaces are decided.

    **Returns:** the `Program`; what cannot be reached from its entry is left out.

    **Raises:** `ArgumentError` if the bytes are no compiled module.

    >>> import jax
    >>> compiled = jax.jit(lambda x: x @ x).lower(jax.numpy.ones((64, 64))).compile()
    >>> module = compiled.runtime_executable().hlo_modules()[0]
    >>> program = read_program(module.as_serialized_hlo_module_proto())
    >>> sum(i.flops for i in program.computations[program.entry].instructions)
    524288.0
    """
    # protobuf is loaded only when a program is read
    from ._reader import read

    return read(serialized)


def transfers_named(
    program: Program | Inspection, substring: str
) -> tuple[Transfer, ...]:
    """The device-host copies that carry a scope name in their `op_name`.

    Whoever plans a copy wraps it in `jax.named_scope` and asks here whether it is in
    the compiled program, how many bytes it moves and how often. A scope name is matched
    as a whole: `stowax.offload.3` is not found in `stowax.offload.31`.

    **Arguments:** `program` is a `Program` or an `Inspection`; `substring` is a scope
    name such as `"stowax.offload.3"`, or the start of several, ending with a dot.

    >>> transfers_named(program, "stowax.offload.3")  # doctest: +SKIP
    (Transfer(direction='device-to-host', bytes=16777216, trips=6, ...),)
    """
    return tuple(
        transfer
        for transfer in program.transfers
        if transfer.direction != "host-to-host" and _names(transfer.op_name, substring)
    )


def _names(op_name: str, scope: str) -> bool:
    ends = "" if scope.endswith(".") else r"(?![\w.-])"
    return re.search(re.escape(scope) + ends, op_name) is not None
