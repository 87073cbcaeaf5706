"""What the chips can do: one table of figures, each with where it is from.

The chips that stowax can plan for, TPUs by their cloud names and GPUs by their product
names. Figures are per chip; the methods of `Chip` give them per device as JAX counts
devices (a TPU7x chip is two). Makers' pages were read in November 2026.

>>> CHIPS["v5p"].matrix_rate("bfloat16")
459000000000000.0
"""

import types
from collections.abc import Mapping

from ._figures import (
    GB,
    GIB,
    OPERATIONS,
    RATE,
    TERA,
    Chip,
    Figure,
    assumed,
    measured,
    quoted,
    unknown,
)
from ._gpu_targets import gpu_memory_bytes
from ._link_ranges import with_link_range


def _matrix(source: str, tera: dict[str, float]) -> tuple[tuple[str, Figure], ...]:
    return tuple(
        (name, quoted(value * TERA, OPERATIONS, source)) for name, value in tera.items()
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
    rates = _matrix(page, matrix)
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


_TPUS = (
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


def _gpu(
    key: str,
    *,
    title: str,
    device_kinds: tuple[str, ...],
    bandwidth: float,
    matrix: dict[str, float],
    vector: float,
    interconnect: float,
    link: float,
    sustained: tuple[Figure, Figure],
    chips_per_host: int,
    host_gb: float,
    host_source: str,
    clock: float,
) -> Chip:
    """A GPU's row; `matrix` in dense tera-operations/s, bandwidths in GB/s."""
    sheet = f"NVIDIA {title} data sheet (dense rates)"
    specs = "openxla/xla, xla/backends/gpu/target_config/specs"
    memory = float(gpu_memory_bytes(key))
    return Chip(
        key=key,
        title=title,
        platform="gpu",
        device_kinds=device_kinds,
        devices_per_chip=1,
        memory=quoted(memory, "bytes", specs if key != "gh200" else sheet),
        allowed_bytes=assumed(
            int(memory * 0.75),
            "bytes",
            "75 % of the memory: JAX's default (XLA_PYTHON_CLIENT_MEM_FRACTION)",
        ),
        memory_bandwidth=quoted(bandwidth * GB, RATE, sheet),
        matrix=_matrix(sheet, matrix),
        vector=quoted(vector * TERA, OPERATIONS, sheet),
        interconnect=quoted(interconnect * GB, RATE, sheet + ", NVLink"),
        link_out=quoted(link * GB, RATE, sheet),
        link_in=quoted(link * GB, RATE, sheet),
        sustained_out=sustained[0],
        sustained_in=sustained[1],
        chips_per_host=chips_per_host,
        host_bytes=quoted(host_gb * GB, "bytes", host_source),
        host_bandwidth=unknown(RATE, "not asked for: no GPU updates on its host"),
        clock=quoted(clock * 1e9, "hertz", specs),
    )


_H100_LINK = measured(55 * GB, RATE, "published PCIe 5.0 x16 copy measurements")
_AS_H100 = assumed(55 * GB, RATE, "as measured on the H100: the same PCIe 5.0 x16")
_HOPPER_MATRIX = {"bfloat16": 989, "float32": 494.5, "float8": 1979, "int8": 1979}

_GPUS = (
    _gpu(
        "a100-80",
        title="A100 80GB SXM",
        device_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        bandwidth=2039,
        matrix={"bfloat16": 312, "float32": 156, "int8": 624},
        vector=19.5,
        interconnect=600,
        link=32,
        sustained=(
            measured(25 * GB, RATE, "published PCIe 4.0 x16 copy measurements"),
            measured(
                25 * GB,
                RATE,
                "published PCIe 4.0 x16 copy measurements; 11 GB/s while the other "
                "direction is busy too",
            ),
        ),
        chips_per_host=8,
        host_gb=1360,
        host_source="Google Cloud, a2-ultragpu-8g",
        clock=1.41,
    ),
    _gpu(
        "h100",
        title="H100 SXM",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        bandwidth=3350,
        matrix=_HOPPER_MATRIX,
        vector=67,
        interconnect=900,
        link=64,
        sustained=(_H100_LINK, _H100_LINK),
        chips_per_host=8,
        host_gb=1872,
        host_source="Google Cloud, a3-highgpu-8g",
        clock=1.98,
    ),
    _gpu(
        "h200",
        title="H200 SXM",
        device_kinds=("NVIDIA H200",),
        bandwidth=4800,
        matrix=_HOPPER_MATRIX,
        vector=67,
        interconnect=900,
        link=64,
        sustained=(_AS_H100, _AS_H100),
        chips_per_host=8,
        host_gb=2952,
        host_source="Google Cloud, a3-ultragpu-8g",
        clock=1.98,
    ),
    _gpu(
        "b200",
        title="B200",
        device_kinds=("NVIDIA B200",),
        bandwidth=8000,
        matrix={"bfloat16": 2250, "float32": 1125, "float8": 4500, "int8": 4500},
        vector=75,
        interconnect=1800,
        link=64,
        sustained=(_AS_H100, _AS_H100),
        chips_per_host=8,
        host_gb=3968,
        host_source="Google Cloud, a4-highgpu-8g",
        clock=1.965,
    ),
    _gpu(
        "gh200",
        title="GH200 96GB",
        device_kinds=("NVIDIA GH200 480GB",),
        bandwidth=4000,
        matrix=_HOPPER_MATRIX,
        vector=67,
        interconnect=900,
        link=450,
        sustained=(
            measured(297 * GB, RATE, "published NVLink-C2C copy measurements"),
            measured(375 * GB, RATE, "published NVLink-C2C copy measurements"),
        ),
        chips_per_host=1,
        host_gb=480,
        host_source="NVIDIA GH200 data sheet, LPDDR5X",
        clock=1.98,
    ),
)

_CPU = Chip(
    key="cpu",
    title="CPU",
    platform="cpu",
    device_kinds=("cpu",),
    devices_per_chip=1,
    memory=unknown("bytes", "the machine's own; read when the target is made"),
    allowed_bytes=unknown("bytes", "the machine's own; read when the target is made"),
    memory_bandwidth=assumed(20 * GB, RATE, "order of magnitude of one desktop socket"),
    matrix=tuple(
        (name, assumed(0.1 * TERA, OPERATIONS, "order of magnitude of a few cores"))
        for name in ("bfloat16", "float32")
    ),
    vector=assumed(0.02 * TERA, OPERATIONS, "order of magnitude of a few cores"),
    interconnect=unknown(RATE, "devices of one process share its memory"),
    link_out=assumed(10 * GB, RATE, "a copy within main memory"),
    link_in=assumed(10 * GB, RATE, "a copy within main memory"),
    sustained_out=unknown(RATE, "not measured"),
    sustained_in=unknown(RATE, "not measured"),
    chips_per_host=1,
    host_bytes=unknown("bytes", "the machine's own; read when the target is made"),
    host_bandwidth=unknown(RATE, "device and host memory are the same memory"),
    clock=unknown("hertz", "the CPU compiler gives no cycle estimates"),
)

CHIPS: Mapping[str, Chip] = types.MappingProxyType(
    {chip.key: with_link_range(chip) for chip in (*_TPUS, *_GPUS, _CPU)}
)
"""Every chip of the table by its key."""


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`, or `None` if it is not in the table.

    >>> chip_of_kind("NVIDIA H200").key
    'h200'
    """
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip
    return None
