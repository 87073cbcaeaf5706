"""How long a compiled program takes, from its own schedule.

`simulate` walks the instructions in the order in which the compiler will issue them.
The device does one thing at a time; a copy between device and host runs beside it, and
only its `-done` waits. Copies of one direction queue in the order of their starts, one
at a time and at the full rate of the link; the two directions do not disturb each other
unless `duplex` is false.

Prices. TPU: the compiler's own cycle estimate over the clock. GPU, and whatever has no
estimate: the roofline, the larger of operations over throughput and bytes over memory
bandwidth, plus on a GPU the launch of a kernel. What neither can price (kernels,
collectives, host calls) is taken at its bytes and listed in `Timeline.unpriced`.

Loops. The first two trips of a body are walked, the others repeat the second: what is
in flight when the loop begins disturbs the first trip only, because inside a body every
start has its done. A thousand trips cost as much to simulate as two.

What goes silently wrong: throughputs are peaks, so a GPU's compute time is a lower
bound and its copies look less hidden than they will be; and copies share the memory's
bandwidth with the compute beside them, which is not modelled.
"""

import dataclasses
from collections.abc import Callable

from .._hardware._figures import (
    LAUNCH_SECONDS,
    MATRIX_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Chip,
)
from .._hlo._host_calls import host_call_bytes, work_on_host
from .._records._program import COLLECTIVES, Computation, Instruction, Program, Transfer
from .._records._stages import Link
from .._records._timeline import Interval, Lane, Timeline, Unpriced

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
    "partition-id",
    "replica-id",
    "async-update",
}


@dataclasses.dataclass(slots=True)
class _Flight:
    """An asynchronous operation on its way: its end, and how to book a wait for it."""

    end: float
    wait: str


class _Clock:
    """The state of the walk: time, what is in flight, and the totals so far."""

    def __init__(self, program: Program, chip: Chip, link: Link, duplex: bool):
        self.program, self.chip, self.link, self.duplex = program, chip, link, duplex
        self.now = 0.0
        self.lane_free: dict[str, float] = {}
        self.flights: dict[str, _Flight] = {}
        self.totals: dict[str, float] = {}
        self.intervals: list[Interval] = []
        self.unpriced: dict[tuple[str, str], tuple[float, float]] = {}
        self.copies: dict[str, list[Transfer]] = {}
        for transfer in program.transfers:
            self.copies.setdefault(transfer.start, []).append(transfer)

    def add(self, total: str, seconds: float) -> None:
        """Adds to one of the totals of the step."""
        self.totals[total] = self.totals.get(total, 0.0) + seconds

    def record(
        self, lane: Lane, name: str, start: float, end: float, waits: bool = False
    ) -> None:
        """Writes an interval down, if it has any length."""
        if end > start:
            self.intervals.append(
                Interval(lane=lane, name=name, start=start, end=end, waits=waits)
            )

    def occupy(self, lane: Lane, name: str, seconds: float) -> float:
        """Queues something on a lane from now; returns when it ends."""
        queue = lane
        if not self.duplex and lane in ("device-to-host", "host-to-device"):
            queue = "link"
        start = max(self.now, self.lane_free.get(queue, 0.0))
        end = self.lane_free[queue] = start + seconds
        self.record(lane, name, start, end)
        self.add(lane, seconds)
        return end

    def compute(self, name: str, seconds: float) -> None:
        """The device works for `seconds`."""
        self.record("compute", name, self.now, self.now + seconds)
        self.add("compute", seconds)
        self.now += seconds

    def wait(self, name: str, until: float, kind: str) -> None:
        """The device does nothing until `until`."""
        if until > self.now:
            self.record("compute", name, self.now, until, waits=True)
            self.add(kind, until - self.now)
            self.now = until

    def miss(self, what: str, reason: str, seconds: float) -> None:
        """Lists something that had no price of its own."""
        count, total = self.unpriced.get((what, reason), (0.0, 0.0))
        self.unpriced[what, reason] = (count + 1, total + seconds)

    def link_seconds(self, transfer: Transfer) -> float:
        """Time of one copy on the link; between two host buffers it is taken twice."""
        out = transfer.bytes / self.link.device_to_host
        into = transfer.bytes / self.link.host_to_device
        if transfer.direction == "host-to-host":
            return out + into
        return out if transfer.direction == "device-to-host" else into


