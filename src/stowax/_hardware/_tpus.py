"""The TPUs of the table, by their cloud names; makers' pages read in November 2026."""

from ._figures import (
    GB,
    GIB,
    OPERATIONS,
    RATE,
    TERA,
    Chip,
    Figure,
    assumed,
    matrix_figures,
    measured,
    quoted,
    unknown,
)

_SCALING_BOOK = "How to Scale Your Model (jax-ml.github.io/scaling-book), part 2"


def _tpu(
    key: str,
    *,
    title: str,
    device_kinds: tuple[str, ...],
    memory_gib: float,
    allowed_gib: float,
    bandwidth: float,
    matrix: dict[str, float],
    vector_lanes: int,
    interconnect: float,
    link: Figure,
    chips_per_host: int,
    host_gb: float,
    machine: str,
    clock: Figure,
    devices_per_chip: int = 1,
    interconnect_source: str | None = None,
) -> Chip:
    """A TPU's row; `matrix` in tera-operations/s, bandwidths in GB/s."""
    page = f"Cloud TPU documentation, page {title}"
    bf16 = matrix["bfloat16"]
    rates = matrix_figures(page, matrix)
    f32 = assumed(
        bf16 * TERA, OPERATIONS, "one bfloat16 pass: JAX's default precision on TPU"
    )
    if clock.value is None:
        vector = unknown(OPERATIONS)
    else:
        vector = assumed(
            vector_lanes * clock.value,
            OPERATIONS,
            f"{vector_lanes} ALUs (8 x 128 x 4 per core, {_SCALING_BOOK}) x clock",
        )
    return Chip(
        key=key,
        title=title,
        platform="tpu",
        device_kinds=device_kinds,
        devices_per_chip=devices_per_chip,
        memory=quoted(memory_gib * GIB, "bytes", page),
        allowed_bytes=measured(
            int(allowed_gib * GIB),
            "bytes",
            "'available HBM' in the compiler's out-of-memory error, libtpu 0.0.42.1 "
            "and 0.0.50.1 (the smaller one)",
        ),
        memory_bandwidth=quoted(bandwidth * GB, RATE, page),
        matrix=(*rates, ("float32", f32)),
        vector=vector,
        interconnect=(
            assumed(interconnect * GB, RATE, interconnect_source)
            if interconnect_source
            else quoted(interconnect * GB, RATE, page)
        ),
        link_out=link,
        link_in=link,
        sustained_out=unknown(RATE, "no measurement with every chip busy found"),
        sustained_in=unknown(RATE, "no measurement with every chip busy found"),
        chips_per_host=chips_per_host,
        host_bytes=quoted(host_gb * GB, "bytes", f"Google Cloud, {machine}"),
        host_bandwidth=_host_bandwidth(key),
        clock=clock,
    )


# Processors of a host, their memory channels in all, and GB/s of each (DDR4-3200 and
# DDR5-4800). v5e: one processor for every four chips, so two for a host of eight.
_HOSTS = {
    "v4": ("two AMD EPYC 7B12, by Google's MLPerf Training 2.0", 16, 25.6),
    "v5e": ("two AMD EPYC 7B13, by Google's MLPerf Training 3.1", 16, 25.6),
    "v5p": ("two Intel Xeon 8481C, by Google's MLPerf Training 4.0", 16, 38.4),
}


def _host_bandwidth(key: str) -> Figure:
    if key not in _HOSTS:
        return unknown(RATE)
    processors, channels, each = _HOSTS[key]
    source = f"{processors}: {channels} channels of {each:g} GB/s"
    return assumed(channels * each * GB, RATE, source)


def _clock(value: float, cores_and_units: str) -> Figure:
    return assumed(
        value, "hertz", f"peak bfloat16 rate / operations per cycle ({cores_and_units})"
    )


TPUS = (
    _tpu(
        "v4",
        title="TPU v4",
        device_kinds=("TPU v4",),
        memory_gib=32,
        allowed_gib=30.75,
        bandwidth=1200,
        matrix={"bfloat16": 275, "int8": 275},
        vector_lanes=2 * 8 * 128 * 4,
        interconnect=600,
        interconnect_source="half of TPU v5p's: older pages gave 2400 to its 4800 Gbps",
        link=quoted(16 * GB, RATE, f"{_SCALING_BOOK}: PCIe, per chip"),
        chips_per_host=4,
        host_gb=407,
        machine="ct4p-hightpu-4t",
        clock=_clock(1.05e9, "2 cores x 4 units x 128 x 128 x 2"),
    ),
    _tpu(
        "v5e",
        title="TPU v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        memory_gib=16,
        allowed_gib=15.75,
        bandwidth=819,
        matrix={"bfloat16": 197, "int8": 393},
        vector_lanes=8 * 128 * 4,
        interconnect=400,
        link=quoted(15 * GB, RATE, f"{_SCALING_BOOK}: generic PCIe, per chip"),
        chips_per_host=8,
        host_gb=384,
        machine="ct5lp-hightpu-8t",
        clock=_clock(1.5e9, "4 units x 128 x 128 x 2"),
    ),
    _tpu(
        "v5p",
        title="TPU v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        memory_gib=95,
        allowed_gib=95.73,
        bandwidth=2765,
        matrix={"bfloat16": 459, "float8": 459, "int8": 918},
        vector_lanes=2 * 8 * 128 * 4,
        interconnect=1200,
        link=quoted(
            15 * GB,
            RATE,
            f"{_SCALING_BOOK}: generic PCIe, per chip; published offloading gains on "
            "v5p suggest that the real link is faster",
        ),
        chips_per_host=4,
        host_gb=448,
        machine="ct5p-hightpu-4t",
        clock=_clock(1.75e9, "2 cores x 4 units x 128 x 128 x 2"),
    ),
    _tpu(
        "v6e",
        title="TPU v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        memory_gib=32,
        allowed_gib=31.24,
        bandwidth=1638,
        matrix={"bfloat16": 918, "int8": 1836},
        vector_lanes=8 * 128 * 4,
        interconnect=800,
        link=quoted(32 * GB, RATE, f"{_SCALING_BOOK}: PCIe, per chip"),
        chips_per_host=8,
        host_gb=1440,
        machine="ct6e-standard-8t",
        clock=_clock(1.75e9, "4 x 256 x 256 x 2, two passes of two units"),
    ),
    _tpu(
        "7x",
        title="TPU7x",
        device_kinds=("TPU7x",),
        memory_gib=192,
        allowed_gib=94.74,
        bandwidth=7380,
        matrix={"bfloat16": 2307, "float8": 4614},
        vector_lanes=2 * 8 * 128 * 4,
        interconnect=1200,
        link=unknown(RATE),
        chips_per_host=4,
        host_gb=960,
        machine="tpu7x-standard-4t",
        clock=unknown("hertz"),
        devices_per_chip=2,
    ),
)
