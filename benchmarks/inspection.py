"""What `stowax.inspect` reads, against what the compiler says: totals, peak, origin.

Five training steps, each for four chips: device totals beside `memory_analysis()`, the
rebuilt peak beside XLA's own, and the part of the bytes at the peak that carry a role
and a source line. Then Llama2-13B under a plan: the time that inspecting takes beyond
compiling, and the size of the page made of it.

    python -m benchmarks inspection --programs-only
"""

import argparse
import dataclasses
import time
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks._record import cell_name, gib, say
from benchmarks.budgets import LOW_EFFORT, SIZES, TWO_STACKS
from benchmarks.models import MODELS, llama
from stowax._target._compiled import LoweredProgram
from stowax.report import inspection_page

TARGETS = ("v5p-8", "v5e-4", "h200", "a100-80")
NAMES = (
    "scan_transformer",
    "loop_transformer",
    "linen_scan",
    "equinox_loop",
    "encoder_decoder",
)
SHORT = {"width": 1024, "heads": 8, "feed_forward": 2816, "batch": 16}
"""So small that everything fits the 16 GiB of a v5e."""

PEAK_BAR, SOURCE_BAR, SECONDS_BAR, PAGE_BAR = 0.01, 0.95, 10.0, 5e6
BUDGET = "90GiB"
LARGE = "Llama2-13B, planned"


def step_of(model: str) -> tuple[Any, tuple[Any, ...]]:
    """The training step of `model`, small."""
    if model == "encoder_decoder":
        return MODELS[model].sized(dataclasses.replace(TWO_STACKS, **SHORT))
    few = {**SHORT, "key_value_heads": 8}
    return MODELS[model].sized(dataclasses.replace(SIZES, **few))


def known(inspection: Any) -> dict[str, float]:
    """Parts of the bytes at the peak of which role and source line are known."""
    curve = inspection.memory_timeline.device
    places = tuple(curve.at(curve.peak_position))
    total = sum(place.bytes for place in places)
    named = [p for p in places if p.role != "argument"]
    sourced = [p for p in places if p.source or p.role in _ARGUMENTS]
    lines = [p for p in places if p.source]
    return {
        "places_at_peak": len(places),
        "role_share": sum(p.bytes for p in named) / total,
        "workspace_share": sum(p.bytes for p in places if p.role == "workspace")
        / total,
        "origin_share": sum(p.bytes for p in sourced) / total,
        "line_share": sum(p.bytes for p in lines) / total,
    }


_ARGUMENTS = ("parameter", "optimizer state", "batch")


def program(model: str, target: str) -> dict[str, Any]:
    """One row: what was read of one compiled step, and what the compiler says."""
    machine = stowax.target(target)
    options = LOW_EFFORT if target.startswith("v") else None
    step, args = step_of(model)
    jitted = jax.jit(step, donate_argnums=0, compiler_options=options)
    compiled = machine.compile(jitted, *args)
    theirs = compiled.memory_analysis()
    found = stowax.inspect(jitted, *args, target=machine)
    memory = found.memory_timeline
    return {
        "model": model,
        "target": target,
        "total_bytes": found.memory.device.total,
        "compiler_total_bytes": _record.total_bytes(theirs),
        "peak_bytes": memory.peak_bytes,
        "compiler_peak_bytes": memory.compiler_peak_bytes,
        "hazards": len(found.hazards),
        **known(found),
    }


