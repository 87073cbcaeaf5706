"""What was measured on a machine, as pure data: rates of one device, all devices busy.

`stowax.calibrate` makes one, `_calibration_file` keeps it, `_calibrated` puts its
figures in the place of those that makers quote. No JAX in here; how it prints is added
by `_calibrate.Calibration`.
"""

import dataclasses
from typing import Any, Literal

from .._record_json import NotSuchARecord, record_of

FORMAT_VERSION = 1

_TWO_LANES = 2 / 3
"""A part of the rate at which copies both ways take one and a half times as long."""

HostWork = Literal["compute_on", "CPU backend", "these devices"]
"""Who ran the host's update: JAX's `compute_on` from the device, XLA's CPU backend
beside it, or the CPU devices that were measured."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Copies of `bytes` each between a device and host memory, in bytes per second.

    `out` is device to host, `into` host to device; `both` is the rate of each direction
    while both are busy. All devices copy at once; the rates are of one.
    """

    bytes: int
    out: float
    into: float
    both: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """Something that could not be measured, and why."""

    what: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """Rates of one device of a machine while all `device_count` devices are busy.

    They are what programs reach, medians of repeated runs. `matrix` is operations per
    second of large products by dtype (multiply and add count as two, `float32` at JAX's
    default precision), `vector` those of elementwise float32 loops; `memory_bandwidth`
    is bytes per second that such loops read and write, `host_update` what the host's
    processor reads and writes for an update as Adam's, for each of the devices (`None`:
    not measured; `unmeasured` says why). `copies` are by size, smallest first; plans
    use the largest. With `one_memory` device and host memory are the same, and a copy
    between them crosses no link. `date` is ISO 8601, `seconds` what calibrating took.
    """

    device_kind: str
    platform: str
    host: str
    device_count: int
    date: str
    versions: dict[str, str]
    matrix: dict[str, float]
    memory_bandwidth: float | None
    vector: float | None
    copies: tuple[CopyRates, ...]
    host_update: float | None
    host_update_by: HostWork | None
    one_memory: bool
    unmeasured: tuple[Unmeasured, ...]
    seconds: float

    @property
    def link(self) -> CopyRates | None:
        """The rates that are sustained: those of the largest copies."""
        return self.copies[-1] if self.copies else None

    @property
    def together(self) -> float | None:
        """The part of the slower direction's rate that is left when both are busy.

        1 is a link whose directions do not know of one another, 0.5 one that carries
        one of them at a time.
        """
        if self.link is None:
            return None
        return self.link.both / min(self.link.out, self.link.into)

    @property
    def duplex(self) -> bool:
        """Whether both directions at once are nearer to one time than to two."""
        return self.together is None or self.together > _TWO_LANES

    def to_json(self) -> dict[str, Any]:
        """The calibration as JSON types, `format` first."""
        return {"format": FORMAT_VERSION, **dataclasses.asdict(self)}


def calibration_of(data: Any) -> CalibrationRecord:
    """The calibration that `to_json` wrote.

    **Raises:** `NotSuchARecord` with what is wrong, also for rates that are none.
    """
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise NotSuchARecord("it has no format")
    if data["format"] != FORMAT_VERSION:
        raise NotSuchARecord(
            f"it has format {data['format']}, and this stowax reads {FORMAT_VERSION}"
        )
    fields = {name: value for name, value in data.items() if name != "format"}
    found: CalibrationRecord = record_of(CalibrationRecord, fields)
    rates = [*found.matrix.values(), found.memory_bandwidth, found.vector]
    rates += [found.host_update]
    rates += [rate for c in found.copies for rate in (c.bytes, c.out, c.into, c.both)]
    if not all(rate is None or 0 < rate < float("inf") for rate in rates):
        raise NotSuchARecord("it has a rate that is none")
    if found.device_count < 1:
        raise NotSuchARecord("it is of no device")
    return found
