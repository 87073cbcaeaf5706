"""Tables and plots of `benchmarks.comparison`, written from its cells.

A cell is a budget of a workload on a target: stowax's plan there against the fastest
hand-written policy that fits it, XLA's own rematerialization included. Cells that are
lost come first, each with what can be read off the lines about it.
"""

import collections
import math
import pathlib
from typing import Any

from benchmarks import _record, comparison_plots
from benchmarks._record import gib
from benchmarks.comparison_workloads import WORKLOADS

COMMAND = "python -m benchmarks.comparison"
FULL_RECOMPUTE = "nothing_saveable"
EVEN = 1e-4
"""Steps within this share of one another count as equally fast: the seconds are read
off schedules, and two compiles of one program may differ by a few instructions."""

_IN_THE_MODEL = {
    "everything_saveable": "keep all",
    FULL_RECOMPUTE: "recompute all",
    "layer input offloaded": "offload layer inputs",
}
"""What a plan's own baselines are called."""

Lines = list[dict[str, Any]]


def fits(line: dict[str, Any], budget: int, host_bytes: int) -> bool:
    """Whether a compiled program stays within both budgets."""
    if "error" in line or line.get("step_seconds") is None:
        return False
    return line["device_bytes"] <= budget and line["host_bytes"] <= host_bytes


def series(lines: Lines) -> dict[tuple[str, str], Lines]:
    """Lines by workload and target; the last line of a cell counts."""
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        key = (line["workload"], line["target"], line["kind"])
        latest[(*key, line["name"], line["cell"])] = line
    found = collections.defaultdict(list)
    order = list(WORKLOADS)
    for line in sorted(latest.values(), key=lambda n: order.index(n["workload"])):
        found[line["workload"], line["target"]].append(line)
    return dict(found)


def cells_of(lines: Lines) -> list[dict[str, Any]]:
    """One record per budget that was planned for: the plan, and the best by hand."""
    end = next((line for line in lines if line["kind"] == "ends"), None)
    if end is None or "error" in end:
        return []
    allowed = end["host_bytes_allowed"]
    policies = [line for line in lines if line["kind"] == "policy"]
    found = []
    for plan in sorted(
        (line for line in lines if line["kind"] == "plan"), key=lambda n: n["cell"]
    ):
        budget = plan.get("budget_bytes")
        if budget is None:
            found.append({"plan": plan, "best": None, "full": None, "xla": None})
            continue
        # What does not compile for a large chip is not tried for a smaller one.
        xla = next(
            (
                n
                for n in lines
                if n["kind"] == "xla"
                and (
                    n["cell"] == plan["cell"]
                    or (n["cell"] > plan["cell"] and n.get("step_seconds") is None)
                )
            ),
            None,
        )
        rivals = [
            line
            for line in (*policies, *([xla] if xla else []))
            if fits(line, budget, allowed)
        ]
        best = min(rivals, key=lambda line: line["step_seconds"], default=None)
        full = next((n for n in rivals if n["name"] == FULL_RECOMPUTE), None)
        found.append({"plan": plan, "best": best, "full": full, "xla": xla})
    return found


def outcome_of(cell: dict[str, Any]) -> str:
    """`faster`, `even`, `slower`, `alone`, `neither` or `error`."""
    plan, best = cell["plan"], cell["best"]
    if "error" in plan:
        return "error"
    if not plan["fits"]:
        return "slower" if best else "neither"
    if best is None:
        return "alone"
    ratio = plan["step_seconds"] / best["step_seconds"]
    if abs(ratio - 1) <= EVEN:
        return "even"
    return "faster" if ratio < 1 else "slower"


def reason(cell: dict[str, Any]) -> str:
    """What the lines say about why a cell was lost."""
    plan, best = cell["plan"], cell["best"]
    if not plan["fits"]:
        return f"the plan needs {gib(plan['device_bytes'])} GiB as compiled"
    known = {b[0]: b for b in plan["baselines"]}
    other = known.get(_IN_THE_MODEL.get(best["name"], best["name"]))
    model = f"the planner's model has the plan at {_seconds(plan['model_seconds'])} s"
    if other is not None:
        _, device, _, seconds, fitting = other
        model += f" and the policy at {_seconds(seconds)} s in {gib(device)} GiB"
        model += "" if fitting else ", which it takes for too much"
    parts = [model]
    exposed = plan["exposed_seconds"] - best["exposed_seconds"]
    parts.append(
        f"waiting for copies {exposed:+.3g} s, all else "
        f"{plan['step_seconds'] - best['step_seconds'] - exposed:+.3g} s"
    )
    return "; ".join(parts)


def write(path: pathlib.Path) -> None:
    """Writes the table and the plots beside `path`."""
    lines = _record.read_lines(path)
    if not lines:
        return
    found = series(lines)
    text = [
        "# Plans against hand-written policies\n",
        _record.provenance_text(COMMAND, dates=[line["date"] for line in lines]),
        _HOW,
        _summary(found),
    ]
    for (workload, target), own in found.items():
        plot = comparison_plots.write(path, workload, target, own, cells_of(own))
        text.append(_section(workload, target, own, plot))
    path.with_suffix(".md").write_text("\n".join(text))


