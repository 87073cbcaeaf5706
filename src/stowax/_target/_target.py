"""The machine planned for, by name: `stowax.target("v5p-8")`, there or not.

Nothing here touches the process's own backend: `jax.devices()` is what it was, and
`JAX_PLATFORMS` need not be set. The compilers load on first use (a tenth of a second
each); a second target of the same kind costs nothing.

Names that look alike count differently, as the clouds do: `v5p-8` is 8 cores on 4
chips, `v6e-8` is 8 chips.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import jax

from .. import _jax_targets
from .._errors import ArgumentError, CompileError, MissingExtraError
from .._hardware._calibrated import calibrated, calibration_notes
from .._hardware._figures import Chip
from .._hardware._gpu_targets import GPU_CHIPS, gpu_target_config
from .._hardware._hardware import CHIPS, chip_of_kind
from .._records._calibration import CalibrationRecord
from ._calibration_file import find_calibration
from ._machine import Target, make_target

if TYPE_CHECKING:
    from ..report import TargetRow

# Chips per slice -> shape of the slice, from the clouds' lists of configurations.
_SLICES_2D = {
    1: (1, 1),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
_SLICES_3D = {
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    256: (4, 8, 8),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
}
# Name -> chip, slices, what the number in the name counts per chip (v5p-8: 8 cores).
_TPU_NAMES = {
    "v4": ("v4", _SLICES_3D, 2),
    "v5p": ("v5p", _SLICES_3D, 2),
    "tpu7x": ("7x", {1: (1, 1, 1)} | _SLICES_3D, 2),
    "v5e": ("v5e", _SLICES_2D, 1),
    "v5litepod": ("v5e", _SLICES_2D, 1),
    "v6e": ("v6e", _SLICES_2D, 1),
}
_GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_RACK = 72  # GPUs of a GB200 NVL72 and of a GB300 NVL72
_AMD = re.compile(r"mi\d{3}[a-z]?(x\d+)?")
_ATTACHED = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetName:
    """One line of `stowax.targets()`: a name that `stowax.target` takes."""

    name: str
    platform: str
    chip: Chip
    device_count: int
    attached: bool


def target(name: str | None = None) -> Target:
    """The machine called `name`.

    **Arguments:** `name` is a cloud's own name: TPU slices such as `"v5p-8"` (4 chips;
    v4, v5p and tpu7x count cores), `"v5e-16"` or `"v5litepod-16"`, `"v6e-8"` (chips);
    GPUs such as `"h100"`, `"h100x8"`, `"a100-80"`, `"h200"`, `"b200"`, `"b300"`,
    `"gh200"`, `"gb200"`, `"gb300x72"`; or `"cpu"`, `"gpu"`, `"tpu"` for what is
    attached. `None` is what JAX uses by default.

    **Raises:** `ArgumentError` for an unknown name, with the nearest ones, and for
    AMD's GPUs, whose compiler needs their machine; `MissingExtraError` where the
    compiler is not installed, with the command.

    >>> stowax.target("v5p-8").device_count
    4
    """
    if name is not None and not isinstance(name, str):
        raise ArgumentError("target", repr(name), "Write a name such as 'v5p-8'.")
    if name is None or name in _ATTACHED:
        return _attached(name)
    if match := re.fullmatch(rf"({'|'.join(_TPU_NAMES)})-(\d+)", name):
        chip, slices, per_chip = _TPU_NAMES[match.group(1)]
        chips, rest = divmod(int(match.group(2)), per_chip)
        if rest == 0 and chips in slices:
            return _tpu_target(name, CHIPS[chip], chips, slices[chips])
    if match := re.fullmatch(rf"({'|'.join(GPU_CHIPS)})(?:x(\d+))?", name):
        count = int(match.group(2) or 1)
        if count in _gpu_counts(match.group(1)):
            return _gpu_target(name, CHIPS[match.group(1)], count)
    if _AMD.fullmatch(name.lower()):
        raise ArgumentError(
            "target",
            f"{name!r}, and XLA's compiler for AMD's GPUs loads only beside an "
            "installed ROCm",
            "Write 'gpu' on a machine with such a GPU (not tried yet), or a name from "
            "stowax.targets(): a plan holds for the chip that it is made for.",
        )
    known = [record.name for record in _compile_only_names()] + list(_ATTACHED)
    listed = "stowax.targets(), or `stowax targets` in a terminal, lists all"
    raise ArgumentError("target", repr(name), f"{nearest(name, known)}{listed}.")


def nearest(name: str, known: Collection[str]) -> str:
    """The names of `known` that are like `name`, in front of an error's last words.

    A TPU's is none for what is not called like one: letters alone would find them.

    >>> nearest("h100x3", ["v5p-8", "h100x8"]), nearest("rtx4090", ["tpu7x-4096"])
    ('Nearest names: h100x8. ', '')
    """
    if not re.match(r"tpu|v\d", name.lower()):
        known = [one for one in known if not re.match(r"tpu\d|v\d", one)]
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return f"Nearest names: {', '.join(near)}. " if near else ""


def platform_of(name: str) -> str:
    """The platform of a target by its name; its compiler need not be installed.

    >>> from stowax._target._target import platform_of
    >>> platform_of("v5p-8"), platform_of("h200x8"), platform_of("cpu")
    ('tpu', 'gpu', 'cpu')
    """
    return next((n.platform for n in _compile_only_names() if n.name == name), name)


def is_here(name: str) -> bool:
    """Whether JAX's devices are the chips of a target that can be planned for anywhere.

    >>> from stowax._target._target import is_here
    >>> is_here("v5p-8")  # on a laptop
    False
    """
    attached = chip_of_kind(jax.devices()[0].device_kind)
    named = next((n.chip for n in _compile_only_names() if n.name == name), None)
    return named is not None and attached is not None and named.key == attached.key


def _gpu_counts(key: str) -> tuple[int, ...]:
    """How many GPUs a target of this chip may have."""
    racks = (_RACK,) if key in ("gb200", "gb300") else ()
    return tuple(sorted((*_GPU_COUNTS, *racks)))


class TargetNames(tuple[TargetName, ...]):
    """The names that `stowax.targets()` gives, printed as `stowax targets` prints them.

    >>> "v5p-8" in str(stowax.targets())
    True
    """

    __slots__ = ()

    def __str__(self) -> str:
        from ..report import targets_text

        return targets_text(_rows(self))

    __repr__ = __str__


def targets() -> TargetNames:
    """Every name that `stowax.target` takes: attached platforms first.

    **Returns:** a tuple of `TargetName`s; printed, a table of the machines.

    >>> [t.name for t in stowax.targets() if t.platform == "tpu"][:2]
    ['v4-8', 'v4-16']
    """
    attached = []
    for platform in _ATTACHED:
        if devices := _platform_devices(platform):
            attached.append(
                TargetName(
                    name=platform,
                    platform=platform,
                    chip=chip_of_kind(devices[0].device_kind) or CHIPS["cpu"],
                    device_count=len(devices),
                    attached=True,
                )
            )
    return TargetNames((*attached, *_compile_only_names()))


def _compile_only_names() -> tuple[TargetName, ...]:
    names = []
    for prefix, (chip, slices, per_chip) in _TPU_NAMES.items():
        for chips in slices:
            name = f"{prefix}-{chips * per_chip}"
            names.append((name, CHIPS[chip], chips * CHIPS[chip].devices_per_chip))
    for key in GPU_CHIPS:
        for count in _gpu_counts(key):
            names.append((key if count == 1 else f"{key}x{count}", CHIPS[key], count))
    return tuple(
        TargetName(
            name=name,
            platform=chip.platform,
            chip=chip,
            device_count=count,
            attached=False,
        )
        for name, chip, count in names
    )


@functools.lru_cache(maxsize=64)
def _tpu_target(name: str, chip: Chip, chips: int, shape: tuple[int, ...]) -> Target:
    if not _jax_targets.has_libtpu():
        raise MissingExtraError(
            f"target {name!r} needs the TPU compiler (libtpu), which is not installed. "
            'Run: pip install "stowax[tpu]"'
        )
    options: dict[str, Any] = {}
    if chip.key == "v4":
        # Both cores of a chip as one device, as on the cloud's own v4 machines.
        options["chip_config_name"] = "megacore"
    if chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    family = "tpu7x" if chip.key == "7x" else chip.key
    topology = f"{family}:{'x'.join(map(str, shape))}"
    try:
        devices = _jax_targets.tpu_topology_devices(topology, **options)
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(f"libtpu has no topology for {name!r}: {error}") from error
    return make_target(name, chip, devices)


@functools.lru_cache(maxsize=64)
def _gpu_target(name: str, chip: Chip, count: int) -> Target:
    plugin = _jax_targets.cuda_plugin()
    if plugin is None or not _jax_targets.has_libdevice(plugin):
        missing = "JAX's CUDA plugin" if plugin is None else "the CUDA compiler (nvcc)"
        raise MissingExtraError(
            f"target {name!r} needs {missing}, which is not installed. "
            'Run: pip install "stowax[cuda]"'
        )
    per_host = min(count, chip.chips_per_host)
    real = _jax_targets.gpu_topology_devices(
        count // per_host, per_host, gpu_target_config(chip.key)
    )
    return make_target(
        name, chip, _jax_targets.stand_in_devices(count), compile_devices=real
    )


def platform_name(device: Any) -> str:
    """`"cpu"`, `"gpu"` or `"tpu"`: all makers' GPUs are one platform."""
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform


