"""What a compiled program has the host's processor compute: whose work, how many bytes.

Plans may have part of an update done there; then it stands in a named scope of ours
(`update_scope`). All else that is there was moved by the compiler, unasked: a hazard.
`_simulate` asks for the bytes, `_hazards` and `_trial` whose work it is. Knows no JAX.
"""

import re
from collections.abc import Iterable, Sequence

from .._records._program import Instruction, Program

_SCOPE = re.compile(r"stowax\.update_on_host((?:\.\d+)+)")
_INSIDE = re.compile(_SCOPE.pattern + "/compute_on/")
_SLICES = ("slice", "dynamic-slice")


def update_scope(leaves: Sequence[int]) -> str:
    """Named scope of a planned update of these leaves, flat inputs of the step."""
    return ".".join(["stowax.update_on_host", *map(str, leaves)])


def work_on_host(program: Program, names: Iterable[str]) -> list[Instruction]:
    """The instructions of computations and of those that they call in turn."""
    found: list[Instruction] = []
    for name in names:
        for item in program.computations[name].instructions:
            found += work_on_host(program, item.called) if item.called else [item]
    return found


def is_planned(work: Sequence[Instruction]) -> bool:
    """Whether all arithmetic among `work` is that of planned updates."""
    named = [item for item in work if item.op_name and item.bytes_accessed > 0]
    return bool(named) and all(_SCOPE.search(item.op_name) for item in named)


def leaves_in_scope(op_name: str) -> frozenset[int]:
    """The leaves of the planned updates that an operation belongs to."""
    found = _SCOPE.findall(op_name)
    return frozenset(int(n) for numbers in found for n in numbers[1:].split("."))


def is_inside_update(scope: str) -> bool:
    """Whether an operation of a lowered program is part of a planned update's work.

    By its scope: where a program has been partitioned, the call is no longer there.
    """
    return bool(_INSIDE.search(scope))


def updated_leaves(program: Program) -> frozenset[int]:
    """The leaves whose planned update the program does on the host's processor."""
    return frozenset(
        leaf
        for computation in program.computations.values()
        if computation.execution_thread
        for item in computation.instructions
        for leaf in leaves_in_scope(item.op_name)
    )


def host_call_bytes(program: Program, item: Instruction) -> int:
    """Bytes that the host reads and writes for a call.

    One loop per result, as XLA's CPU compiler makes them: it writes the result, and
    reads what that is made of, other results or what comes in. `_update._host` counts
    alike before anything is compiled.
    """
    called = [program.computations[name] for name in item.called]
    if len(called) != 1:
        return item.bytes_accessed
    inner = called[0].instructions
    if len(calls := [part for part in inner if part.called]) == 1:
        return host_call_bytes(program, calls[0])
    made = {part.name: part for part in inner}
    root = inner[-1]
    results = set(root.operands if root.opcode == "tuple" else [root.name])
    total = 0
    for result in results:
        if made[result].opcode == "parameter":
            continue
        read: dict[str, int] = {}
        waiting = [*made[result].operands]
        while waiting:
            part = made[waiting.pop()]
            if part.name in read:
                continue
            ends = part.name in results or part.opcode in ("parameter", *_SLICES)
            read[part.name] = part.result_bytes if ends else 0
            waiting += () if ends else part.operands
        total += made[result].result_bytes + sum(read.values())
    return total
