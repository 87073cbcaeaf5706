"""How much host memory the CUDA plugin pins, and what to set for more.

What a plan puts into host memory is pinned: it comes out of a pool that the plugin
sizes when JAX starts its backend. A step that needs more ends as if the *device* were
out of memory. The host's own memory may be far larger; so may a plan be.

How the pool is sized: `GetGpuHostAllocator` in `xla/pjrt/gpu/gpu_helpers.cc` (XLA, read
in 2026). `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` is a whole number of units of 2^30 bytes,
GiB in spite of its name; 64 where it is not set, or 16 with
`XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE` set to true. What is no whole number is an error
in the log, and the default. `xla/pjrt/gpu/se_gpu_pjrt_client.cc` makes one such pool,
for buffers in host memory, for every device that a process drives: so the limit is per
device, as `host_bytes` is.
"""

from collections.abc import Mapping

from .._units import format_bytes

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PREALLOCATE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_UNIT = 1 << 30
_DEFAULT, _DEFAULT_PREALLOCATED = 64, 16


def pool_bytes(environment: Mapping[str, str]) -> int:
    """Host memory per device that the plugin pins, if it starts in `environment`.

    >>> pool_bytes({}) == 64 * 2**30
    True
    """
    ahead = environment.get(_PREALLOCATE, "").lower() in ("1", "true")
    default = _DEFAULT_PREALLOCATED if ahead else _DEFAULT
    try:
        return int(environment[VARIABLE]) * _UNIT
    except (KeyError, ValueError):
        return default * _UNIT


def setting_for(host_bytes: int) -> str:
    """The setting under which the pool holds `host_bytes`.

    >>> setting_for(100 * 2**30 + 1)
    'XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=101'
    """
    return f"{VARIABLE}={-(-host_bytes // _UNIT)}"


def beyond_the_pool(host_bytes: int, pool: int, *, attached: bool) -> str | None:
    """What to do before a plan can run that needs `host_bytes` of `pool`, if anything.

    `attached` says that the pool is that of this process, else the plugin's default.
    """
    if host_bytes <= pool:
        return None
    whose = "pins here" if attached else "pins by default"
    return (
        f"it needs {format_bytes(host_bytes)} of pinned host memory per device, and "
        f"the CUDA plugin {whose} at most {format_bytes(pool)}: set "
        f"{setting_for(host_bytes)} in the environment, before JAX is imported"
    )


def smaller_pool(host_bytes: int, pool: int) -> str | None:
    """What keeps plans on this machine from filling the `host_bytes` that they may."""
    if host_bytes <= pool:
        return None
    most = max(host_bytes // _UNIT, 1) * _UNIT
    return (
        f"plans put at most {format_bytes(pool)} per device into host memory, which is "
        f"what the CUDA plugin pins here: for {format_bytes(host_bytes)} set "
        f"{setting_for(most)} in the environment, before JAX is imported"
    )