def local_devices(devices: Iterable[Any]) -> tuple[Any, ...]:
    """Those of `devices` that this process drives."""
    return tuple(d for d in devices if d.process_index == jax.process_index())


def attached_devices(name: str | None) -> tuple[Any, ...]:
    """The attached devices of a platform, or of JAX's default one.

    **Raises:** `ArgumentError` where there are none.
    """
    if devices := _platform_devices(name):
        return tuple(devices)
    raise ArgumentError(
        "target",
        f"{name!r}, and JAX sees no {name} here",
        "Write a name from stowax.targets(), such as 'v5p-8' or 'h100'.",
    )


def _platform_devices(platform: str | None) -> list[Any]:
    """The attached devices of `platform` that this process drives; empty if none."""
    _jax_targets.discover_plugins()
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def _attached(name: str | None) -> Target:
    devices = attached_devices(name)
    first = devices[0]
    chip = chip_of_kind(first.device_kind)
    found, note = _calibration(devices)
    notes = [note] if note else []
    if chip is None:
        chip = CHIPS["cpu"]
        if first.platform != "cpu":
            its = "what was not measured of its times is" if found else "its times are"
            notes.append(
                f"{first.device_kind} is not in the hardware table: {its} predicted "
                "with a CPU's figures"
            )
    if found is not None:
        chip = calibrated(chip, found)
        notes += calibration_notes(found)
    platform = platform_name(first)
    return make_target(
        name or platform,
        chip,
        devices,
        platform=platform,
        attached=True,
        notes=notes,
        duplex=found is None or found.duplex,
    )