_HOW = """Budgets lie evenly between the smallest that stowax says is feasible and
what the step takes as it is written, or what the chip has where that is less. *stowax*
is `stowax.plan` for that budget; the policies are JAX's and MaxText's, each layer under
`jax.checkpoint`, compiled once, with the options that a plan gets which does the same
(`stowax._survey._options`: those for copies where something is offloaded, those for
TPUs always). Some programs were compiled without the latter: on a v5p-8 those of Llama
and Gemma are the same without; most of PaliGemma2's have one fusion of two products
outside of the layers, worth 1 to 2 %; on a v5p-16 the two that offload every product.
On GPUs plans and policies that offload have up to sixteen copies under way; plans of
Llama2-13B at 79.45 GiB and above, of ViT-g at 91.51 and 105.75 and of Gemma2-2B up to
58.46, and plans that need the least have the two of XLA's default. Only plans of
Llama2-7B below 80 GiB and Llama2-13B from 26 to 67 on eight H200, of Llama2-70B at
48.66 GiB, and on a v5p-8 of Gemma2-9B at 13, 60 and 72, of Gemma2-27B at 74.11, of
PaliGemma2-3B and 10B between 40 and 63 GiB are of the version that may run layers as
two parts.
*XLA* is the step as it is written, compiled for a chip that has the budget and no more.
Bytes are per device,
arguments + outputs − aliased + temporaries as compiled; a program fits if they are
within the budget and its host bytes within what the host has for a device. (On TPUs
that is more than the chip needs, by up to a fifth, for plans and policies alike: a
policy that counts more than the chip may run there.) Seconds are simulated from the
compiled schedule with the figures of `stowax targets`, by the same reader for all;
*exposed* is the part that waits for host copies. Planning and compiling seconds are of
the wall, on a machine that was doing other things too.
"""


def _summary(found: dict[tuple[str, str], Lines]) -> str:
    counted: dict[tuple[str, str], collections.Counter[str]] = {}
    lost, ratios, smallest = [], [], []
    for key, lines in found.items():
        cells = cells_of(lines)
        counted[key] = collections.Counter(map(outcome_of, cells))
        for cell in cells:
            if outcome_of(cell) in ("slower", "error"):
                lost.append(_lost(key, cell))
            if cell["full"] and outcome_of(cell) != "error" and cell["plan"]["fits"]:
                full = cell["full"]["step_seconds"]
                ratios.append(cell["plan"]["step_seconds"] / full)
        smallest.append(counted[key]["alone"] > 0)
    total = sum(counted.values(), collections.Counter())
    head = ("workload", "target", *_OUTCOMES)
    rows = [
        (w, t, *(count[name] for name in _OUTCOMES))
        for (w, t), count in counted.items()
    ]
    text = (
        f"**{sum(total.values())} cells: stowax is faster in {total['faster']}, as "
        f"fast in {total['even']}, slower in {total['slower']}; in {total['alone']} "
        "only stowax's plan fits, in "
        f"{total['neither']} nothing does.** "
    )
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text += (
            f"Against full recomputation, where both fit: {mean:.3f} × its step "
            f"(geometric mean of {len(ratios)} cells). "
        )
    text += (
        f"{sum(smallest)} of {len(smallest)} workloads have a budget that only "
        "stowax's plan meets.\n\n" + _record.table(head, rows)
    )
    if lost:
        text += "\nCells that are lost:\n\n" + "\n".join(lost) + "\n"
    return text


_OUTCOMES = ("faster", "even", "slower", "alone", "neither", "error")


def _lost(key: tuple[str, str], cell: dict[str, Any]) -> str:
    plan, best = cell["plan"], cell["best"]
    where = f"- {key[0]}, {key[1]}, cell {plan['cell']}"
    if "error" in plan:
        return f"{where}: {plan['error'].splitlines()[0]:.200}"
    ratio = (
        f"{plan['step_seconds'] / best['step_seconds'] - 1:+.1%} beside {best['name']}"
        if plan["fits"]
        else f"does not fit, and {best['name']} does"
    )
    return f"{where} ({gib(plan['budget_bytes'])} GiB): {ratio}; {reason(cell)}"


def _section(workload: str, target: str, lines: Lines, plot: str | None) -> str:
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
    if plot:
        text += f"\n![step time by budget]({plot})\n"
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
        _seconds(plan["step_seconds"]),
        _seconds(plan["exposed_seconds"]),
        f"{best['name']} {_seconds(best['step_seconds'])}" if best else "none fits",
        ratio,
        _taken(xla) if xla else "",
        f"{plan['planning_seconds']:.0f}",
    ]


def _seconds(count: float) -> str:
    """Three decimals, or three digits of what is small."""
    return f"{count:.3f}" if count >= 0.1 or not count else f"{count:.3g}"


def _taken(line: dict[str, Any]) -> str:
    if "error" in line or "refused" in line:
        return "refused"
    if line.get("step_seconds") is None:
        needed = line["device_bytes"]
        return f"does not compile ({gib(needed)})" if needed else "does not compile"
    return f"{gib(line['device_bytes'])}: {_seconds(line['step_seconds'])}"


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
        _seconds(line["step_seconds"]),
        _seconds(line["exposed_seconds"]),
        str(line["host_computations"]),
        f"{line['compiling_seconds']:.0f}",
    ]
