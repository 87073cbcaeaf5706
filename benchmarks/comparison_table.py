"""The tables of `benchmarks.comparison`, written from its cells.

First what came out in all (`comparison_summary`), then every workload on every target.
"""

from typing import Any

from benchmarks import _record
from benchmarks._record import gib, seconds_text
from benchmarks.comparison_cells import Lines, cells_of, outcome_of, series
from benchmarks.comparison_summary import summary
from benchmarks.comparison_workloads import WORKLOADS


def page(records: _record.Records) -> str:
    """What came out in all, then a section per workload and target."""
    found = series(records.cells.values())
    text = [
        "# Plans against hand-written policies\n",
        records.provenance(),
        _HOW,
        summary(found),
    ]
    text += [_section(*key, own) for key, own in found.items()]
    return "\n".join(text)


_HOW = """Budgets lie evenly between the smallest that stowax says is feasible and what
the step takes as it is written, or what the chip has where that is less. *stowax* is
`stowax.plans` for all eight where `comparison.jsonl` has `made_with_cells`, and
elsewhere, in rows of the days before, `stowax.plan` for each. The policies are JAX's
and MaxText's, each layer under `jax.checkpoint`, compiled once, with the options that a
plan gets which does the same (`stowax._survey._options`: those for copies where
something is offloaded, those for TPUs always). Some programs were compiled without the
latter: on a v5p-8 those of Llama and Gemma are the same without; most of PaliGemma2's
have one fusion of two products outside of the layers, worth 1 to 2 %; on a v5p-16 the
two that offload every product. On TPUs policies that offload are there twice: a plan
lays out its own pipeline of copies and has XLA's turned off, a scan under a policy may
be better off with it. Those that offload every product make the step 1.06 (Llama2-7B on
a v5e-16) to 4.5 times that of the best policy with it, 1.3 to 5 times without; those of
PaliGemma2-28B do not compile. On GPUs plans and policies that offload have up to
sixteen copies under way; plans of Gemma2-2B up to 58.46 GiB, and plans that need the
least have the two of XLA's default. Plans are by the planner of their day, which
`comparison.jsonl` has for each. *XLA* is the step as it is written, compiled for a chip
that has the budget and no more. Bytes are per device, arguments + outputs − aliased +
temporaries as compiled; a program fits if they are within the budget and its host bytes
within what the host has for a device. (On TPUs that is more than the chip needs, by up
to a fifth, for plans and policies alike: a policy that counts more than the chip may
run there.) Seconds are simulated from the compiled schedule with the figures of
`stowax targets`, by the same reader for all; *exposed* is the part that waits for host
copies. Planning and compiling seconds are of the wall, on a machine that was doing
other things too; where a plan's programs were kept from an earlier run they are far
fewer (the `compiling_seconds` of its line say so). Neither plans nor policies have the
option that a plan's last program has on TPUs, more fast memory: plans are made with
`compiles=4`, and [another table](fast_memory.md) has what the option brings both.
"""


def _section(workload: str, target: str, lines: Lines) -> str:
    text = f"## {workload}, {target}\n\n{WORKLOADS[workload].what}"
    sizes = WORKLOADS[workload].targets.get(target, {})
    batch = f", batch {sizes['batch']}" if "batch" in sizes else ""
    half = "; parameters and moments in bfloat16" if "weights" in sizes else ""
    text += f"{batch}{half}.\n"
    end = next((line for line in lines if line["kind"] == "ends"), None)
    if end is None or "error" in end:
        text += f"\n{end['error'] if end else 'No plans yet: the policies alone.'}\n"
        return text + _policies(lines)
    text += (
        f"\nAs written {gib(end['keep_all_bytes'])} GiB of the chip's "
        f"{gib(end['chip_bytes'])}; smallest budget {gib(end['smallest_budget'])} GiB "
        f"({end['smallest_budget_is']}).\n"
    )
    if rows := [_cell_row(cell) for cell in cells_of(lines)]:
        text += "\n" + _record.table(_CELL_HEAD, rows)
    return text + _policies(lines)


def _policies(lines: Lines) -> str:
    policies = [line for line in lines if line["kind"] == "policy"]
    rows = [_policy_row(line) for line in policies]
    return "\n" + _record.table(_POLICY_HEAD, rows) if rows else ""


_CELL_HEAD = (
    "budget GiB",
    "stowax fits",
    "device",
    "host",
    "step s",
    "exposed s",
    "best by hand that fits, step s",
    "stowax / best",
    "XLA's own, GiB: step s",
    "planning s",
)


def _cell_row(cell: dict[str, Any]) -> list[str]:
    plan, best, xla = cell["plan"], cell["best"], cell["xla"]
    if "error" in plan:
        return ["", "error", *[""] * (len(_CELL_HEAD) - 2)]
    ratio = ""
    if best and plan["fits"]:
        ratio = f"{plan['step_seconds'] / best['step_seconds']:.3f}"
        ratio = f"**{ratio}**" if outcome_of(cell) == "slower" else ratio
    return [
        gib(plan["budget_bytes"]),
        "yes" if plan["fits"] else "**no**",
        gib(plan["device_bytes"]),
        gib(plan["host_bytes"]),
        seconds_text(plan["step_seconds"]),
        seconds_text(plan["exposed_seconds"]),
        f"{best['name']} {seconds_text(best['step_seconds'])}" if best else "none fits",
        ratio,
        _taken(xla) if xla else "",
        f"{plan['planning_seconds']:.0f}",
    ]


def _taken(line: dict[str, Any]) -> str:
    if "error" in line or "refused" in line:
        return "refused"
    if line.get("step_seconds") is None:
        needed = line["device_bytes"]
        return f"does not compile ({gib(needed)})" if needed else "does not compile"
    return f"{gib(line['device_bytes'])}: {seconds_text(line['step_seconds'])}"


_POLICY_HEAD = (
    "policy",
    "device GiB",
    "host",
    "step s",
    "exposed s",
    "arithmetic on the host",
    "compiling s",
)


def _policy_row(line: dict[str, Any]) -> list[str]:
    blank = [""] * (len(_POLICY_HEAD) - 2)
    if "error" in line or "refused" in line:
        why = (line.get("error") or line["refused"]).splitlines()[0]
        return [line["name"], f"refused: {why:.80}", *blank]
    if line.get("step_seconds") is None:
        needed = line["device_bytes"]
        return [
            line["name"],
            f"beyond the chip{f': {gib(needed)}' if needed else ''}",
            *blank,
        ]
    return [
        line["name"],
        gib(line["device_bytes"]),
        gib(line["host_bytes"]),
        seconds_text(line["step_seconds"]),
        seconds_text(line["exposed_seconds"]),
        str(line["host_computations"]),
        f"{line['compiling_seconds']:.0f}",
    ]