def _calibration(devices: Iterable[Any]) -> tuple[CalibrationRecord | None, str | None]:
    """What was measured of attached devices, or why that is not used."""
    local = local_devices(devices)
    if not local:
        return None, None
    return find_calibration(
        local[0].device_kind,
        len(local),
        jax.__version__,
        processes=jax.process_count(),
    )


def targets_table() -> "list[TargetRow]":
    """One row per chip, for printing; the figures are in `row.chip.figures()`.

    >>> [row.chip.key for row in targets_table() if "v5p-8" in row.names]
    ['v5p']
    """
    return _rows(targets())


def _rows(found: Iterable[TargetName]) -> "list[TargetRow]":
    names: dict[str, list[TargetName]] = {}
    for record in found:
        names.setdefault(record.chip.key, []).append(record)
    return [_row(CHIPS[key], records) for key, records in names.items()]


def _row(chip: Chip, records: list[TargetName]) -> "TargetRow":
    from ..report import TargetRow

    measured, notes = [], []
    for record in records:
        if record.attached:
            found, note = _calibration(_platform_devices(record.name))
            measured += [(record.name, found)] if found else []
            notes += [note] if note else []
    return TargetRow(
        chip=chip,
        names=tuple(record.name for record in records),
        attached=any(record.attached for record in records),
        measured=tuple(measured),
        notes=tuple(notes),
    )
