"""Calibration, and the parts that are about any plan: the gate, measured seconds.

Measured against simulated is held on a transformer of 0.3 billion parameters
(`models.scan_transformer`) at the budgets below, beside every program of the parts
`tutorial` and `llama`. The gate is held on the same plans, and on theirs.
"""

import dataclasses

import jax

import stowax
from benchmarks import gpu_tutorial
from benchmarks.gpu_cells import (
    Cell,
    Context,
    Row,
    Workload,
    compile_by_hand,
    compiled_figures,
    each,
    gate,
    here,
    plan_of,
    run_and_measure,
    run_plan,
    say,
)
from benchmarks.models import scan_transformer
from stowax._calibrate._calibrate import Effort, measure_machine

TINY_EFFORT = Effort(
    copies=(2**16,),
    products=(16,),
    stream=2**16,
    arithmetic=2**14,
    repeats=1,
    update=2**14,
    sample_seconds=1e-4,
    rounds=1,
)
PLAIN = "transformer, as it is written"
PARTS_OF_PLAIN = (0.75, 0.5, 0.3)
"""Budgets, as parts of what the step takes as it is written."""
STEPS, TINY_STEPS = 30, 3
GATE_STEPS, TINY_GATE_STEPS = 10, 2


def calibration(context: Context, row: Row) -> None:
    """What `stowax.calibrate` measures; every later cell plans with it."""
    if context.tiny:
        found = measure_machine(jax.devices()[:1], TINY_EFFORT, say)
    else:
        found = stowax.calibrate(progress=say)
    # A file of this machine alone; its name is nobody's business.
    row["calibration"] = dataclasses.replace(found, host="").to_json()


def workload(context: Context) -> Workload:
    """The transformer; in tiny sizes layers that compile faster stand in for it."""
    if context.tiny:
        return gpu_tutorial.activations(tiny=True)[0]
    config = scan_transformer.MEDIUM
    step, specs = scan_transformer.sized(config)
    return Workload(step=step, specs=specs, tokens=config.vocabulary)


def plain(context: Context, row: Row) -> None:
    """The transformer as it is written."""
    work = workload(context)
    specs = here(work.specs)
    compiled = compile_by_hand(work, specs)
    compiled_figures(compiled, row)
    run_and_measure(compiled, work, specs, TINY_STEPS if context.tiny else STEPS, row)


def parts(tiny: bool) -> tuple[float, ...]:
    """Which budgets are planned for."""
    return PARTS_OF_PLAIN[:1] if tiny else PARTS_OF_PLAIN


def budget_of(context: Context, part: float) -> int:
    """A budget of the transformer."""
    whole = context.found.get(f"measured: {PLAIN}", {}).get("device_bytes")
    if whole is None:
        raise LookupError(f"budgets come from {PLAIN!r} of the part 'measured': run it")
    return int(whole * part)


def name_of(part: float) -> str:
    """What a plan's cell is called."""
    return f"transformer, {part:.0%} of its memory"


def planned(part: float, context: Context, row: Row) -> None:
    """The transformer under a plan."""
    work = workload(context)
    plan = plan_of(context, name_of(part), work, budget=budget_of(context, part))
    run_plan(plan, work, TINY_STEPS if context.tiny else STEPS, row)


def gated(part: float, context: Context, row: Row) -> None:
    """The gate on the same plan."""
    work = workload(context)
    plan = plan_of(context, name_of(part), work, budget=budget_of(context, part))
    gate(plan, work, TINY_GATE_STEPS if context.tiny else GATE_STEPS, row)


def gated_tutorial(example: str, context: Context, row: Row) -> None:
    """The gate on the plan of one of the tutorial's examples."""
    work, _, _ = gpu_tutorial.EXAMPLES[example](context.tiny)
    plan = plan_of(context, f"{gpu_tutorial.PART} {example}", work)
    gate(plan, work, TINY_GATE_STEPS if context.tiny else GATE_STEPS, row)


def calibration_cells() -> list[Cell]:
    """One cell."""
    return [Cell(part="calibration", name="rates", work=calibration, seconds=40)]


def measured_cells(tiny: bool) -> list[Cell]:
    """The transformer as it is written, and at its budgets."""
    written = Cell(part="measured", name=PLAIN, work=plain, seconds=25)
    return [written, *each("measured", 45, name_of, planned, parts(tiny))]


def gate_cells(tiny: bool) -> list[Cell]:
    """The gate on the tutorial's plans and the transformer's."""
    examples = list(gpu_tutorial.EXAMPLES)[: 1 if tiny else None]
    named = lambda example: f"{gpu_tutorial.PART}, {example}"
    budgets = () if tiny else PARTS_OF_PLAIN
    return [
        *each("gate", 120, named, gated_tutorial, examples),
        *each("gate", 90, name_of, gated, budgets),
    ]
