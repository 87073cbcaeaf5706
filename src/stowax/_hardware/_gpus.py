"""The GPUs of the table, by their product names; data sheets read in November 2026."""

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
from ._gpu_targets import gpu_memory_bytes


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
    link_is: str = "",
) -> Chip:
    """A GPU's row; `matrix` in dense tera-operations/s, bandwidths in GB/s."""
    sheet = f"NVIDIA {title} data sheet (dense rates)"
    specs = "openxla/xla, xla/backends/gpu/target_config/specs"
    memory = float(gpu_memory_bytes(key))
    described = key != "gh200"  # OpenXLA has no description of it
    ticks = clock * 1e9
    return Chip(
        key=key,
        title=title,
        platform="gpu",
        device_kinds=device_kinds,
        devices_per_chip=1,
        memory=quoted(memory, "bytes", specs if described else sheet),
        allowed_bytes=assumed(
            int(memory * 0.75),
            "bytes",
            "75 % of the memory: JAX's default (XLA_PYTHON_CLIENT_MEM_FRACTION)",
        ),
        memory_bandwidth=quoted(bandwidth * GB, RATE, sheet),
        matrix=matrix_figures(sheet, matrix),
        vector=quoted(vector * TERA, OPERATIONS, sheet),
        interconnect=quoted(interconnect * GB, RATE, sheet + ", NVLink"),
        link_out=quoted(link * GB, RATE, sheet + link_is),
        link_in=quoted(link * GB, RATE, sheet + link_is),
        sustained_out=sustained[0],
        sustained_in=sustained[1],
        chips_per_host=chips_per_host,
        host_bytes=quoted(host_gb * GB, "bytes", host_source),
        host_bandwidth=unknown(RATE, "not asked for: no GPU updates on its host"),
        clock=quoted(ticks, "hertz", specs)
        if described
        else assumed(ticks, "hertz", "as the H100's, the same GPU"),
    )


_H100_LINK = measured(55 * GB, RATE, "published PCIe 5.0 x16 copy measurements")
_AS_H100 = assumed(55 * GB, RATE, "as measured on the H100: the same PCIe 5.0 x16")
_TO_A_PCIE5_HOST = assumed(
    55 * GB, RATE, "as measured on the H100: the hosts' processors have PCIe 5.0 x16"
)
_MEGATRON = "nvbandwidth in NVIDIA/Megatron-LM, issue 6491"
_C2C = ", NVLink-C2C: 900 GB/s, both directions, for two GPUs"
_HOPPER_MATRIX = {"bfloat16": 989, "float32": 494.5, "float8": 1979, "int8": 1979}

GPUS = (
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
            measured(170 * GB, RATE, f"{_MEGATRON}: 170, four modules; one alone 295"),
            measured(
                411 * GB, RATE, f"{_MEGATRON}: 411 to 421, four modules; one alone 342"
            ),
        ),
        chips_per_host=1,
        host_gb=480,
        host_source="NVIDIA GH200 data sheet, LPDDR5X",
        clock=1.98,
    ),
    _gpu(
        "gb200",
        title="GB200 NVL72",
        device_kinds=("NVIDIA GB200",),
        bandwidth=8000,
        matrix={"bfloat16": 2500, "float32": 1250, "float8": 5000, "int8": 5000},
        vector=80,
        interconnect=1800,
        link=225,
        link_is=_C2C,
        sustained=(
            assumed(193 * GB, RATE, "as measured on the GB300: the same NVLink-C2C"),
            assumed(211 * GB, RATE, "as measured on the GB300: the same NVLink-C2C"),
        ),
        chips_per_host=4,
        host_gb=884,
        host_source="Google Cloud, a4x-highgpu-4g",
        clock=2.062,
    ),
    _gpu(
        "b300",
        title="HGX B300",
        device_kinds=("NVIDIA B300 SXM6 AC", "NVIDIA B300"),
        bandwidth=8000,
        matrix={"bfloat16": 2250, "float32": 1125, "float8": 4500, "int8": 150},
        vector=75,
        interconnect=1800,
        link=128,
        link_is=", PCIe 6.0 x16 at the GPU",
        sustained=(_TO_A_PCIE5_HOST, _TO_A_PCIE5_HOST),
        chips_per_host=8,
        host_gb=4096 * GIB / GB,
        host_source="AWS, p6-b300.48xlarge",
        clock=1.965,
    ),
    _gpu(
        "gb300",
        title="GB300 NVL72",
        device_kinds=("NVIDIA GB300",),
        bandwidth=8000,
        matrix={"bfloat16": 2500, "float32": 1250, "float8": 5000, "int8": 165},
        vector=80,
        interconnect=1800,
        link=225,
        link_is=_C2C,
        sustained=(
            measured(193 * GB, RATE, f"{_MEGATRON}; 182 with all four GPUs busy"),
            measured(211 * GB, RATE, f"{_MEGATRON}; 169 with all four GPUs busy"),
        ),
        chips_per_host=4,
        host_gb=960,
        host_source="Google Cloud, a4x-maxgpu-4g-metal",
        clock=2.07,
    ),
)
