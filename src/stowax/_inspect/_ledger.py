"""The ledger of copies: what each costs, whom it serves, and whether all are there.

A compiled program's `Transfer`s say what moves. Here they get seconds from the
simulated timeline and, where the program was made by a plan, the candidate that they
serve: the plan's copies stand under named scopes. `copies_of` sets what the plan wanted
beside what the program does. No JAX in here.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from .._records._plan import DecisionRecord, PlanRecord
from .._records._program import CopyCheck, Transfer
from .._records._stages import Link
from .._records._timeline import Timeline

_SCOPE = re.compile(
    r"stowax\.(?:(?P<value>offload|fetch)\.(?P<stack>.+?)\.(?P<number>\d+)"
    r"|(?P<state>state|gradient)\.(?P<leaf>\d+)"
    r"|(?P<layers>weights|gradients)\.(?P<of>.+?)\.(?P<input>\d+))(?![\w.-])"
)


def priced(
    transfers: Iterable[Transfer], timeline: Timeline, link: Link
) -> tuple[Transfer, ...]:
    """The transfers with seconds per step, on the link and waited for.

    A copy within host memory crosses the link twice, out and back.
    """
    waits: dict[str, float] = collections.defaultdict(float)
    for interval in timeline.intervals:
        if interval.waits:
            waits[interval.name] += interval.seconds
    found = []
    for transfer in transfers:
        out = transfer.total_bytes / link.device_to_host
        into = transfer.total_bytes / link.host_to_device
        seconds = {
            "device-to-host": out,
            "host-to-device": into,
            "host-to-host": out + into,
        }[transfer.direction]
        found.append(
            dataclasses.replace(
                transfer, seconds=seconds, exposed_seconds=waits[transfer.done]
            )
        )
    return tuple(found)


def serving(transfers: Iterable[Transfer], plan: PlanRecord) -> tuple[Transfer, ...]:
    """The transfers with the names of the plan's candidates that they serve."""
    names = {(d.stack, d.value): d.name for d in plan.decisions}
    paths = [argument.path for argument in plan.program.arguments]

    def name_of(transfer: Transfer) -> str:
        found = _SCOPE.search(transfer.op_name)
        if found is None:
            return ""
        if found["value"]:
            number = int(found["number"])
            return names.get((found["stack"], number), f"value {number}")
        if found["state"]:
            leaf = int(found["leaf"])
            path = paths[leaf] if leaf < len(paths) else f"argument {leaf}"
            return path if found["state"] == "state" else f"gradient of {path}"
        return f"{found['layers']} of {found['of']}, input {found['input']}"

    return tuple(dataclasses.replace(t, serves=name_of(t)) for t in transfers)


def copies_of(transfers: Sequence[Transfer], plan: PlanRecord) -> tuple[CopyCheck, ...]:
    """What a plan offloads, beside the copies of it that the program makes.

    What the host's processor updates makes none, and is left out.
    """
    updated = {a.path for a in plan.program.arguments if a.on_host}
    # Values of two stacks may have one name: what moves for each has its own scope.
    moved: dict[object, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for transfer in transfers:
        found = _SCOPE.search(transfer.op_name)
        if found is not None and found["value"]:
            key = found["stack"], int(found["number"])
        else:
            key = transfer.serves
        moved[key][transfer.direction] += transfer.total_bytes
    checks = []
    for decision in plan.decisions:
        if decision.decision != "offload" or decision.role == "parameter":
            continue
        arguments = _arguments_of(decision, plan)
        if not updated.isdisjoint(arguments):
            continue
        ways: collections.Counter[str] = collections.Counter()
        for key in arguments or [(decision.stack, decision.value)]:
            ways.update(moved.get(key, {}))
        checks.append(
            CopyCheck(
                name=decision.name,
                planned_bytes=decision.bytes * decision.count,
                out_bytes=ways["device-to-host"],
                in_bytes=ways["host-to-device"],
            )
        )
    return tuple(checks)


def _arguments_of(decision: DecisionRecord, plan: PlanRecord) -> list[str]:
    """The arguments that a value of the step's state stands for."""
    pattern = re.escape(decision.name).replace(r"\*", r"\d+")
    return [a.path for a in plan.program.arguments if re.fullmatch(pattern, a.path)]