def llama_13b(saved: str | None) -> dict[str, Any]:
    """The planned step of Llama2-13B: speed, origin, and the page.

    **Arguments:** `saved` is the path of a plan that was made before, to save time.
    """
    machine = stowax.target("v5p-8")
    step, args = llama.llama2_13b(machine)
    if saved:
        plan = stowax.load_plan(saved)
    else:
        plan = stowax.plan(step, *args, budget=BUDGET, target=machine, progress=say)
    jitted, specs = plan.apply(step), plan.specs(*args)
    compiling = 0.0
    compile_program = LoweredProgram.compile

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal compiling
        start = time.perf_counter()
        try:
            return compile_program(*args, **options)
        finally:
            compiling += time.perf_counter() - start

    LoweredProgram.compile = timed
    try:
        start = time.perf_counter()
        found = stowax.inspect(jitted, *specs, target=machine)
        inspecting = time.perf_counter() - start - compiling
    finally:
        LoweredProgram.compile = compile_program
    page = inspection_page(found, plan)
    return {
        "budget": BUDGET,
        "device_bytes": found.memory.device.total,
        "host_bytes": found.memory.host.total,
        "compiling_seconds": compiling,
        "inspecting_seconds": inspecting,
        "instructions": found.memory_timeline.device.moments[-1].position,
        "peak_bytes": found.memory_timeline.peak_bytes,
        "compiler_peak_bytes": found.memory_timeline.compiler_peak_bytes,
        "page_bytes": len(page.encode()),
        "copies_as_planned": all(check.as_planned for check in found.copies),
        "copies": len(found.copies),
        "hazards": [[h.kind, h.seconds] for h in found.hazards],
        **known(found),
    }


def page(records: _record.Records) -> str:
    """The tables: programs, then the large one."""
    cells = {k: v for k, v in records.cells.items() if "error" not in v}
    large = cells.pop(LARGE, None)
    return _record.page_text(
        records,
        programs=_record.columns(_COLUMNS, cells.values()),
        large=_record.table(("what", "figure"), _large(large)) if large else "",
    )


_COLUMNS = {
    "step": lambda p: p["model"],
    "target": lambda p: p["target"],
    "total, bytes": lambda p: p["total_bytes"],
    "the compiler's": lambda p: _marked(p["total_bytes"], p["compiler_total_bytes"], 0),
    "peak, bytes": lambda p: p["peak_bytes"],
    "the compiler's peak": lambda p: _marked(
        p["peak_bytes"], p["compiler_peak_bytes"], PEAK_BAR
    ),
    "places at the peak": lambda p: p["places_at_peak"],
    "role": lambda p: f"{p['role_share']:.1%}",
    "workspace": lambda p: f"{p['workspace_share']:.1%}",
    "origin": lambda p: f"{p['origin_share']:.1%}",
    "line": lambda p: f"{p['line_share']:.1%}",
}


def _marked(ours: int, theirs: int, bar: float) -> str:
    """The compiler's figure, bold where ours is further off than the bar."""
    return f"{theirs}" if abs(ours - theirs) <= bar * theirs else f"**{theirs}**"


def _large(row: dict[str, Any]) -> list[tuple[str, str]]:
    theirs = row["compiler_peak_bytes"]
    return [
        (
            "device / host, GiB",
            f"{gib(row['device_bytes'])} / {gib(row['host_bytes'])}",
        ),
        ("peak: ours / the compiler's", f"{row['peak_bytes']} / {theirs}"),
        ("bytes at the peak with a role", f"{row['role_share']:.1%}"),
        ("of it workspace", f"{row['workspace_share']:.1%}"),
        (f"with an origin (to be {SOURCE_BAR:.0%})", f"{row['origin_share']:.1%}"),
        ("with a source line", f"{row['line_share']:.1%}"),
        ("compiling, s", f"{row['compiling_seconds']:.1f}"),
        (
            f"tracing, lowering, reading, s (to be {SECONDS_BAR:.0f})",
            f"{row['inspecting_seconds']:.1f}",
        ),
        (f"page, MB (to be {PAGE_BAR / 1e6:.0f})", f"{row['page_bytes'] / 1e6:.2f}"),
        ("copies as planned", f"{row['copies']}, {row['copies_as_planned']}"),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs-only", action="store_true")
    parser.add_argument("--llama-only", action="store_true")
    parser.add_argument("--plan", help="a saved plan of Llama2-13B, to save time")


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """The programs, then the large one."""
    for model in () if asked.llama_only else NAMES:
        for target in TARGETS:
            records.made(
                cell_name(model, target), lambda m=model, t=target: program(m, t)
            )
    if not asked.programs_only:
        records.made(LARGE, lambda: llama_13b(asked.plan))
