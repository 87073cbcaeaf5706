"""A `Target`: devices to build meshes from, hardware figures, and a compiler.

`stowax.target` makes one by name. For a chip that is not attached the compiler is real
all the same: libtpu and JAX's CUDA plugin compile for any TPU slice and any NVIDIA GPU
without one, and XLA's memory figures and schedule come out of it.

The devices of a compile-only TPU are libtpu's; those of a compile-only GPU are CPU
stand-ins, because real compile-only GPUs have no memories and JAX would drop every
memory kind in silence. Neither can hold an array or run anything.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _jax_targets
from .._errors import ArgumentError
from .._hardware._figures import Chip
from .._hardware._pinned import pool_bytes, smaller_pool
from .._records._stages import Link
from .._units import format_bytes
from . import _compiled, _specs
from ._compiled import CompiledProgram, LoweredProgram

HOST_FRACTION = 0.8
"""Part of a host's memory that plans may fill.

The rest is for the operating system, the input pipeline and the program itself."""

_FALLBACK_LINK = 15e9  # bytes/second: the slowest link in the table (PCIe 3.0 x16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """A machine to plan for. Made by `stowax.target`.

    `device_bytes` is what the chip allows per device, `memory_bytes` what it has;
    `host_bytes` is the host memory per device that plans may fill, `link` the host link
    of one device in bytes per second. Where that is assumed, not measured on the
    machine, `link_range` has its ends: at the least, and at the most. With `duplex`
    both directions have that rate at once.
    `pinned_bytes` is the host memory per device that
    a GPU's plugin pins (`None` where nothing is known to limit it): as this process has
    it, or by default on a machine that is not there. `notes` are things about these
    figures that a user has to know. A `compile_only` target can be compiled for but
    runs nothing.
    """

    name: str
    platform: str
    chip: Chip
    devices: tuple[Any, ...]
    device_bytes: int
    memory_bytes: int
    host_bytes: int
    link: Link
    compile_only: bool
    notes: tuple[str, ...] = ()
    compile_devices: tuple[Any, ...] | None = None
    pinned_bytes: int | None = None
    link_range: tuple[Link, Link] | None = None
    duplex: bool = True

    def __repr__(self) -> str:
        there = "compile-only" if self.compile_only else "attached"
        devices = f"{self.device_count} device{'s' * (self.device_count != 1)}"
        return (
            f"Target({self.name!r}, {there}, {devices} of "
            f"{format_bytes(self.device_bytes)}, each "
            f"{format_bytes(self.host_bytes)} of host memory)"
        )

    @property
    def stood_in(self) -> bool:
        """Whether other devices stand in for the target's, to trace over."""
        return self.compile_devices is not None

    @property
    def device_kind(self) -> str:
        """What JAX calls the devices that programs are compiled for."""
        return (self.compile_devices or self.devices)[0].device_kind

    @property
    def device_count(self) -> int:
        """Number of devices, as JAX counts them."""
        return len(self.devices)

    def mesh(self, shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
        """A `jax.sharding.Mesh` over this target's devices.

        **Arguments:** `shape` and `axis_names` as for `jax.make_mesh`; a smaller mesh
        takes the first devices.

        >>> stowax.target("v5p-8").mesh((2, 2), ("data", "model")).size
        4
        """
        shape, axis_names = tuple(shape), tuple(axis_names)
        count = math.prod(shape)
        if len(shape) != len(axis_names) or not 0 < count <= self.device_count:
            raise ArgumentError(
                "shape",
                f"{shape} for axes {axis_names} on {self.name}, which has "
                f"{self.device_count} device{'s' * (self.device_count != 1)}",
                "Write one size per axis, with a product of at most "
                f"{self.device_count}.",
            )
        return Mesh(
            _jax_targets.arrange_devices(shape, self.devices[:count]), axis_names
        )

    def sharding(
        self,
        *partition: Any,
        mesh: Mesh | None = None,
        memory_kind: str | None = None,
    ) -> NamedSharding:
        """A `NamedSharding` on this target, by default one device of it.

        >>> stowax.target("v5e-4").sharding(memory_kind="pinned_host").memory_kind
        'pinned_host'
        """
        if mesh is None:
            return _specs.one_device_sharding(self.devices[0], memory_kind)
        return NamedSharding(mesh, PartitionSpec(*partition), memory_kind=memory_kind)

    def specs(self, *specs: Any) -> tuple[Any, ...]:
        """`specs` as `ShapeDtypeStruct`s on this target.

        What has no sharding goes to one device, unless others are spread over several:
        then it is left open, as uncommitted arrays are under `jax.jit`.
        """
        spread = _specs.spread_specs(self.devices, specs, self.name)
        if _specs.any_sharded(spread):
            return spread
        return _specs.put_specs(self.devices, spread)

    def lower(self, jitted: Any, *specs: Any) -> LoweredProgram:
        """`jitted` lowered for this target; arguments as for `compile`."""
        return _compiled.lower(
            self.name, self.devices, self.compile_devices, jitted, specs
        )

    def compile(
        self, jitted: Any, *specs: Any, compiler_options: dict[str, Any] | None = None
    ) -> CompiledProgram:
        """`jitted` compiled for this target, memory kinds honoured.

        **Arguments:** `jitted` is what `jax.jit` returned; donation and the like stay
        as written there. `specs` are pytrees of arrays or `jax.ShapeDtypeStruct`s,
        sharded over this target's devices or not (then for one device).
        `compiler_options` are XLA's.

        **Raises:** `ArgumentError` for what a framework jitted, and for shardings over
        other devices; `OutOfMemoryCompileError` and `CompileError` with the compiler's
        words.

        >>> target = stowax.target("v5p-8")
        >>> host = target.sharding(memory_kind="pinned_host")
        >>> spec = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=host)
        >>> program = target.compile(jax.jit(lambda x: x), spec)
        >>> program.memory_analysis().host_argument_size_in_bytes
        4096
        """
        own = getattr(jitted, "stowax_compiler_options", {})
        return self.lower(jitted, *specs).compile({**own, **(compiler_options or {})})


def make_target(
    name: str,
    chip: Chip,
    devices: tuple[Any, ...],
    *,
    platform: str | None = None,
    attached: bool = False,
    compile_devices: tuple[Any, ...] | None = None,
    notes: Sequence[str] = (),
    duplex: bool = True,
) -> Target:
    """A `Target` from the figures of `chip` and, where attached, of this machine."""
    platform = platform or chip.platform
    notes = list(notes)
    if attached:
        allowed, memory, host = _attached_bytes(chip, devices)
    else:
        memory = int(chip.memory.required() / chip.devices_per_chip)
        allowed = int(chip.allowed_bytes.required())
        per_host = chip.chips_per_host * chip.devices_per_chip
        host = int(chip.host_bytes.required() * HOST_FRACTION / per_host)
    pinned = None
    if platform == "gpu":
        pinned = pool_bytes(os.environ if attached else {})
        if not attached and (fraction := _memory_fraction()) is not None:
            allowed = int(memory * fraction)
    if pinned is not None and attached:
        # Known when the backend was started; what is set since then changes nothing.
        less = smaller_pool(host, pinned)
        notes += [less] if less else []
        host = min(host, pinned)
    memory = max(memory, allowed)  # v5p: the page says 95 GiB, the compiler allows 95.7
    if chip.link_out.value is None:
        notes.append("the host link's rate is unknown: planned with 15 GB/s")
    return Target(
        name=name,
        platform=platform,
        chip=chip,
        devices=devices,
        device_bytes=allowed,
        memory_bytes=memory,
        host_bytes=host,
        link=_link(chip),
        compile_only=not attached,
        notes=tuple(notes),
        compile_devices=compile_devices,
        pinned_bytes=pinned,
        link_range=_link_range(chip),
        duplex=duplex,
    )


def _link(chip: Chip) -> Link:
    """What was measured where there is a measurement, else what was quoted."""
    out = chip.sustained_out.value or chip.link_out.value
    into = chip.sustained_in.value or chip.link_in.value
    return Link(
        device_to_host=out / chip.devices_per_chip if out else _FALLBACK_LINK,
        host_to_device=into / chip.devices_per_chip if into else _FALLBACK_LINK,
    )


def _link_range(chip: Chip) -> tuple[Link, Link] | None:
    """The ends of the link's range per device, with `_link` between them."""
    if chip.out_low.value is None:
        return None
    each = chip.devices_per_chip
    link = _link(chip)
    out, into = link.device_to_host, link.host_to_device
    return (
        Link(
            device_to_host=min(chip.out_low.required() / each, out),
            host_to_device=min(chip.in_low.required() / each, into),
        ),
        Link(
            device_to_host=max(chip.out_high.required() / each, out),
            host_to_device=max(chip.in_high.required() / each, into),
        ),
    )


def _memory_fraction() -> float | None:
    """The part of a GPU's memory that the user lets JAX have, if they said so."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        try:
            return float(os.environ[name])
        except (KeyError, ValueError):
            continue
    return None


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    if not hasattr(os, "sysconf"):
        raise ArgumentError(
            "target",
            "a system that does not say how much memory it has",
            "stowax runs on Linux and macOS; under Windows use WSL.",
        )
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _attached_bytes(chip: Chip, devices: tuple[Any, ...]) -> tuple[int, int, int]:
    """Device bytes allowed and present, and host bytes, per device of this machine."""
    machine = host_memory()
    mine = [d for d in devices if d.process_index == jax.process_index()]
    local = max(1, len(mine))
    host = int(machine * HOST_FRACTION / local)
    statistics = (mine or devices)[0].memory_stats() or {}
    if limit := statistics.get("bytes_limit"):
        return int(limit), int(chip.memory.value or limit), host
    if chip.allowed_bytes.value is not None:
        memory = int((chip.memory.value or 0) / chip.devices_per_chip)
        return int(chip.allowed_bytes.value), memory, host
    # A CPU: device and host memory are the same memory, shared out in halves.
    return host // 2, machine // local, host // 2
