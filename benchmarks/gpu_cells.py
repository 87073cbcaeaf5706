"""What every part of `benchmarks.gpu` is made of: cells, arrays, plans, a timed run.

A cell is one row of a table, or a few that belong together. Its work writes into a row
as it goes, so that what was found before an error is there beside the error.

All steps here are `(state, batch) -> (state, loss)` and donate their state, so a run
feeds what it returns back in, as training does.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import stowax
from benchmarks import _record

Row = dict[str, Any]
SOURCE = pathlib.Path(stowax.__file__).parent
TRACE = "STOWAX_GPU_TRACE"
TRACED = 3
"""Steps under the profiler, after the timed ones."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a cell is told: sizes, where plans are kept, and what other cells found."""

    tiny: bool
    folder: pathlib.Path
    found: Mapping[str, Row]

    def row(self, part: str, name: str) -> Row:
        """What another cell found; empty where it did not run, or failed."""
        row = self.found.get(f"{part}: {name}", {})
        return {} if "error" in row else row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry of the JSON; `seconds` is about what it takes, on an H200."""

    part: str
    name: str
    work: Callable[[Context, Row], None]
    seconds: float = 60

    @property
    def key(self) -> str:
        """Its name in the JSON."""
        return f"{self.part}: {self.name}"


def each(part: str, seconds: float, name: Any, work: Any, given: Any) -> list[Cell]:
    """A cell for each of what is `given`: its name, and its work with it."""
    return [
        Cell(
            part=part,
            name=name(one),
            work=functools.partial(work, one),
            seconds=seconds,
        )
        for one in given
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A step, the specs of its state and batch, and how it is planned."""

    step: Callable[..., Any]
    specs: tuple[Any, Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 2


class OneDevice:
    """The first attached device, as what the models ask of a target."""

    def __init__(self):
        self.devices = tuple(jax.devices()[:1])

    def mesh(self, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Any:
        """A mesh of one device."""
        return stowax.target().mesh(shape, axis_names)


def say(line: str) -> None:
    """Progress, indented below the cell's own line."""
    print(f"    {line}", file=sys.stderr, flush=True)


def placed(specs: Any, kind: str = "device") -> Any:
    """`specs` in one kind of memory of the first device; scalars on the device."""
    target = stowax.target()

    def place(spec: Any) -> Any:
        memory = kind if spec.ndim else "device"
        sharding = target.sharding(memory_kind=memory)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

    return jax.tree.map(place, specs)


def here(specs: Any) -> Any:
    """`specs` on the device; those of a mesh are there as they are."""
    spread = any(spec.sharding is not None for spec in jax.tree.leaves(specs))
    return specs if spread else placed(specs)


def filled(specs: Any, tokens: int = 2, seed: int = 0) -> Any:
    """Arrays for `specs`, each made on the device and brought to its memory, in turn.

    `specs` are of a state and a batch. The same path always has the same values:
    moments and counts are zeros, norms are ones, whole numbers are below `tokens`, all
    else is normal, of weights over the root of the rows. With a `seed` floats are moved
    by about one rounding.
    """

    def fill(path: tuple[Any, ...], spec: Any) -> Any:
        name = jax.tree_util.keystr(path)
        dtype = jnp.dtype(spec.dtype)
        kind = _kind_of(name, spec.shape, dtype)
        key = jax.random.key(zlib.crc32(name.encode()))
        value = _drawn(kind, spec.shape, dtype, tokens, key, seed)
        if spec.sharding is not None:
            value = jax.device_put(value, spec.sharding)
        return jax.block_until_ready(value)

    return jax.tree.map_with_path(fill, specs)


def _kind_of(name: str, shape: tuple[int, ...], dtype: Any) -> str:
    if any(word in name for word in ("optimizer", "moments")):
        return "zeros"
    if not jnp.issubdtype(dtype, jnp.floating):
        return "tokens"
    if "norm" in name:
        return "ones"
    return "weight" if len(shape) > 1 and name.startswith("[0]") else "normal"


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 5))
def _drawn(
    kind: str, shape: Any, dtype: Any, tokens: int, key: Any, seed: int
) -> jax.Array:
    if kind == "zeros":
        return jnp.zeros(shape, dtype)
    if kind == "tokens":
        return jax.random.randint(key, shape, 0, tokens, dtype)
    if kind == "ones":
        value = jnp.ones(shape, jnp.float32)
    else:
        root = shape[-2] ** 0.5 if kind == "weight" else 1.0
        value = jax.random.normal(key, shape, jnp.float32) / jnp.float32(root)
    if seed:
        moved = jax.random.uniform(jax.random.key(seed), shape, jnp.float32, -1.0, 1.0)
        value = value * (1 + jnp.finfo(dtype).eps.astype(jnp.float32) * moved)
    return value.astype(dtype)


