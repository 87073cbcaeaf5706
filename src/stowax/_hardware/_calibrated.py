"""A chip's figures with those in their place that were measured on the machine.

What is measured is what programs reach, so nothing is taken off it again: figures of
the kind `measured` have no efficiency (`Chip`). What was not measured stays as it was
quoted or assumed, and says so.
"""

import dataclasses
from typing import Any

from .._records._calibration import CalibrationRecord
from ._figures import NO_RANGE, OPERATIONS, RATE, Chip, Figure

_SHARED = 0.8
"""Part of the rate below which the two directions of a link are said to share it."""


def calibrated(chip: Chip, found: CalibrationRecord) -> Chip:
    """`chip` with the figures of a calibration.

    **Arguments:** `chip` is the table's for the device, or any with the figures to fall
    back to; `found` is per device, figures are per chip.
    """

    def figure(rate: float, unit: str) -> Figure:
        return Figure(
            value=rate * chip.devices_per_chip,
            unit=unit,
            kind="measured",
            source=origin(found),
            date=found.date,
        )

    matrix = dict(chip.matrix)
    matrix |= {name: figure(rate, OPERATIONS) for name, rate in found.matrix.items()}
    changed: dict[str, Any] = {"matrix": tuple(matrix.items())}
    for name, rate, unit in (
        ("memory_bandwidth", found.memory_bandwidth, RATE),
        ("vector", found.vector, OPERATIONS),
        ("host_update", found.host_update, RATE),
    ):
        if rate is not None:
            changed[name] = figure(rate, unit)
    if found.link is not None:
        changed["sustained_out"] = figure(found.link.out, RATE)
        changed["sustained_in"] = figure(found.link.into, RATE)
        changed |= dict.fromkeys(("out_low", "out_high", "in_low", "in_high"), NO_RANGE)
    return dataclasses.replace(chip, **changed)


def origin(found: CalibrationRecord) -> str:
    """Where the figures of a calibration are from, in words."""
    count = found.device_count
    busy = "its one device busy" if count == 1 else f"all {count} devices busy"
    return f"stowax calibrate on {found.host}, {busy}"


def calibration_notes(found: CalibrationRecord) -> tuple[str, ...]:
    """What a plan has to say that rests on a calibration."""
    notes = [f"rates are those measured on {found.host}, {found.date[:10]}"]
    missing = [item.what for item in found.unmeasured]
    if missing:
        notes[0] += f"; not measured, and as quoted or assumed: {', '.join(missing)}"
    if found.one_memory:
        notes.append(
            "device and host memory are the same here: what was measured of the link "
            "is a copy within it"
        )
    elif found.link is not None and (found.together or 1.0) < _SHARED:
        how = "both at once" if found.duplex else "one direction at a time"
        notes.append(
            f"with both directions of the host link busy each has "
            f"{found.link.both / 1e9:.3g} GB/s, alone {found.link.out / 1e9:.3g} out "
            f"and {found.link.into / 1e9:.3g} in; the model reckons with the latter, "
            f"the schedule is simulated with {how}"
        )
    return tuple(notes)
