"""What each rule of the search is worth: plans with it and without, cell by cell.

Eleven training steps on an H200 and a TPU, four budgets each, planned as it is and with
one rule left out at a time. Each variant is a replacement of one of the search's own
functions, in this process alone: the product has no switch for it. Programs are kept by
content (`.ablation/`, which git ignores), so that a variant compiles what only it
proposes, and a replay reads all the others.

    python -m benchmarks ablation --target h200 --variant "as it is"

Seconds are simulated from the compiled schedule: ratios between variants say what a
rule brings, and nothing of a chip's own seconds.
"""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import stowax
from benchmarks import _record, budgets, comparison_workloads
from benchmarks._record import Stopwatch, cell_name, say
from benchmarks.models import mixtral, scan_transformer, vision

FOLDER = pathlib.Path(__file__).resolve().parent.parent / ".ablation"
TARGETS = ("h200", "v6e-8")
PARTS = (0.75, 0.45, 0.2, 0.04)
"""Budgets, from the smallest that works (0) to what keeping everything takes (1)."""
BASE = "as it is"
COMPILES = 4
"""So many programs are what a plan takes by itself, without the last one on a TPU."""

Line = dict[str, Any]
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _long_context(target: Any) -> Made:
    del target
    sizes = dataclasses.replace(budgets.SIZES, sequence=8192, batch=4, layers=6)
    return scan_transformer.sized(sizes)


def _model(name: str) -> Callable[[Any], Made]:
    return lambda target: budgets.step_of(name)


def _published(name: str, **options: Any) -> Callable[[Any], Made]:
    return lambda target: comparison_workloads.WORKLOADS[name].make(target, **options)


WORKLOADS: dict[str, Callable[[Any], Made]] = {
    "scanned transformer": _model("scan_transformer"),
    "unrolled transformer": _model("loop_transformer"),
    "encoder-decoder": _model("encoder_decoder"),
    "NNX, a Python loop": _model("nnx_loop"),
    "long context": _long_context,
    "mixture of experts": lambda target: mixtral.mixtral_8x7b(
        target, layers=4, batch=8, **comparison_workloads.HALF
    ),
    "ViT": lambda target: vision.vit_g(target, layers=8, batch=256),
    "Llama2-7B": _published("llama2-7b", batch=8, **comparison_workloads.HALF),
    "PaliGemma2-3B": _published("paligemma2-3b"),
    "tutorial's Adam": _published("tutorial-adam"),
    "tutorial's layers": _published("tutorial-layers"),
}


def _same(first: Any, *_: Any, **__: Any) -> Any:
    return first


def _found(_: Any, found: Any, *__: Any) -> Any:
    return found


def _no_parts(*_: Any) -> tuple[int, dict[str, Any]]:
    return 0, {}