def simulate(
    program: Program, chip: Chip, link: Link, *, duplex: bool = True
) -> Timeline:
    """The timeline of one step of `program` on one device of `chip`.

    **Arguments:** `link` has the bytes per second of each direction between this device
    and its host, with every device of the host busy; `duplex` says whether both
    directions can run at once.

    **Returns:** a `Timeline` whose `origin` is `"simulated"`.

    >>> from stowax._hardware._hardware import CHIPS
    >>> link = Link(device_to_host=15e9, host_to_device=15e9)
    >>> simulate(program, CHIPS["v5p"], link).step_seconds  # doctest: +SKIP
    7.16
    """
    clock = _Clock(program, chip, link, duplex)
    _run(clock, program.computations[program.entry])
    totals = clock.totals
    # A chip that waits for a copy inside its own memory is busy with memory, not idle.
    compute = totals.get("compute", 0.0) + totals.get("on-device wait", 0.0)
    unpriced = [
        Unpriced(what=what, reason=reason, count=count, seconds=seconds)
        for (what, reason), (count, seconds) in clock.unpriced.items()
    ]
    unpriced.extend(
        Unpriced(what=name, reason="loop length depends on data", count=1, seconds=0.0)
        for name in program.uncounted_loops
    )
    return Timeline(
        origin="simulated",
        step_seconds=clock.now,
        compute_seconds=compute,
        exposed_seconds=totals.get("exposed", 0.0),
        collective_wait_seconds=totals.get("collective wait", 0.0),
        device_to_host_seconds=totals.get("device-to-host", 0.0),
        host_to_device_seconds=totals.get("host-to-device", 0.0),
        collective_seconds=totals.get("collective", 0.0),
        intervals=tuple(clock.intervals),
        unpriced=tuple(sorted(unpriced, key=lambda item: -item.seconds)),
        assumptions=_assumptions(chip, link, duplex),
    )


def _assumptions(chip: Chip, link: Link, duplex: bool) -> tuple[str, ...]:
    both = "both directions at once" if duplex else "one direction at a time"
    lines = [
        f"link {link.device_to_host / 1e9:g} GB/s out, "
        f"{link.host_to_device / 1e9:g} GB/s in, {both}",
    ]
    if chip.platform == "tpu" and chip.clock.known:
        lines.append(f"compiler's cycle estimates at {chip.clock.value:.4g} Hz")
    else:
        lines.append(_roofline(chip))
    if chip.platform == "gpu":
        lines.append(f"{LAUNCH_SECONDS * 1e6:g} µs per kernel launch, assumed")
    return tuple(lines)


def _roofline(chip: Chip) -> str:
    products = {figure.kind == "measured" for _, figure in chip.matrix}
    if chip.memory_bandwidth.kind == "measured" and True in products:
        rest = ", of other dtypes as assumed" if False in products else ""
        return f"roofline at the matrix throughput{rest} and the bandwidth measured"
    return (
        f"roofline at {MATRIX_EFFICIENCY:g} of the nominal matrix throughput and "
        f"{MEMORY_EFFICIENCY:g} of the bandwidth, assumed"
    )


def _run(clock: _Clock, computation: Computation) -> None:
    for item in computation.instructions:
        if item.opcode == "while":
            _loop(clock, item)
        elif item.opcode == "conditional":
            _branches(clock, item)
        elif item.opcode == "call":
            for name in item.called:
                _run(clock, clock.program.computations[name])
        else:
            _issue(clock, item)


def _loop(clock: _Clock, item: Instruction) -> None:
    """Two trips, then the rest as copies of the second (see the module's docstring)."""
    if not item.called:
        return
    body = clock.program.computations[item.called[0]]
    trips = 1 if item.trips is None else item.trips
    if trips < 1:
        return
    _run(clock, body)
    if trips > 1:
        _repeated(clock, lambda: _run(clock, body), trips - 1)


def _repeated(clock: _Clock, run: Callable[[], None], times: float) -> None:
    """Runs `run` once and counts it `times` times, which may be a fraction."""
    start, first = clock.now, len(clock.intervals)
    totals, unpriced = dict(clock.totals), dict(clock.unpriced)
    queues = dict(clock.lane_free)
    run()
    period = clock.now - start
    for key, value in clock.totals.items():
        clock.totals[key] = value + (value - totals.get(key, 0.0)) * (times - 1)
    for key, (count, seconds) in clock.unpriced.items():
        old_count, old_seconds = unpriced.get(key, (0.0, 0.0))
        clock.unpriced[key] = (
            count + (count - old_count) * (times - 1),
            seconds + (seconds - old_seconds) * (times - 1),
        )
    whole = max(1, round(times))
    for index in range(first, len(clock.intervals)):
        inner = clock.intervals[index]
        if whole > 1 and inner.count > 1:
            clock.intervals[index] = dataclasses.replace(
                inner,
                count=inner.count * whole,
                around=(*inner.around, (whole, period)),
            )
        elif whole > 1:
            clock.intervals[index] = dataclasses.replace(
                inner, count=whole, period=period
            )
    clock.now = start + period * times
    for lane, free in clock.lane_free.items():
        if free != queues.get(lane):
            clock.lane_free[lane] = free + period * (times - 1)


def _branches(clock: _Clock, item: Instruction) -> None:
    """Every branch at its even share of the time: which one runs is data."""
    for name in item.called:
        body = clock.program.computations[name]
        _repeated(clock, lambda body=body: _run(clock, body), 1 / len(item.called))


