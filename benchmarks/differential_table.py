"""What a campaign of random programs found, as tables: by feature, and by failure.

A record has a seed, the features of its program, and verdicts: one on the CPU, or one
per target and budget.
"""

import collections
import html
from typing import Any

from benchmarks import _record

OUTCOMES = ("planned", "as written", "refused", "wrong", "foreign", "same error")
FAULTS = ("wrong", "foreign")


def outcomes(records: list[dict[str, Any]]) -> collections.Counter:
    """How many verdicts of each kind there are."""
    return collections.Counter(v["outcome"] for r in records for v in r["verdicts"])


def has_faults(records: list[dict[str, Any]]) -> bool:
    """Whether anything is wrong or foreign."""
    return any(outcomes(records)[name] for name in FAULTS)


def one_line(records: list[dict[str, Any]]) -> str:
    """The state of a campaign."""
    found = outcomes(records)
    told = ", ".join(f"{found[name]} {name}" for name in OUTCOMES)
    return f"{len(records)} programs, {sum(found.values())} plans: {told}"


def classes(
    records: list[dict[str, Any]], wanted: tuple[str, ...]
) -> list[tuple[str, str, list[int], str]]:
    """`(outcome, kind, seeds, message)` of what failed alike, most frequent first."""
    found: dict[tuple[str, str], tuple[list[int], str]] = {}
    for record in records:
        for verdict in record["verdicts"]:
            if verdict["outcome"] in wanted:
                key = (verdict["outcome"], verdict["kind"])
                seeds, _ = found.setdefault(key, ([], verdict["message"]))
                if record["seed"] not in seeds:
                    seeds.append(record["seed"])
    alike = [(*key, sorted(seeds), text) for key, (seeds, text) in found.items()]
    return sorted(alike, key=lambda one: (-len(one[2]), one[0], one[1]))


def figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a run: outcomes, and every class of failures with its seeds.

    Paths in messages begin in the checkout.
    """
    root = str(_record.ROOT) + "/"
    found = outcomes(records)
    return {
        "programs": len(records),
        "plans": found.total(),
        "outcomes": {name: found[name] for name in OUTCOMES},
        "failures": [
            {
                "outcome": outcome,
                "kind": kind,
                "seeds": seeds,
                "message": message.replace(root, ""),
            }
            for outcome, kind, seeds, message in classes(records, (*FAULTS, "refused"))
        ],
    }


def common(records: list[dict[str, Any]], seeds: list[int]) -> str:
    """Features that these programs have much more often than the others, or nothing."""
    chosen = [r["features"] for r in records if r["seed"] in seeds]
    total = collections.Counter(f for r in records for f in set(r["features"]))
    here = collections.Counter(f for features in chosen for f in set(features))
    if len(chosen) < 2:
        return ""
    share = lambda f: here[f] / len(chosen)
    lift = lambda f: share(f) * len(records) / total[f]
    told = [f for f in here if share(f) >= 0.5 and lift(f) > 1.5]
    told.sort(key=lambda f: (-share(f) * lift(f), f))
    return ", ".join(f"{f} ({share(f):.0%})" for f in told[:4])


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")


def _by_class(records: list[dict[str, Any]], wanted: tuple[str, ...]) -> str:
    rows = [
        "| programs | outcome | what | mostly with | seeds |",
        "|--:|---|---|---|---|",
    ]
    for outcome, kind, seeds, _ in classes(records, wanted):
        named = " ".join(map(str, seeds))
        told = _cell(common(records, seeds))
        rows.append(f"| {len(seeds)} | {outcome} | {_cell(kind)} | {told} | {named} |")
    return "\n".join(rows) if len(rows) > 2 else "None."


def _by_feature(records: list[dict[str, Any]]) -> str:
    rows: dict[str, collections.Counter] = {}
    for record in records:
        for verdict in record["verdicts"]:
            moved = (f"moved: {part}" for part in verdict["moved"])
            held = set(record["features"]).difference(verdict.get("dropped", ()))
            for feature in {*held, *moved}:
                rows.setdefault(feature, collections.Counter())[verdict["outcome"]] += 1
    head = "| feature | tried | " + " | ".join(OUTCOMES) + " |"
    lines = [head, "|---" + "|--:" * (len(OUTCOMES) + 1) + "|"]
    for feature in sorted(rows):
        cells = [sum(rows[feature].values()), *(rows[feature][o] for o in OUTCOMES)]
        lines.append(f"| {_cell(feature)} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _counted(texts: Any) -> str:
    found = collections.Counter(texts).most_common(20)
    return "\n".join(f"- {n} × {_cell(text)}" for text, n in found) or "None."


def table(records: list[dict[str, Any]], provenance: str, targets: str = "") -> str:
    """The page: outcomes, failures by class, refusals by class, outcomes by feature.

    **Arguments:** `targets` are those that the programs were compiled for, if they were
    not run.
    """
    found = outcomes(records)
    total = sum(found.values()) or 1
    summary = "\n".join(
        f"| {name} | {found[name]} | {found[name] / total:.1%} |" for name in OUTCOMES
    )
    every = [verdict for record in records for verdict in record["verdicts"]]
    left = _counted(text for verdict in every for text in verdict.get("left", ()))
    warnings = _counted(text for verdict in every for text in verdict.get("warned", ()))
    kind = "differential_compiled" if targets else "differential"
    return (
        (_record.PAGES / f"{kind}.md")
        .read_text()
        .format(
            targets=targets,
            made=provenance.rstrip("\n"),
            programs=len(records),
            plans=len(every),
            summary=summary,
            faults=_by_class(records, FAULTS),
            refused=_by_class(records, ("refused",)),
            left=left,
            warnings=warnings,
            features=_by_feature(records),
        )
    )