def _none(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def _zero(*_: Any) -> int:
    return 0


def _no_blocks(rolled: Any, _: Any) -> tuple[Any, int]:
    return rolled.survey.options, 0


def _plain(_: Any, chosen: Any, *__: Any, **___: Any) -> dict[int, str]:
    pairs = enumerate(chosen)
    return {i: str(how) for i, how in pairs if how in ("keep", "offload")}


ABLATIONS: dict[str, dict[str, Any]] = {
    BASE: {},
    "stop at the first that fits": {
        "_search._propose.Proposer.beside": _none,
        "_search._propose.Proposer.by_hand": _none,
    },
    "no stalls laid to values": {"_search._space.stalled": _same},
    "no correction by predictions": {"_search._correction.Correction.parts": _no_parts},
    "no correction by programs": {"_search._correction.Correction.expected": _zero},
    "no policies by hand": {"_search._propose.Proposer._by_people": _none},
    "no other variants": {"_search._loop.WHERE_NOTHING_FITS": ()},
    "layers never as written": {"_search._loop.BESIDE": ()},
    "no blocks within layers": {"_search._variants._blocks": _no_blocks},
    "layers never left alone": {"_search._propose.Proposer._left_alone": _found},
    "nothing that nearly fits": {"_search._loop.NEARLY": 1.0},
    "one round of settling": {"_search._propose._ROUNDS": 1},
    "no caution": {"_search._loop._CAUTION": (0.0,)},
    "storing costs nothing": {"_survey._take.with_storing": _same},
    "copies travel alike": {"_survey._survey.ways_to_store": _plain},
}
"""By name: what is put in the place of what, in `stowax`."""


@contextlib.contextmanager
def varied(name: str) -> Iterator[None]:
    """The search without a rule, for the time."""
    with contextlib.ExitStack() as stack:
        for path, other in ABLATIONS[name].items():
            stack.enter_context(mock.patch(f"stowax.{path}", other))
        yield


def ends(workload: str, target: str) -> Line:
    """What keeping everything takes, and the smallest budget that a plan names."""
    machine = stowax.target(target)
    step, args = WORKLOADS[workload](machine)
    asked = {"target": machine, "cache": FOLDER, "progress": say}
    whole = stowax.plan(step, *args, budget="100%", donate=True, **asked)
    least = stowax.plan(step, *args, budget=whole.budget_bytes // 50, **asked)
    return {"most": whole.budget_bytes, "least": least.smallest_budget}


def planned(workload: str, target: str, budget: int) -> Line:
    """A plan as a user asks for it, and what the table needs of it."""
    machine = stowax.target(target)
    step, args = WORKLOADS[workload](machine)
    watch, cpu = Stopwatch(), time.process_time()
    plan = stowax.plan(
        step,
        *args,
        budget=budget,
        target=machine,
        compiles=COMPILES,
        cache=FOLDER,
        progress=say,
    )
    by_hand = [b.seconds for b in plan.baselines if b.fits]
    return {
        "budget": budget,
        "fits": plan.fits,
        "step_seconds": plan.step_seconds,
        "device_bytes": plan.device_bytes,
        "trials": [
            [t.what, t.predicted_bytes, t.compiled_bytes, t.step_seconds]
            for t in plan.search.trials
        ],
        "compiling_seconds": sum(t.seconds_to_compile for t in plan.search.trials),
        "best_by_hand": min(by_hand, default=None),
        "wall_seconds": watch.seconds(),
        "processor_seconds": time.process_time() - cpu,
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--variant", action="append", choices=ABLATIONS)


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Every cell that was asked for."""
    FOLDER.mkdir(exist_ok=True)
    for target in asked.target or TARGETS:
        for workload in asked.workload or WORKLOADS:
            for variant in asked.variant or ABLATIONS:
                _run_cells(workload, target, variant, records)


def _run_cells(
    workload: str, target: str, variant: str, records: _record.Records
) -> None:
    about = {"workload": workload, "target": target}
    found = records.made(
        cell_name(workload, target, "ends"),
        lambda: ends(workload, target),
        about | {"variant": "ends"},
    )
    if "error" in found:
        return
    low, high = found["least"], found["most"]
    for part in PARTS:
        budget = int(low + (high - low) * part)
        with varied(variant):
            records.made(
                cell_name(workload, target, variant, part),
                lambda b=budget: planned(workload, target, b),
                about | {"variant": variant, "part": part},
            )


def _compared(lines: list[Line], base: dict[Any, Line], variant: str) -> list[Any]:
    """A row of the table: what the plans of a variant are beside those as it is."""
    ratios, compiles, fewer, workloads = [], [], 0, set[str]()
    for line in lines:
        if line["variant"] != variant or "error" in line:
            continue
        before = base.get((line["workload"], line["target"], line["part"]))
        if before is None:
            continue
        compiles.append(len(line["trials"]))
        if not line["fits"] or not before["fits"]:
            fewer += before["fits"] - line["fits"]
            continue
        ratios.append(line["step_seconds"] / before["step_seconds"])
        if ratios[-1] > 1.01:
            workloads.add(line["workload"])
    if not ratios:
        return [variant, "–", "–", "–", "–", "–", "–"]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return [
        variant,
        len(ratios),
        f"{mean:.4f}",
        f"{max(ratios):.3f}",
        f"{sum(r > 1.01 for r in ratios)} in {len(workloads)}",
        fewer,
        f"{statistics.fmean(compiles):.2f}",
    ]


def page(records: _record.Records) -> str:
    """The table."""
    lines = list(records.cells.values())
    base = {
        (line["workload"], line["target"], line["part"]): line
        for line in lines
        if line["variant"] == BASE and "error" not in line
    }
    parts = ", ".join(f"{part:.0%}" for part in PARTS)
    columns = (
        "without",
        "cells",
        "step, geometric mean",
        "worst cell",
        "cells slower by 1 %, in workloads",
        "cells lost",
        "programs a plan",
    )
    rows = [_compared(lines, base, name) for name in ABLATIONS]
    table = _record.table(columns, rows)
    return _record.page_text(records, parts=parts, compiles=COMPILES, table=table)