def _issue(clock: _Clock, item: Instruction) -> None:
    copies = clock.copies.get(item.name, [])
    if item.opcode.endswith("-done"):
        _finish(clock, item)
    elif copies and copies[0].asynchronous and not item.execution_thread:
        end = max(_copy(clock, copy) for copy in copies)
        clock.flights[item.name] = _Flight(end, "exposed")
    elif _collective(item):
        _exchange(clock, item)
    elif item.opcode == "async-start" and item.wrapped == "custom-call":
        _host_call(clock, item)
    elif item.execution_thread and item.bytes_accessed > 0:
        _host_call(clock, item)
        _finish(clock, dataclasses.replace(item, operands=(item.name,)))
    elif item.opcode in ("copy-start", "async-start"):
        seconds = _by_bytes(clock, item)
        start = max(clock.now, clock.lane_free.get("on-device", 0.0))
        clock.lane_free["on-device"] = start + seconds
        clock.flights[item.name] = _Flight(start + seconds, "on-device wait")
    elif copies:
        _synchronous(clock, item, copies)
    elif item.opcode not in _FREE and item.bytes_accessed > 0:
        clock.compute(item.name, _price(clock, item))


def _copy(clock: _Clock, copy: Transfer) -> float:
    lane: Lane = "host-to-device"
    if copy.direction != "host-to-device":
        lane = "device-to-host"
    return clock.occupy(lane, copy.op_name or copy.start, clock.link_seconds(copy))


def _finish(clock: _Clock, item: Instruction) -> None:
    for operand in item.operands:
        flight = clock.flights.pop(operand, None)
        if flight is not None:
            clock.wait(item.name, flight.end, flight.wait)


def _synchronous(clock: _Clock, item: Instruction, copies: list[Transfer]) -> None:
    """A copy, or a fusion that works on host memory: the device waits all the while."""
    end = max(_copy(clock, copy) for copy in copies)
    if item.flops > 0 or item.estimated_cycles is not None:
        clock.compute(item.name, _price(clock, item))
    clock.wait(item.name, end, "exposed")


def _collective(item: Instruction) -> bool:
    if item.opcode == "fusion" and item.estimated_cycles is not None:
        return False  # compute with a collective inside: the estimate has both
    return (item.wrapped or item.opcode).removesuffix("-start") in COLLECTIVES


def _exchange(clock: _Clock, item: Instruction) -> None:
    """A collective: its bytes over one direction of the interconnect, always listed."""
    rate, name = clock.chip.memory_rate(), "memory bandwidth"
    if clock.chip.interconnect.value:
        rate = clock.chip.interconnect.value / 2 / clock.chip.devices_per_chip
        name = "interconnect"
    seconds = item.bytes_accessed / 2 / (rate or clock.link.host_to_device)
    kind = (item.wrapped or item.opcode).removesuffix("-start")
    clock.miss(kind, f"collective, taken at its bytes over the {name}", seconds)
    end = clock.occupy("collective", item.name, seconds)
    if item.opcode.endswith("-start"):
        clock.flights[item.name] = _Flight(end, "collective wait")
    else:
        clock.wait(item.name, end, "collective wait")


def _host_call(clock: _Clock, item: Instruction) -> None:
    """Work on the host's processor: its bytes at the host's rate, where that is known.

    What nobody prices (products; any work on a host that is not known) is listed.
    """
    rate, reason = clock.chip.host_rate(), "products on the host, taken at their bytes"
    moved = host_call_bytes(clock.program, item)
    if rate is None:
        rate = min(clock.link.device_to_host, clock.link.host_to_device)
        moved = item.bytes_accessed
        reason = "runs on the host, taken at its bytes over the link"
    seconds = moved / rate
    work = work_on_host(clock.program, item.called)
    if clock.chip.host_rate() is None or any(part.flops for part in work):
        clock.miss(item.target or item.opcode, reason, seconds)
    end = clock.occupy("host", item.name, seconds)
    clock.flights[item.name] = _Flight(end, "exposed")


def _by_bytes(clock: _Clock, item: Instruction) -> float:
    # Where even the memory's rate is unknown the link's is all that there is to divide
    # by.
    return item.bytes_accessed / (
        clock.chip.memory_reached() or clock.link.host_to_device
    )


def _price(clock: _Clock, item: Instruction) -> float:
    """Seconds of one instruction on the device."""
    cycles, hertz = item.estimated_cycles, clock.chip.clock.value
    if cycles is not None and hertz:
        return cycles / hertz
    seconds = _by_bytes(clock, item)
    rate = clock.chip.matrix_reached(item.dtype)
    if item.flops > 0 and rate:
        seconds = max(seconds, item.flops / rate)
    seconds += clock.chip.launch_seconds
    what = item.target or item.opcode
    if item.result_bytes <= 8:
        what = "scalar arithmetic"
    if item.opcode == "custom-call" and item.flops == 0:
        clock.miss(what, "kernel without an estimate, taken at its bytes", seconds)
    elif item.flops > 0 and not rate:
        clock.miss(what, f"no throughput known for {item.dtype}", seconds)
    elif clock.chip.platform == "tpu":
        clock.miss(what, "no estimate by the compiler, taken at its roofline", seconds)
    return seconds
