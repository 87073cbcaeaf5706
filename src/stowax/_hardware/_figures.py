"""Records for the hardware table: a figure with its origin, and a chip made of them.

The planner divides bytes by bandwidths and operations by throughputs, so a wrong figure
is a wrong plan, silently. Therefore every figure says whether it was quoted from a
maker's page, measured, or assumed by us, from where and when. `None` is a value: it
means unknown, and nobody may read it as zero. The table itself is in `_hardware.py`. No
JAX in here.
"""

import dataclasses
from typing import Literal

Kind = Literal["quoted", "measured", "assumed", "unknown"]

GB = 10**9
GIB = 2**30
TERA = 10**12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of one chip.

    `value` is in `unit`, or `None` where nobody knows. `kind` says how it was come by:
    `quoted` (the maker's or cloud's page), `measured` (by us, or published as
    measured), `assumed` (derived by us from other figures; the source says how),
    `unknown`.
    """

    value: float | None
    unit: str
    kind: Kind
    source: str
    date: str

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return self.value is not None

    def required(self) -> float:
        """The value, where a caller cannot go on without it.

        **Raises:** `ValueError` for an unknown figure.
        """
        if self.value is None:
            raise ValueError(f"an unknown figure was used: {self.source}")
        return self.value


DATE = "2026-11"
RATE, OPERATIONS = "bytes/second", "operations/second"


def quoted(value: float, unit: str, source: str) -> Figure:
    """A figure from the maker's or the cloud's own page."""
    return Figure(value=value, unit=unit, kind="quoted", source=source, date=DATE)


def measured(value: float, unit: str, source: str) -> Figure:
    """A figure that somebody measured; `source` says who or how."""
    return Figure(value=value, unit=unit, kind="measured", source=source, date=DATE)


def matrix_figures(
    source: str, tera: dict[str, float]
) -> tuple[tuple[str, Figure], ...]:
    """A maker's matrix throughput by dtype, of tera-operations/s; see `Chip.matrix`."""
    return tuple(
        (name, quoted(value * TERA, OPERATIONS, source)) for name, value in tera.items()
    )


def assumed(value: float, unit: str, source: str) -> Figure:
    """A figure derived by us; `source` says from what."""
    return Figure(value=value, unit=unit, kind="assumed", source=source, date=DATE)


def unknown(unit: str, source: str = "no primary source found") -> Figure:
    """A figure that nobody gave: the value is `None`."""
    return Figure(value=None, unit=unit, kind="unknown", source=source, date=DATE)


NO_RANGE = unknown(RATE, "no range is assumed")
"""The ends of a link that is measured, or that is no link."""

