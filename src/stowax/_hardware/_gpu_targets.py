"""What XLA has to be told about a GPU that is not there: one description per chip.

A compile-only GPU target is a `GpuTargetConfigProto` in text form. XLA plans with it:
the memory size and bandwidth steer its cost model, the shared memory and register
limits its kernels. The figures are the chips' own, as the driver reports them; OpenXLA
publishes them per chip (openxla/xla, folder `xla/backends/gpu/target_config/specs`,
read November 2026). Only facts that every XLA since jaxlib 0.10 understands are written
out: a text proto with one field that the library does not know is refused as a whole.
"""

_HOPPER = {
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "core_count": 132,
    "fpus_per_core": 128,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
    "capability": (9, 0, True),
}
_BLACKWELL = {
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "fpus_per_core": 128,
}
# The GPUs of Grace's modules have a few more cores, and a higher clock.
_GRACE_BLACKWELL = _BLACKWELL | {
    "core_count": 152,
    "l2_cache_size": 135528448,
    "memory_bandwidth": 7928064000000,
}

# memory_bandwidth in bytes per second, device_memory_size in bytes.
_GPUS = {
    "a100-80": {
        "description": "NVIDIA A100-SXM4-80GB",
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "core_count": 108,
        "fpus_per_core": 64,
        "l2_cache_size": 41943040,
        "clock_rate_ghz": 1.41,
        "memory_bandwidth": 2039040000000,
        "device_memory_size": 85100068864,
        "capability": (8, 0, False),
    },
    "h100": _HOPPER
    | {
        "description": "NVIDIA H100 80GB HBM3",
        "memory_bandwidth": 3352320000000,
        "device_memory_size": 84942979072,
    },
    "h200": _HOPPER
    | {
        "description": "NVIDIA H200 141GB HBM3e",
        "memory_bandwidth": 4800000000000,
        "device_memory_size": 151397597184,
    },
    # The same die as the H100, with the memory of the 96 GB Grace Hopper module.
    # OpenXLA publishes no description of it; size and bandwidth are the data sheet's.
    "gh200": _HOPPER
    | {
        "description": "NVIDIA GH200 480GB",
        "memory_bandwidth": 4000000000000,
        "device_memory_size": 102005473280,
    },
    "b200": _BLACKWELL
    | {
        "description": "NVIDIA B200",
        "core_count": 148,
        "l2_cache_size": 132644864,
        "clock_rate_ghz": 1.965,
        "memory_bandwidth": 7672320000000,
        "device_memory_size": 191514411008,
        "capability": (10, 0, True),
    },
    "gb200": _GRACE_BLACKWELL
    | {
        "description": "NVIDIA GB200",
        "clock_rate_ghz": 2.062,
        "device_memory_size": 197897748480,
        "capability": (10, 0, True),
    },
    # Blackwell Ultra: capability 10.3.
    "b300": _BLACKWELL
    | {
        "description": "NVIDIA B300",
        "core_count": 158,
        "l2_cache_size": 135528448,
        "clock_rate_ghz": 1.965,
        "memory_bandwidth": 7936000000000,
        "device_memory_size": 297021865984,
        "capability": (10, 3, True),
    },
    "gb300": _GRACE_BLACKWELL
    | {
        "description": "NVIDIA GB300",
        "clock_rate_ghz": 2.07,
        "device_memory_size": 297021079552,
        "capability": (10, 3, True),
    },
}

# The same on every chip since Ampere.
_COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}

GPU_CHIPS = tuple(_GPUS)


def gpu_memory_bytes(chip: str) -> int:
    """Device memory of `chip` in bytes, as its driver reports it.

    >>> gpu_memory_bytes("h200")
    151397597184
    """
    return _GPUS[chip]["device_memory_size"]


def gpu_target_config(chip: str) -> str:
    """The `GpuTargetConfigProto` of `chip` as text, for a compile-only topology.

    >>> "core_count: 132" in gpu_target_config("h200")
    True
    """
    figures = dict(_GPUS[chip])
    description = figures.pop("description")
    major, minor, accelerated = figures.pop("capability")
    feature = "feature_extension: ACCELERATED_FEATURES" if accelerated else ""
    fields = "\n  ".join(
        f"{key}: {value}" for key, value in (_COMMON | figures).items()
    )
    return f"""gpu_device_info {{
  {fields}
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  device_vendor: "NVIDIA Corporation"
  name: "{description}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{description}"
"""
