"""The table of `benchmarks.gpu`: what its records say, section by section.

A cell that ended in an error is a row like any other, and listed with its error below.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from benchmarks import _record, gpu_hazards, gpu_llama, gpu_tutorial
from benchmarks._record import gib
from benchmarks.gpu_tutorial import EXAMPLES, WAYS

Row = dict[str, Any]
Cells = dict[str, Row]
NONE = "–"
SECONDS_BAR, PEAK_BAR = 0.10, 0.03
SHAKES = 4
"""As the gate: four times what one rounding in the arguments does is no fault."""
ROUNDING = 1e-5
TINY = (
    "**In tiny sizes, to see that every part runs: no figure here means anything.**\n"
)


def page(records: _record.Records) -> str:
    """The whole page."""
    cells: Cells = {**records.cells}
    tiny = cells.pop("device", {}).get("tiny")
    parts = [
        "# On a real GPU\n",
        TINY if tiny else "",
        records.provenance(),
        _calibration(cells),
        _hazards(cells),
        _tutorial(cells),
        _measured(cells),
        _noted(cells),
        _gate(cells),
        _llama(cells),
        _failed(cells),
    ]
    return "\n".join(part for part in parts if part)


def _ms(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1e3 * seconds:.2f}"


def _gib(count: float | None) -> str:
    return NONE if count is None else gib(count)


def _ratio(found: float | None, expected: float | None) -> float | None:
    return found / expected if found is not None and expected else None


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.3f}"


def _of_part(cells: Cells, part: str) -> Iterator[tuple[str, Row]]:
    for key, row in cells.items():
        if key.startswith(f"{part}: "):
            yield key.partition(": ")[2], row


def _calibration(cells: Cells) -> str:
    rates = cells.get("calibration: rates", {}).get("calibration")
    if rates is None:
        return ""
    rows = [
        (f"products, {k}", f"{v / 1e12:.1f} T/s") for k, v in rates["matrix"].items()
    ]
    for name in ("memory_bandwidth", "vector", "host_update"):
        if rates[name] is not None:
            rows.append((name.replace("_", " "), f"{rates[name] / 1e9:.1f} G/s"))
    for copy in rates["copies"]:
        each = " / ".join(f"{copy[k] / 1e9:.1f}" for k in ("out", "into", "both"))
        rows.append((f"copies of {copy['bytes'] / 2**20:g} MiB", f"{each} GB/s"))
    rows += [(f"not measured: {m['what']}", m["why"]) for m in rates["unmeasured"]]
    return (
        "## Calibration\n\nWhat `stowax.calibrate` measured; operations or bytes per "
        "second. Copies: out, in, and each way while both are busy.\n\n"
        + _record.table(("what", "rate"), rows)
    )


def _hazards(cells: Cells) -> str:
    rows = []
    for name, row in _of_part(cells, "hazards"):
        for line in row.get("lines", []):
            options = ", ".join(
                f"{k.removeprefix('xla_gpu_enable_')}={v}"
                for k, v in line["options"].items()
            )
            verdict = NONE
            if line.get("error") is None:
                wrong = f"**wrong** in {line['wrong']} of {line['runs']}"
                verdict = wrong if line["wrong"] else f"right in all {line['runs']}"
            error, size = line.get("difference"), line.get("host_bytes")
            rows.append(
                (
                    name,
                    line["what"],
                    options or "none",
                    verdict,
                    NONE if error is None else f"{error:.1e}",
                    line.get("not_finite", NONE),
                    NONE if size is None else f"{size / 2**20:.1f}",
                    {True: "yes", False: "no"}.get(line.get("warned"), NONE),
                    (line.get("error") or "").partition("\n")[0][:80].replace("|", "/"),
                )
            )
    if not rows:
        return ""
    head = ("pattern", "program", "compiler options", "result", "difference")
    head += ("runs not finite", "host MiB", "inspect warned", "error")
    return (
        "## Known faults, planted\n\nGradients (or losses and weights) beside those of "
        "the same step with nothing offloaded, on this device; the difference is the "
        f"largest of any entry, as a part of its array's largest. Above "
        f"{gpu_hazards.TOLERANCE:g} it is wrong.\n\n" + _record.table(head, rows)
    )


def apart(losses: list[float], others: list[float]) -> float | None:
    """The largest difference of two runs at the same step, as a part of the loss.

    Up to the first step at which neither is a number: there they say nothing.
    """
    pairs = list(
        itertools.takewhile(
            lambda pair: any(map(math.isfinite, pair)),
            zip(losses, others, strict=False),
        )
    )
    if not pairs:
        return None
    worst = 0.0
    for one, other in pairs:
        far = abs(one - other) / (abs(other) or 1.0)
        worst = max(worst, far) if math.isfinite(far) else float("inf")
    return worst


def _rate(row: Row, way: str) -> str:
    count, seconds = row.get(f"{way}_bytes"), row.get(f"{way}_seconds")
    return f"{count / seconds / 1e9:.1f}" if count and seconds else NONE


def _tutorial(cells: Cells) -> str:
    rows = []
    for example in EXAMPLES:
        plain = cells.get(f"tutorial: {example}, {WAYS[0]}", {})
        base, shaken = plain.get("losses", []), plain.get("shaken_losses", [])
        allowed = SHAKES * (apart(shaken, base) or 0.0) + ROUNDING
        for way in WAYS:
            row = cells.get(f"tutorial: {example}, {way}")
            if row is None:
                continue
            losses = row.get("losses", [])
            far = apart(losses, base)
            same = NONE if far is None else "yes" if far <= allowed else "**no**"
            known = far is not None
            rows.append(
                (
                    example,
                    way,
                    "yes" if "error" not in row and losses else "no",
                    _gib(row.get("device_bytes")),
                    _gib(row.get("peak_bytes")),
                    _gib(row.get("host_bytes")),
                    _ms(row.get("seconds")),
                    _ms(row.get("measured_exposed_seconds")),
                    _rate(row, "out"),
                    _rate(row, "in"),
                    f"{losses[0]:.4g} → {losses[-1]:.4g}" if losses else NONE,
                    f"{far:.1e} of {allowed:.1e}" if known else NONE,
                    same,
                )
            )
    if not rows:
        return ""
    head = ("example", "state", "fits", "device GiB", "peak GiB", "host GiB")
    head += ("ms a step", "waiting ms", "GB/s out", "GB/s in", "loss")
    head += ("losses apart, of allowed", "same losses")
    return (
        f"## The tutorial's examples, {gpu_tutorial.STEPS} steps each\n\n*device* and "
        "*host* are compiled totals, the peak is the allocator's. A step is of the "
        "wall, one after the other; waiting and rates are from the profiler's trace, a "
        "rate being the bytes of a step over the seconds in which that way is busy. "
        "Losses are held against those with the state on the device, step by step: "
        "four times what one rounding in the arguments does to them is allowed. Where "
        "they stop being numbers, all ways alike, only those before are compared.\n\n"
        + _record.table(head, rows)
    )


def _measured(cells: Cells) -> str:
    rows, seconds, peaks = [], [], []
    for key, row in cells.items():
        ratio = _ratio(row.get("simulated_seconds"), row.get("measured_seconds"))
        if ratio is None:
            continue
        peak = row.get("peak_bytes")
        if peak is not None and peak <= (row.get("peak_before_bytes") or 0):
            peak = None  # compiling needed more than the step
        predicted = _ratio(row.get("predicted_bytes"), peak)
        compiled = _ratio(row.get("device_bytes"), peak)
        seconds.append(ratio)
        peaks += [compiled] if compiled is not None else []
        rows.append(
            (
                key,
                _ms(row["simulated_seconds"]),
                _ms(row["measured_seconds"]),
                _times(ratio),
                _ms(row["simulated_exposed_seconds"]),
                _ms(row["measured_exposed_seconds"]),
                _gib(row.get("predicted_bytes")),
                _gib(row.get("device_bytes")),
                _gib(peak),
                _times(predicted),
                _times(compiled),
            )
        )
    if not rows:
        return ""
    near = sum(abs(ratio - 1) <= SECONDS_BAR for ratio in seconds)
    close = sum(abs(ratio - 1) <= PEAK_BAR for ratio in peaks)
    head = ("program", "simulated ms", "measured ms", "simulated / measured")
    head += ("waiting, simulated ms", "waiting, measured ms", "predicted GiB")
    head += ("compiled GiB", "peak GiB", "predicted / peak", "compiled / peak")
    return (
        "## Measured beside simulated\n\nEvery program that ran. Measured is one step "
        "in the profiler's trace (`stowax.measure`); the peak is the allocator's, and "
        f"missing where compiling needed more. Simulated seconds within "
        f"{SECONDS_BAR:.0%} of measured: {near} of {len(seconds)}. Compiled bytes "
        f"within {PEAK_BAR:.0%} of the peak: {close} of {len(peaks)}.\n\n"
        + _record.table(head, rows)
    )


def _gate(cells: Cells) -> str:
    rows = []
    for name, row in _of_part(cells, "gate"):
        path, error, allowed = row.get("worst_leaf") or (NONE, None, None)
        known = error is not None and allowed is not None
        passed = {True: "yes", False: "**no**"}.get(row.get("passed"), NONE)
        rows.append(
            (
                name,
                row.get("outcome", NONE),
                ", ".join(row.get("moved", [])) or "nothing",
                passed,
                {True: "yes", False: "no"}.get(row.get("repeatable"), NONE),
                row.get("leaves", NONE),
                row.get("gate_steps", NONE),
                f"{path}: {error:.1e} of {allowed:.1e}" if known else path,
                "; ".join(row.get("blamed", [])) or NONE,
                row.get("gate_seconds", NONE),
            )
        )
    if not rows:
        return ""
    head = ("plan", "outcome", "moves", "passed", "same bits twice", "arrays", "steps")
    head += ("largest error, of allowed", "blamed", "seconds")
    return (
        "## The gate\n\n`stowax.verify` on this device: the planned step beside the "
        "plain one.\n\n" + _record.table(head, rows)
    )


def _llama(cells: Cells) -> str:
    found = dict(_of_part(cells, "llama"))
    if not found:
        return ""
    base = found.get(gpu_llama.WRITTEN, {}).get("losses", [])
    ran = {k: row for k, row in found.items() if row.get("seconds") is not None}
    policies = {k: row for k, row in ran.items() if not k.startswith("stowax")}
    rows, won, cells_with = [], 0, 0
    for name, row in found.items():
        budget = row.get("budget_bytes")
        if name == gpu_llama.SMALLEST:
            continue
        fit = {
            k: p["seconds"]
            for k, p in policies.items()
            if budget is not None and p["device_bytes"] <= budget
        }
        best = min(fit, key=fit.__getitem__) if fit else NONE
        ratio = _ratio(row.get("seconds"), fit.get(best))
        if ratio is not None:
            cells_with, won = cells_with + 1, won + (ratio <= 1.0)
        far = apart(row.get("losses", []), base)
        rows.append(
            (
                name,
                _gib(budget),
                _gib(row.get("device_bytes")),
                _gib(row.get("host_bytes")),
                _ms(row.get("seconds")),
                f"{best}, {_ms(fit[best])} ms" if fit else NONE,
                _times(ratio),
                NONE if far is None else f"{far:.1e}",
                row.get("planning_seconds", NONE),
            )
        )
    head = ("step", "budget GiB", "device GiB", "host GiB", "ms a step")
    head += ("best policy that fits", "ratio", "losses apart", "planning s")
    tokens = gpu_llama.BATCH * gpu_llama.CONFIG.sequence
    return (
        f"## Llama2-7B's layers, {gpu_llama.LAYERS} of them, {tokens} tokens\n\nAdamW "
        "in float32. A step is of the wall; a policy fits where its compiled bytes do. "
        f"No slower than the best policy that fits: {won} of {cells_with} budgets at "
        "which one does. Losses beside those of the step as it is written.\n\n"
        + _record.table(head, rows)
    )


def _noted(cells: Cells) -> str:
    found = [f"- {key}: {row['note']}." for key, row in cells.items() if "note" in row]
    return "\n".join(found) + "\n" if found else ""


def _failed(cells: Cells) -> str:
    rows = [
        (key, " ".join(row["error"].split())[:300].replace("|", "/"))
        for key, row in cells.items()
        if "error" in row
    ]
    if not rows:
        return ""
    return "## What failed\n\n" + _record.table(("cell", "error"), rows)