_NOT_MEASURED = unknown(RATE, "not measured; stowax calibrate does")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The figures of one chip; see `Figure`.

    `device_kinds` are the names that JAX reports (`device.device_kind`) for it.
    `allowed_bytes` is what one JAX device may use: for TPUs the limit that the compiler
    enforces. `link_out`, `link_in` are the nominal rates device→host and host→device,
    `sustained_out`, `sustained_in` what was seen to be left of them. `interconnect`
    counts both directions. `out_low`, `out_high`, `in_low` and `in_high` are the ends
    between which the link may really be, where nobody measured it on the machine.
    `host_bytes` is the memory of the usual virtual machine, which `chips_per_host`
    chips share, `host_bandwidth` that memory's rate at its peak.
    `host_update` is what the host's processor reaches in updates for one chip, all
    chips being served. `clock` is the rate of the compiler's cycle
    estimates.

    Rates of matrix products, loops and memory that are `measured` are what programs
    reach; of others a part is reached (`MATRIX_EFFICIENCY` and its like). The methods
    with `reached` in their name know that.
    """

    key: str
    title: str
    platform: Literal["tpu", "gpu", "cpu"]
    device_kinds: tuple[str, ...]
    devices_per_chip: int
    memory: Figure
    allowed_bytes: Figure
    memory_bandwidth: Figure
    matrix: tuple[tuple[str, Figure], ...]
    vector: Figure
    interconnect: Figure
    link_out: Figure
    link_in: Figure
    sustained_out: Figure
    sustained_in: Figure
    chips_per_host: int
    host_bytes: Figure
    host_bandwidth: Figure
    clock: Figure
    out_low: Figure = NO_RANGE
    out_high: Figure = NO_RANGE
    in_low: Figure = NO_RANGE
    in_high: Figure = NO_RANGE
    host_update: Figure = _NOT_MEASURED

    @property
    def launch_seconds(self) -> float:
        """Seconds that a device spends on starting one kernel."""
        return LAUNCH_SECONDS if self.platform == "gpu" else 0.0

    def matrix_rate(self, dtype: str) -> float | None:
        """Operations per second of a matrix product of `dtype` on one device.

        Multiply and add count as two. `float32` is at JAX's default precision: one
        bfloat16 pass on TPUs, TF32 on NVIDIA GPUs. `None` where unknown.

        >>> from stowax._hardware._hardware import CHIPS
        >>> CHIPS["h100"].matrix_rate("float32")
        494500000000000.0
        """
        return self._per_device(self._matrix_figure(dtype))

    def matrix_reached(self, dtype: str) -> float | None:
        """What large products of `dtype` reach of `matrix_rate`.

        >>> from stowax._hardware._hardware import CHIPS
        >>> CHIPS["h100"].matrix_reached("bfloat16") / 1e12
        741.75
        """
        return self._reached(self._matrix_figure(dtype), MATRIX_EFFICIENCY)

    def _matrix_figure(self, dtype: str) -> Figure | None:
        aliases = {"float16": "bfloat16", "float8_e5m2": "float8", "uint8": "int8"}
        name = "float8" if dtype.startswith("float8") else aliases.get(dtype, dtype)
        figures = dict(self.matrix)
        return figures.get(dtype, figures.get(name))

    def _per_device(self, figure: Figure | None) -> float | None:
        if figure is None or figure.value is None:
            return None
        return figure.value / self.devices_per_chip

    def _reached(self, figure: Figure | None, part: float) -> float | None:
        value = self._per_device(figure)
        if figure is None or value is None:
            return None
        return value if figure.kind == "measured" else value * part

    def memory_rate(self) -> float | None:
        """Bytes per second between one device and its own memory; `None` if unknown."""
        return self._per_device(self.memory_bandwidth)

    def memory_reached(self) -> float | None:
        """What fused loops reach of `memory_rate`."""
        return self._reached(self.memory_bandwidth, MEMORY_EFFICIENCY)

    def vector_rate(self) -> float | None:
        """Elementwise float32 operations per second of one device, or `None`."""
        return self._per_device(self.vector)

    def vector_reached(self) -> float | None:
        """What fused loops reach of `vector_rate`."""
        return self._reached(self.vector, VECTOR_EFFICIENCY)

    def host_rate(self) -> float | None:
        """Bytes per second that the host's processor reads and writes for one device.

        With every device of the host at it; `None` where the host's memory is not
        known.

        >>> from stowax._hardware._hardware import CHIPS
        >>> CHIPS["v6e"].host_rate() is None
        True
        """
        if self.host_update.known:
            return self._per_device(self.host_update)
        value = self._reached(self.host_bandwidth, HOST_EFFICIENCY)
        return None if value is None else value / self.chips_per_host

    def figures(self) -> tuple[tuple[str, Figure], ...]:
        """Every figure with its name, in table order."""
        rates = tuple((f"matrix {name}", figure) for name, figure in self.matrix)
        return (
            ("memory", self.memory),
            ("memory allowed per device", self.allowed_bytes),
            ("memory bandwidth", self.memory_bandwidth),
            *rates,
            ("vector float32", self.vector),
            ("interconnect, both directions", self.interconnect),
            ("link device to host", self.link_out),
            ("link host to device", self.link_in),
            ("link device to host, sustained", self.sustained_out),
            ("link host to device, sustained", self.sustained_in),
            ("link device to host, at least", self.out_low),
            ("link device to host, at most", self.out_high),
            ("link host to device, at least", self.in_low),
            ("link host to device, at most", self.in_high),
            ("host memory", self.host_bytes),
            ("host memory bandwidth, all chips", self.host_bandwidth),
            ("updates by the host's processor", self.host_update),
            ("clock", self.clock),
        )


# What programs reach of figures that nobody measured on the machine. The cost model and
# the simulation use the same, or they would contradict one another in one report.

MATRIX_EFFICIENCY = 0.75
"""Part of the nominal matrix throughput that large products reach: assumed (whole
training steps are published at 0.4 to 0.65, single large products at 0.7 to 0.9)."""

VECTOR_EFFICIENCY = 0.5
"""Part of the nominal vector throughput that fused loops reach: assumed."""

MEMORY_EFFICIENCY = 0.85
"""Part of the nominal memory bandwidth that fused loops reach: assumed (stream
benchmarks reach 0.8 to 0.93)."""

HOST_EFFICIENCY = 0.2
"""Part of the host memory's peak that an update written by XLA's CPU compiler reaches:
assumed, and meant to be low. Copies of other devices use the same memory; and updates
on the host were published as 2 to 3 times slower than copies of the state
(apple/axlearn 867), which is 0.2 to 0.3 of the peak for Adam beside a v5p."""

LAUNCH_SECONDS = 2e-6
"""Time between two GPU kernels of one stream. Assumed: no maker gives a figure."""

INTERCONNECT_EFFICIENCY = 0.8
"""Part of the nominal one-way interconnect bandwidth that collectives reach:
assumed."""