@functools.cache
def code_digest() -> str:
    """What a plan depends on beside the step: stowax itself, and versions."""
    found = hashlib.sha256(repr(sorted(_record.versions().items())).encode())
    for path in sorted(SOURCE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def plan_of(context: Context, name: str, work: Workload, **options: Any) -> Any:
    """The plan for a workload, from the folder if another cell has made it already."""
    options = {**work.options, **options}
    named = "".join(c if c.isalnum() else "-" for c in name)
    rest = repr((name, sorted(options.items()), context.tiny, code_digest()))
    digest = hashlib.sha256(rest.encode()).hexdigest()[:12]
    path = context.folder / "plans" / f"{named}-{digest}.json"
    if path.exists():
        own = options.get("compiler_options")
        return stowax.load_plan(path, compiler_options=own)
    plan = stowax.plan(work.step, *work.specs, progress=say, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.save(path)
    return plan


def plan_figures(plan: Any) -> Row:
    """What a plan says of itself."""
    chosen = [t for t in plan.search.trials if t.compiled_bytes == plan.device_bytes]
    return {
        "outcome": plan.outcome,
        "fits": plan.fits,
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": chosen[-1].predicted_bytes if chosen else None,
        "planned_bytes": plan.device_bytes,
        "planning_seconds": round(plan.search.planning_seconds, 2),
        "moved": sorted({d.role for d in plan.decisions if d.decision == "offload"}),
    }


def compile_by_hand(
    work: Workload, specs: Any, options: Mapping[str, Any] | None = None
) -> Any:
    """A step as it is written, its state donated and returned where it was."""
    out = jax.tree.map(lambda spec: spec.sharding, specs[0]), None
    jitted = jax.jit(work.step, donate_argnums=0, out_shardings=out)
    return jitted.lower(*specs).compile(dict(options or {}))


def compile_planned(
    plan: Any, work: Workload, options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """A planned step, and the specs of its arguments in the planned memory.

    `options` are added to the plan's own.
    """
    specs = plan.specs(*work.specs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return plan.apply(work.step).lower(*specs).compile(dict(options)), specs


def compiled_figures(compiled: Any, row: Row) -> None:
    """Writes what a compiled program needs and is simulated to take into `row`."""
    found = stowax.inspect(compiled)
    timeline = found.timeline
    sums = {"device-to-host": 0, "host-to-device": 0}
    for transfer in found.transfers:
        if transfer.direction in sums:
            sums[transfer.direction] += transfer.total_bytes
    row |= {
        "device_bytes": found.memory.device.total,
        "host_bytes": found.memory.host.total,
        "simulated_seconds": timeline.step_seconds,
        "simulated_exposed_seconds": timeline.exposed_seconds,
        "out_bytes": sums["device-to-host"],
        "in_bytes": sums["host-to-device"],
        "hazards": sorted({hazard.kind for hazard in found.hazards}),
    }


def _peak() -> int | None:
    """The most that this process ever had on the device; none for a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _loss(out: Any) -> Any:
    return jax.tree.leaves(out)[0]


def run(compiled: Any, state: Any, batch: Any, steps: int, row: Row) -> Any:
    """Trains: writes losses, seconds per step and the peak into `row`.

    The seconds are of the wall, all steps but the first one after the other without
    waiting in between. Returns the state.
    """
    state, out = jax.block_until_ready(compiled(state, batch))
    losses, started = [_loss(out)], time.perf_counter()
    for _ in range(steps - 1):
        state, out = compiled(state, batch)
        losses.append(_loss(out))
    jax.block_until_ready((state, losses))
    row["seconds"] = (time.perf_counter() - started) / max(1, steps - 1)
    row["timed_steps"] = steps - 1
    row["losses"] = [float(loss) for loss in losses]
    return state


def run_and_measure(
    compiled: Any, work: Workload, specs: Any, steps: int, row: Row
) -> None:
    """`run`, then the peak, then a few steps more under the profiler.

    The peak is of the process: compiling may have needed more than the step does, and
    then `peak_before_bytes` is as large.
    """
    before = _peak()
    state, batch = filled(specs, work.tokens)
    state = run(compiled, state, batch, steps, row)
    row |= {"peak_before_bytes": before, "peak_bytes": _peak()}
    with _trace_folder() as folder:
        with _profiling(folder):
            for _ in range(TRACED):
                state, out = jax.block_until_ready(compiled(state, batch))
        del state, out
        pathlib.Path(folder, "program.txt").write_text(compiled.as_text())
        measured = stowax.measure(compiled, *specs, trace=folder)
    row |= {
        "measured_seconds": measured.step_seconds,
        "measured_exposed_seconds": measured.exposed_seconds,
        "measured_compute_seconds": measured.compute_seconds,
        "measured_idle_seconds": measured.idle_seconds,
        "out_seconds": measured.device_to_host_seconds,
        "in_seconds": measured.host_to_device_seconds,
    }


def _trace_folder() -> contextlib.AbstractContextManager[str]:
    """Where a trace goes: the folder that `TRACE` names, or one that is forgotten."""
    if folder := os.environ.get(TRACE):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        return contextlib.nullcontext(folder)
    return tempfile.TemporaryDirectory(prefix="stowax-gpu-")


@contextlib.contextmanager
def _profiling(folder: str) -> Any:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            jax.profiler.stop_trace()


def run_plan(
    plan: Any,
    work: Workload,
    steps: int,
    row: Row,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Everything about one plan but the gate, into `row`."""
    row |= plan_figures(plan)
    if not plan.fits:
        row["smallest_budget"] = plan.smallest_budget
        return
    compiled, specs = compile_planned(plan, work, options or {})
    compiled_figures(compiled, row)
    run_and_measure(compiled, work, specs, steps, row)


def gate(plan: Any, work: Workload, steps: int, row: Row) -> None:
    """`stowax.verify` on one plan, into `row`."""
    row |= plan_figures(plan)
    if not plan.fits:
        row["smallest_budget"] = plan.smallest_budget
        return
    # From numpy, so that the device has room for the runs alone.
    arguments = jax.device_get(filled(here(work.specs), work.tokens))
    found = stowax.verify(work.step, plan, *arguments, steps=steps, progress=say)
    worst = max(found.leaves, key=lambda leaf: (not leaf.ok, leaf.error or 0.0))
    row |= {
        "passed": found.passed,
        "repeatable": found.repeatable,
        "gate_steps": found.steps,
        "leaves": len(found.leaves),
        "failed": [leaf.path for leaf in found.failed],
        "worst_leaf": [worst.path, worst.error, worst.tolerance],
        "blamed": [f"{b.decision} {b.name}" for b in found.blamed],
        "notes": list(found.notes),
        "gate_seconds": round(found.seconds, 2),
    }
