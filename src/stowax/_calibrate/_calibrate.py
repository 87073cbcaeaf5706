"""`stowax.calibrate`: what this machine's devices and their host reach, all at once.

Makers quote ports and peaks. What a plan needs is what is left of them in compiled
programs with every local device busy, as in training: products by dtype, loops over
memory, copies both ways, the host's processor at an update. The programs are
`_programs`', how they are timed is `_stopwatch`'s. What is found is kept
(`_calibration_file`) and used by every target for the attached devices from then on.

What cannot be measured (a dtype that the device does not have, memory that runs out, no
time left) is listed with its reason, and costs nothing else its measurement. A rate far
above what the maker quotes is not believed: then something was not waited for.
"""

import dataclasses
import datetime
import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from .._errors import ArgumentError
from .._hardware._figures import Chip, Figure
from .._hardware._hardware import chip_of_kind
from .._plan._asked import Progress, sayer
from .._records._calibration import CalibrationRecord, CopyRates, HostWork, Unmeasured
from .._target._calibration_file import find_calibration, host_name, save_calibration
from .._target._machine import host_memory
from .._target._target import attached_devices, local_devices, platform_name
from .._units import format_bytes
from .._versions import versions
from ..report import calibration_text
from . import _programs as programs
from ._stopwatch import Stopwatch, per_second

MIB = 2**20
DTYPES = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float16": "float16",
    "float8": "float8_e4m3fn",
    "int8": "int8",
}
"""The dtypes of products, by their names in the hardware table."""

_MEMORY, _VECTOR = "memory bandwidth", "vector float32"
_UPDATES = "updates by the host's processor"

_MOST_BELIEVED = 1.25
"""A rate above so many times what the maker quotes is a mistake of measuring."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much work a calibration is, for a kind of machine.

    Sizes are bytes per device, `products` the sides of matrices, tried in turn up to
    the first that takes `long_enough` seconds. After `seconds` nothing new is begun.
    """

    copies: tuple[int, ...]
    products: tuple[int, ...]
    stream: int
    arithmetic: int
    repeats: int
    update: int
    seconds: float = 90.0
    long_enough: float = 0.005
    sample_seconds: float = 0.02
    most_seconds: float = 1.0
    rounds: int = 9


