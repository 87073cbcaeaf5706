"""The table of `benchmarks.budgets`, written from its cells: broken bars first."""

from typing import Any

from benchmarks import _record
from benchmarks._record import gib

AFTER, BEFORE = 0.05, 0.25
"""Bars on the prediction: compiled over predicted, after the loop and before it."""
SLOWER = 1e-4
"""A plan this much slower than a baseline under the same model counts as slower: the
solver's own tolerance."""


def broken_bars(line: dict[str, Any]) -> list[str]:
    """What a cell does not reach, in words; empty where all is well."""
    if "error" in line:
        return [f"error: {line['error'].splitlines()[0]:.160}"]
    found = []
    compiled, budget = line["compiled_bytes"], line["budget_bytes"]
    if line["fits"] and compiled > budget:
        found.append(f"says it fits, and takes {gib(compiled)} of {gib(budget)} GiB")
    if not line["fits"]:
        found.append(f"does not fit: {gib(compiled)} of {gib(budget)} GiB")
    verified = line.get("verified_bytes")
    if verified is not None and verified > budget:
        found.append(f"compiled again it takes {gib(verified)} of {gib(budget)} GiB")
    if abs(line["error_after"]) > AFTER:
        found.append(f"prediction after the loop off by {line['error_after']:+.1%}")
    if abs(line["error_before"]) > BEFORE:
        found.append(f"first prediction off by {line['error_before']:+.1%}")
    best = line["best_baseline_seconds"]
    if best is not None and line["model_seconds"] > best * (1 + SLOWER):
        slower = line["model_seconds"] / best - 1
        found.append(f"{slower:.1%} slower than {line['best_baseline']}")
    if line["compiles"] > 4:
        found.append(f"{line['compiles']} compiles")
    return found


def foretold_error(line: dict[str, Any]) -> float:
    """Compiled over predicted, less one, of the plan's program before its compile."""
    own = [t for t in line["trials"] if t[1] == line["compiled_bytes"]]
    predicted, compiled, _ = own[-1]
    return compiled / predicted - 1


def page(records: _record.Records) -> str:
    """The table: what is broken first, then series by series."""
    lines = list(records.cells.values())
    cells = [line for line in lines if line["cell"] != "ends"]
    ends = [line for line in lines if line["cell"] == "ends"]
    series = "\n".join(_sections(cells, ends))
    return _record.page_text(records, summary=_summary(cells, ends), series=series)


def _summary(cells: list[dict[str, Any]], ends: list[dict[str, Any]]) -> str:
    whole = [line for line in cells if "error" not in line]
    broken = [(line, bar) for line in cells for bar in broken_bars(line)]
    broken += [(line, broken_bars(line)[0]) for line in ends if "error" in line]
    fit = sum(line["fits"] for line in whole)
    kept = sum(
        line["fits"] and line["compiled_bytes"] <= line["budget_bytes"]
        for line in whole
    )
    foretold = sum(abs(foretold_error(c)) <= AFTER for c in whole)
    clean = sum(not broken_bars(line) for line in cells)
    offloading = sum(line["decisions"]["offload"] > 0 for line in whole)
    text = (
        f"**{len(cells)} cells; {fit} fit, {kept} of these within the budget as "
        f"compiled; {clean} reach every bar.** Worst prediction after the loop "
        f"{max((abs(c['error_after']) for c in whole), default=0):.1%}, before "
        f"{max((abs(c['error_before']) for c in whole), default=0):.1%}; just before "
        f"it was compiled the plan's own program was foretold within {AFTER:.0%} in "
        f"{foretold} cells. "
        f"{offloading} plans offload something.\n"
    )
    if not broken:
        return text + "\nNo bar is broken.\n"
    lines = [
        f"- {line['target']} {line['model']}, cell {line['cell']} "
        f"(effort {line['effort']}): {bar}"
        for line, bar in broken
    ]
    return text + "\nBars that are broken:\n\n" + "\n".join(lines) + "\n"


def _sections(cells: list[dict[str, Any]], ends: list[dict[str, Any]]) -> list[str]:
    text = []
    for end in ends:
        series = ("target", "effort", "model")
        own = [c for c in cells if all(c[k] == end[k] for k in series)]
        if "error" in end or not own:
            continue
        text.append(
            f"## {end['target']}, {end['model']} (effort {end['effort']})\n\n"
            f"As written {gib(end['keep_all_bytes'])} GiB, of which arguments "
            f"{gib(end['state_bytes'])}; smallest budget {gib(end['smallest_budget'])} "
            "GiB.\n"
        )
        whole = [c for c in own if "error" not in c]  # errors are listed above
        whole.sort(key=lambda c: c["cell"])
        text.append(_record.columns(_COLUMNS, whole))
    return text


_COLUMNS = {
    "cell": lambda c: c["cell"],
    "budget GiB": lambda c: gib(c["budget_bytes"]),
    "fits": lambda c: "yes" if c["fits"] else "**no**",
    "outcome": lambda c: c["outcome"],
    "compiled": lambda c: gib(c["compiled_bytes"]),
    "again": lambda c: "" if c["verified_bytes"] is None else gib(c["verified_bytes"]),
    "host": lambda c: gib(c["host_bytes"]),
    "first predicted": lambda c: gib(c["first_predicted_bytes"]),
    "predicted": lambda c: gib(c["predicted_bytes"]),
    "error first / just before / after": lambda c: " / ".join(
        f"{error:+.1%}"
        for error in (c["error_before"], foretold_error(c), c["error_after"])
    ),
    "keep / offload / recompute": lambda c: " / ".join(
        map(str, c["decisions"].values())
    ),
    "model ms": lambda c: f"{1e3 * c['model_seconds']:.1f}",
    "simulated ms": lambda c: (
        "–" if c["effort"] == "low" else f"{1e3 * c['simulated_seconds']:.1f}"
    ),
    "best baseline that fits, ms": lambda c: (
        f"{c['best_baseline']} {1e3 * c['best_baseline_seconds']:.1f}"
        if c["best_baseline"]
        else "none"
    ),
    "compiles": lambda c: c["compiles"],
    "planning s (CPU s)": lambda c: f"{c['wall_seconds']:.0f} ({c['cpu_seconds']:.0f})",
}
