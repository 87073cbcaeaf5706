"""The page of `benchmarks.simulation`: figures by hand beside simulated ones."""

from collections.abc import Sequence
from typing import Any

from benchmarks import _record
from benchmarks._record import gib

BAR = 0.03
"""How far a step's seconds may lie apart."""

Pairs = Sequence[tuple[Any, dict[str, Any]]]
"""Each a `simulation.Case` and what `simulation.simulated` found for it."""

_HEAD = (
    "program",
    "link GB/s",
    "compute s: by hand",
    "simulated",
    "exposed s: by hand",
    "simulated",
    "step s: by hand",
    "simulated",
    "difference",
    "device GiB: by hand",
    "compiled",
)


def rows(pairs: Pairs) -> list[list[str]]:
    """The table's rows, one per program and link."""
    lines = []
    for case, record in pairs:
        for link in record["links"]:
            compute, exposed = case.seconds[link["rate"]]
            lines.append(
                [
                    case.name,
                    f"{link['rate'] / 1e9:g}",
                    f"{compute:.2f}",
                    f"{link['compute_seconds']:.2f}",
                    f"{exposed:.2f}",
                    f"{link['exposed_seconds']:.2f}",
                    f"{compute + exposed:.2f}",
                    f"{link['compute_seconds'] + link['exposed_seconds']:.2f}",
                    _percent(difference(case, link)),
                    f"{case.device_gib:.1f}",
                    gib(record["device_bytes"]),
                ]
            )
    return lines


def difference(case: Any, link: dict[str, float]) -> float:
    """Of the step's seconds, simulated against by hand, as a fraction."""
    by_hand = sum(case.seconds[link["rate"]])
    return (link["compute_seconds"] + link["exposed_seconds"]) / by_hand - 1


def _percent(fraction: float) -> str:
    text = f"{fraction:+.1%}"
    return text if abs(fraction) <= BAR else f"**{text}**"


def text(pairs: Pairs, provenance: str) -> str:
    """The whole page."""
    links = [(case, link) for case, record in pairs for link in record["links"]]
    over = [
        f"{case.name} at {link['rate'] / 1e9:g} GB/s"
        for case, link in links
        if abs(difference(case, link)) > BAR
    ]
    waits = [link["collective_wait_seconds"] for _, link in links]
    parts = [
        "# Simulated against worked out by hand\n",
        provenance,
        _INTRODUCTION,
        f"Beyond {BAR:.0%}: {', '.join(over)}.\n" if over else _WITHIN,
        _record.table(_HEAD, rows(pairs)),
        f"The simulator adds up to {max(waits, default=0.0):.2f} s of collectives "
        "that the compiler gives no estimate for, at their bytes over the "
        "interconnect; by hand they were left out, and they are not in the table.\n",
        "## Trips and bytes\n",
        _COPIES,
        _copies(pairs),
    ]
    if hidden := _hidden(pairs):
        parts += ["## What hides the copies\n", _WINDOWS, hidden]
    return "\n".join(parts)


def _copies(pairs: Pairs) -> str:
    head = ("program", "trips of the loops", "needed GiB", "out", "in")
    lines = [
        [
            case.name,
            ", ".join(map(str, record["trips"])),
            gib(record["needed_bytes"]),
            gib(record["moved_bytes"]["device-to-host"]),
            gib(record["moved_bytes"]["host-to-device"]),
        ]
        for case, record in pairs
    ]
    return _record.table(head, lines)


def _hidden(pairs: Pairs) -> str:
    lines = []
    for case, record in pairs:
        for row in record.get("windows", ()):
            for rate in case.seconds:
                copying = row["bytes"] / rate
                exposed = max(0.0, copying - row["work_seconds"])
                lines.append(
                    [
                        case.name,
                        row["direction"],
                        f"{rate / 1e9:g}",
                        f"{row['trips']:g}",
                        f"{copying * 1e3:.1f}",
                        f"{row['work_seconds'] * 1e3:.1f}",
                        f"{exposed * row['trips']:.2f}",
                    ]
                )
    head = (
        "program",
        "loop",
        "link GB/s",
        "trips",
        "copies ms",
        "work ms",
        "exposed s",
    )
    return _record.table(head, lines) if lines else ""


_WITHIN = f"All steps are within {BAR:.0%}.\n"
_INTRODUCTION = """\
Loss and gradients of Llama2-13B on a v5p-8: 40 layers, 32 × 2048 tokens, 4 chips
(FSDP), plain attention with float32 scores, JAX's own checkpoint policies. *By hand* is
what was read off compiled schedules before there was a simulator: the compiler's cycle
estimates over 1.75 GHz in the order of the schedule, loop bodies times trips, one host
link. The programs were written anew from their description. What that leaves open was
chosen so that the work agrees: scores that are float32 and not rounded in between, q
and k named before the rotary embedding, `prevent_cse` off. The last two columns say how
far the programs are the same. Two more programs of those days followed the first plans
of a planner; which values those stored was not written down, so they cannot be compiled
again.
"""
_WINDOWS = """\
Per trip of each loop: the time that its copies take, and the work that the compiler has
put between the start of the first and the end of the last. What is left over is waited
for. That can be checked by hand, and is where the exposed seconds above come from: they
say where the scheduler puts its waits, and small differences in a program, such as
`prevent_cse`, move those. The simulator has a little less waiting than this reckoning:
the time that its collectives take hides some of it.
"""
_COPIES = """\
What the schedule's copies move per step and chip, trips counted, against what the
policy names: each name once out and once back. Where copies are in flight across
iterations, the compiler has peeled some of them off the loops.
"""