ACCELERATOR = Effort(
    copies=(MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    products=(8192,),
    stream=512 * MIB,
    arithmetic=128 * MIB,
    repeats=16,
    update=64 * MIB,
)


def cpu_effort(count: int) -> Effort:
    """The effort for a machine whose `count` devices share one processor.

    Arrays of all of them together are larger than any cache.
    """
    return Effort(
        copies=(MIB, 4 * MIB, 16 * MIB, 64 * MIB),
        products=(256, 1024),
        stream=max(MIB, 256 * MIB // count),
        arithmetic=max(MIB // 4, 4 * MIB // count),
        repeats=1,
        update=max(MIB, 64 * MIB // count),
    )


class Calibration(CalibrationRecord):
    """What was measured on this machine. Made by `stowax.calibrate`.

    The fields are those of `CalibrationRecord`; printed, a table.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return calibration_text(self)


def calibrate(
    target: Literal["cpu", "gpu", "tpu"] | None = None,
    *,
    save: bool = True,
    progress: Progress = None,
) -> Calibration:
    """Measures the attached devices of this process, all busy at once.

    It takes under two minutes and needs the devices to itself. Targets for these
    devices (`stowax.target("gpu")`, plans without a target) use what was measured from
    then on; `stowax.targets()` shows it beside what makers quote.

    **Arguments:** `target` is the platform, `None` for JAX's default. With `save` the
    result is written to the user's cache, where targets look for it; the environment
    variable `STOWAX_CALIBRATION` names another file. `progress`: as for `stowax.plan`.

    **Returns:** a `Calibration`; printed, a table.

    **Raises:** `ArgumentError` for a target that is not attached, and early on where
    nothing can be written.

    ```python
    print(stowax.calibrate())
    ```
    """
    if target not in (None, "cpu", "gpu", "tpu"):
        raise ArgumentError(
            "target",
            f"{target!r}",
            "Write 'cpu', 'gpu' or 'tpu': what is measured has to be attached.",
        )
    say = sayer(progress, time.perf_counter())
    devices = local_devices(attached_devices(target))
    cpu = devices[0].platform == "cpu"
    effort = cpu_effort(len(devices)) if cpu else ACCELERATOR
    keep = _keeper(devices) if save else None
    found = measure_machine(devices, effort, say, keep=keep)
    if save:
        try:
            say(f"saved {save_calibration(found)}")
        except ArgumentError as error:  # what was measured is not lost for that
            # The caller is behind `naming_options`.
            warnings.warn(f"the calibration is not kept. {error}", stacklevel=3)
    return found


def _keeper(devices: Sequence[Any]) -> Callable[[Calibration], Any] | None:
    """What keeps a calibration that is not finished, where there is no other.

    A compiler that does not like a program may end the process, and would the next time
    as well.
    """
    known, _ = find_calibration(devices[0].device_kind, len(devices), jax.__version__)
    return None if known else save_calibration


def measure_machine(
    devices: Sequence[Any],
    effort: Effort,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
    keep: Callable[[Calibration], Any] | None = None,
) -> Calibration:
    """A calibration of `devices`, by an effort and a clock.

    `keep` is called with what there is before each further measurement.
    """
    work = _Work(devices=tuple(devices), effort=effort, say=say, clock=clock)
    copied = work.copies()
    steps = {_MEMORY: work.memory, _VECTOR: work.vector}
    for name in DTYPES:
        steps[f"matrix {name}"] = functools.partial(work.product, name)
    steps[_UPDATES] = work.update
    rates: dict[str, float] = {}
    for what, measure in steps.items():
        if keep is not None:
            keep(work.result(copied, rates, unfinished=what))
        rate = work.one(what, measure)
        if rate is not None:
            rates[what] = rate
    return work.result(copied, rates)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Work:
    """A calibration under way: its devices, its clock, and what could not be done."""

    devices: tuple[Any, ...]
    effort: Effort
    say: Callable[[str], None]
    clock: Callable[[], float]
    unmeasured: list[Unmeasured] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def cpu(self) -> bool:
        """Whether the devices are the host's own processor."""
        return self.devices[0].platform == "cpu"

    @property
    def host_work(self) -> HostWork:
        """Who runs the host's update."""
        if self.cpu:
            return "these devices"
        return "compute_on" if self.devices[0].platform == "tpu" else "CPU backend"

    def result(
        self,
        copied: tuple[CopyRates, ...],
        rates: Mapping[str, float],
        unfinished: str | None = None,
    ) -> Calibration:
        """What was found so far; `unfinished` is what is begun next."""
        first = self.devices[0]
        missing = [*self.unmeasured]
        if unfinished:
            missing.append(Unmeasured(what=unfinished, why="the process ended in it"))
        matrix = {name: rates.get(f"matrix {name}") for name in DTYPES}
        return Calibration(
            device_kind=first.device_kind,
            platform=platform_name(first),
            host=host_name(),
            device_count=len(self.devices),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=_versions(first),
            matrix={name: rate for name, rate in matrix.items() if rate is not None},
            memory_bandwidth=rates.get(_MEMORY),
            vector=rates.get(_VECTOR),
            copies=copied,
            host_update=rates.get(_UPDATES),
            host_update_by=self.host_work if _UPDATES in rates else None,
            one_memory=self.cpu,
            unmeasured=tuple(missing),
            seconds=round(self.clock() - self.started, 3),
        )

    def one(self, what: str, measure: Callable[[], float]) -> float | None:
        """A rate, or `None` with its reason taken down."""
        if self.clock() - self.started > self.effort.seconds:
            self._miss(what, "no time was left")
            return None
        self.say(f"measuring {what}")
        try:
            return measure()
        # Whatever a backend says to what it does not have: the others go on.
        except Exception as error:
            text = f"{error}".strip().partition("\n")[0]
            self._miss(what, f"{type(error).__name__}: {text}"[:300])
            return None

    def _miss(self, what: str, why: str) -> None:
        self.unmeasured.append(Unmeasured(what=what, why=why))
        self.say(f"not measured: {what} ({why})")

    def _rates(self, *work: programs.Program) -> list[float]:
        """What each program does in a second on one device, all taking turns."""
        watch = Stopwatch(
            wait=jax.block_until_ready,
            one_by_one=self.cpu,
            clock=self.clock,
            sample_seconds=self.effort.sample_seconds,
            most_seconds=self.effort.most_seconds,
            rounds=self.effort.rounds,
        )
        seconds = watch.seconds(*(program.ready() for program in work))
        return [
            per_second(program.amount, [each])[0]
            for program, each in zip(work, seconds, strict=True)
        ]

    def copies(self) -> tuple[CopyRates, ...]:
        """Rates of copies by size; sizes that cannot be copied are left out."""
        found: list[CopyRates] = []

        def measure(size: int) -> float:
            out, into, both = self._rates(*programs.copies(self.devices, size))
            found.append(CopyRates(bytes=size, out=out, into=into, both=both))
            return out

        most = _most_copied(self.devices)
        for size in self.effort.copies:
            if size <= most:
                what = f"copies of {format_bytes(size)}"
                self.one(what, lambda size=size: measure(size))
        if not found and not self.unmeasured:
            self._miss("copies", "the machine has too little memory")
        return tuple(found)

    def memory(self) -> float:
        """Bytes per second of loops over memory."""
        program = programs.stream(
            self.devices, self._fitting(self.effort.stream), self.effort.repeats
        )
        chip = self._chip()
        return _believed(self._rates(program)[0], chip and chip.memory_bandwidth, chip)

    def product(self, name: str) -> float:
        """Operations per second of large products."""
        rate = 0.0
        for size in self.effort.products:
            program = programs.products(self.devices, DTYPES[name], size)
            rate = self._rates(program)[0]
            if program.amount / rate > self.effort.long_enough:
                break
        chip = self._chip()
        return _believed(rate, chip and dict(chip.matrix).get(name), chip)

    def vector(self) -> float:
        """Elementwise operations per second of loops that hardly touch memory."""
        size = self._fitting(self.effort.arithmetic)
        program = programs.arithmetic(self.devices, size, self.effort.repeats)
        return self._rates(program)[0]

    def update(self) -> float:
        """Bytes per second of updates on the host, for each device."""
        size = self.effort.update
        if self.host_work == "compute_on":
            return self._updates_on_host(size)
        if self.cpu:
            return self._rates(programs.update(self.devices, size))[0]
        beside = jax.local_devices(backend="cpu")[:1]
        return self._rates(programs.update(beside, size))[0] / len(self.devices)

    def _updates_on_host(self, size: int) -> float:
        each = [programs.update_on_host(device, size) for device in self.devices]
        runs = [program.ready() for program in each]
        watch = Stopwatch(
            wait=jax.block_until_ready,
            clock=self.clock,
            most_seconds=self.effort.most_seconds,
            rounds=self.effort.rounds,
        )
        (seconds,) = watch.seconds(lambda: [run() for run in runs])
        return per_second(each[0].amount, [seconds])[0]

    def _fitting(self, size: int) -> int:
        """`size`, or less where a device has little memory."""
        limit = (self.devices[0].memory_stats() or {}).get("bytes_limit")
        return min(size, int(limit) // 8) if limit else size

    def _chip(self) -> Chip | None:
        return chip_of_kind(self.devices[0].device_kind)


def _believed(rate: float, figure: Figure | None, chip: Chip | None) -> float:
    """`rate`, unless the maker's own figure says that it cannot be.

    **Raises:** `ValueError` then.
    """
    if figure is None or chip is None or figure.kind != "quoted":
        return rate
    most = figure.required() / chip.devices_per_chip
    if rate > _MOST_BELIEVED * most:
        raise ValueError(
            f"{rate:.3g} a second is not believed where {most:.3g} is quoted"
        )
    return rate


def _most_copied(devices: Sequence[Any]) -> int:
    """Bytes per device that copies may take: four arrays of it, in all memories."""
    most = host_memory() // 8 // (4 * len(devices))
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return min(most, int(limit) // 8) if limit else most


def _versions(device: Any) -> dict[str, str]:
    found = versions()
    if runtime := getattr(device.client, "platform_version", ""):
        found["backend"] = " ".join(str(runtime).split())[:200]
    return found
