"""What is said to be in the way of a step, beside what compilers took.

For each training step as it is written, its state donated: the arrays at the predicted
peak, before anything is compiled, and the bytes of the compiled program, or those that
the compiler said it would need when it refused. Of models that do not repeat, the
programs are those of `straight`.

    python -m benchmarks peaks --target h200
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax

import stowax
from benchmarks import _record, ablation, comparison_programs, straight
from benchmarks._record import Figures, cell_name, gib
from benchmarks.models import STRAIGHT
from stowax._inspect._peak_of import peak_of

TARGETS = ("h200", "v5p-8")
NEAR = 0.10
"""How far a prediction may be off: a bar of the project."""

MODELS: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {
    **ablation.WORKLOADS,
    **{name: lambda _, n=name: straight.step_of(n) for name in STRAIGHT},
}


def cell(model: str, place: str) -> Figures:
    """The predicted peak of one step, and what its compiler says."""
    machine = stowax.target(place)
    step, args = MODELS[model](machine)
    jitted = jax.jit(step, donate_argnums=0)
    _, peak = peak_of(machine.lower(jitted, *args), machine.platform)
    found = _straight(model, place) or comparison_programs.figures(
        machine, jitted, args, {}
    )
    if "refused" in found:
        raise RuntimeError(found["refused"])
    return {
        "predicted_bytes": peak.predicted_bytes,
        "named_bytes": peak.named_bytes,
        "arrays_bytes": peak.bytes,
        "by_role": peak.by_role(),
        "compiled_bytes": found["device_bytes"],
        "refused": found["host_bytes"] is None,
        "fits": found["device_bytes"] <= machine.device_bytes,
    }


def _straight(model: str, place: str) -> Figures | None:
    """What `straight` has of the same step."""
    records = _record.Records("straight", "simulated")
    return records.known(cell_name(model, place, straight.AS_WRITTEN))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--model", action="append", choices=MODELS)


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """Every step that was asked for."""
    for place in asked.target or TARGETS:
        for model in asked.model or MODELS:
            jax.clear_caches()
            records.made(
                cell_name(model, place),
                lambda m=model, p=place: cell(m, p),
                {"model": model, "target": place},
            )


def ratio(row: Figures) -> float:
    """Predicted over compiled bytes."""
    return row["predicted_bytes"] / row["compiled_bytes"]


def _largest(row: Figures) -> str:
    pairs = list(row["by_role"].items())[:3]
    return ", ".join(f"{role} {gib(much)}" for role, much in pairs)


_COLUMNS = {
    "step": lambda row: row["model"],
    "target": lambda row: row["target"],
    "compiled GiB": lambda row: (
        gib(row["compiled_bytes"]) + " (refused)" * row["refused"]
    ),
    "predicted GiB": lambda row: gib(row["predicted_bytes"]),
    "ratio": lambda row: (
        f"{ratio(row):.3f}" if abs(ratio(row) - 1) <= NEAR else f"**{ratio(row):.3f}**"
    ),
    "named": lambda row: f"{row['named_bytes'] / row['arrays_bytes']:.1%}",
    "most of it, GiB": _largest,
}


def page(records: _record.Records) -> str:
    """The table, those that are furthest off last."""
    rows = [row for row in records.cells.values() if "error" not in row]
    rows.sort(key=lambda row: abs(ratio(row) - 1))
    near = sum(abs(ratio(row) - 1) <= NEAR for row in rows)
    least = min((r["named_bytes"] / r["arrays_bytes"] for r in rows), default=0.0)
    return _record.page_text(
        records,
        count=len(rows),
        near=near,
        bar=f"{NEAR:.0%}",
        named=f"{least:.1%}",
        table=_record.columns(_COLUMNS, rows),
    )
