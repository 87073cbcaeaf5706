"""The simulator on programs written by hand, where every second can be added up.

The chip here does 100 operations and 10 bytes per second; the link carries 2 bytes per
second out and 4 in. Cycle estimates are seconds: the clock ticks once per second.
"""

import dataclasses

import pytest

from compiled_programs import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    HIDDEN,
    LAYERS,
    ROWS,
    WIDTH,
    program,
)
from stowax._hardware._figures import (
    HOST_EFFICIENCY,
    LAUNCH_SECONDS,
    MATRIX_EFFICIENCY,
    MEMORY_EFFICIENCY,
    OPERATIONS,
    RATE,
    assumed,
    unknown,
)
from stowax._hardware._hardware import CHIPS
from stowax._records._program import Computation, Program, Transfer
from stowax._records._stages import Link
from stowax._timing._simulate import simulate
from traces import instruction as item

CHIP = dataclasses.replace(
    CHIPS["v5e"],
    memory_bandwidth=assumed(10, RATE, "a test"),
    matrix=(("bfloat16", assumed(100, OPERATIONS, "a test")),),
    interconnect=assumed(20, RATE, "a test"),
    clock=assumed(1, "hertz", "a test"),
    host_bandwidth=unknown(RATE),
)
LINK = Link(device_to_host=2.0, host_to_device=4.0)


def work(name, seconds):
    return item(name, estimated_cycles=seconds)


def start(name):
    return item(f"{name}-start", "copy-start")


def done(name):
    return item(f"{name}-done", "copy-done", operands=(f"{name}-start",))


def loop(body, trips):
    return item(f"loop-{body}", "while", called=(body,), trips=trips)


def copy(name, direction, size, computation="main", asynchronous=True, trips=1):
    ends = (f"{name}-start", f"{name}-done") if asynchronous else (name, name)
    return Transfer(
        direction=direction,
        bytes=size,
        trips=trips,
        asynchronous=asynchronous,
        start=ends[0],
        done=ends[1],
        computation=computation,
        op_name="",
        source="",
    )


def build(transfers=(), uncounted=(), **computations):
    return Program(
        name="by hand",
        entry="main",
        computations={
            name: Computation(
                name=name,
                instructions=tuple(instructions),
                execution_thread="",
                executions=1,
            )
            for name, instructions in computations.items()
        },
        transfers=tuple(transfers),
        uncounted_loops=tuple(uncounted),
    )


def test_a_hidden_copy_costs_nothing_and_an_exposed_one_the_rest():
    read = build(
        [copy("a", "device-to-host", 6)], main=[start("a"), work("w", 5), done("a")]
    )
    timeline = simulate(read, CHIP, LINK)  # 6 bytes at 2 per second: 3 s under 5 s
    assert (timeline.step_seconds, timeline.exposed_seconds) == (5, 0)
    assert timeline.device_to_host_seconds == 3
    read = build(
        [copy("a", "device-to-host", 16)], main=[start("a"), work("w", 5), done("a")]
    )
    timeline = simulate(read, CHIP, LINK)  # 8 s, of which 5 under work
    assert (timeline.step_seconds, timeline.exposed_seconds) == (8, 3)
    assert timeline.compute_seconds == 5
    (wait,) = [i for i in timeline.intervals if i.waits]
    assert (wait.lane, wait.start, wait.end) == ("compute", 5, 8)


def test_copies_of_one_direction_queue_and_the_other_direction_does_not():
    out_twice = build(
        [copy("a", "device-to-host", 4), copy("b", "device-to-host", 4)],
        main=[start("a"), start("b"), done("b"), done("a")],
    )
    assert simulate(out_twice, CHIP, LINK).step_seconds == 2 + 2
    both_ways = build(
        [copy("a", "device-to-host", 4), copy("b", "host-to-device", 8)],
        main=[start("a"), start("b"), done("b"), done("a")],
    )
    assert simulate(both_ways, CHIP, LINK).step_seconds == 2
    assert simulate(both_ways, CHIP, LINK, duplex=False).step_seconds == 2 + 2


def test_a_synchronous_copy_is_exposed_entirely():
    read = build(
        [copy("a", "host-to-device", 8, asynchronous=False)],
        main=[work("w", 5), item("a", "copy")],
    )
    timeline = simulate(read, CHIP, LINK)
    assert (timeline.step_seconds, timeline.exposed_seconds) == (5 + 2, 2)


def test_the_three_parts_are_the_step():
    collective = item("c", "all-gather", bytes_accessed=80)
    read = build(
        [copy("a", "host-to-device", 8)],
        main=[work("w", 1), start("a"), done("a"), collective],
    )
    timeline = simulate(read, CHIP, LINK)
    # Half of 80 bytes cross, at half of the interconnect's 20 bytes per second.
    assert timeline.collective_wait_seconds == 80 / 2 / 10
    assert timeline.step_seconds == pytest.approx(
        timeline.compute_seconds
        + timeline.exposed_seconds
        + timeline.collective_wait_seconds
    )
    assert [u.what for u in timeline.unpriced] == ["all-gather"]


BODY = [start("a"), work("w", 3), done("a"), work("v", 1)]


@pytest.mark.parametrize("size", [2, 10])
@pytest.mark.parametrize("trips", [1, 2, 3, 40])
def test_a_loop_is_its_body_written_out(trips, size):
    copies = [copy("before", "device-to-host", 20)]
    rolled = build(
        [*copies, copy("a", "device-to-host", size, "body", trips=trips)],
        body=BODY,
        main=[start("before"), loop("body", trips), done("before"), work("z", 2)],
    )
    flat, flat_copies = [start("before")], list(copies)
    for trip in range(trips):
        flat_copies.append(copy(f"a{trip}", "device-to-host", size))
        flat += [start(f"a{trip}"), work("w", 3), done(f"a{trip}"), work("v", 1)]
    written_out = build(flat_copies, main=[*flat, done("before"), work("z", 2)])
    one, other = simulate(rolled, CHIP, LINK), simulate(written_out, CHIP, LINK)
    for field in dataclasses.fields(one):
        if field.name.endswith("seconds"):
            expected = getattr(other, field.name)
            assert getattr(one, field.name) == pytest.approx(expected), field.name
    assert len(one.intervals) <= 12
    busy = sum(i.seconds for i in one.intervals if i.lane == "device-to-host")
    assert busy == pytest.approx(one.device_to_host_seconds)


def test_nested_loops_multiply():
    read = build(
        inner=[work("w", 2)],
        outer=[loop("inner", 50), work("v", 1)],
        main=[loop("outer", 30)],
    )
    timeline = simulate(read, CHIP, LINK)
    assert timeline.step_seconds == 30 * (50 * 2 + 1)
    assert sum(i.seconds for i in timeline.intervals) == timeline.step_seconds
    assert len(timeline.intervals) < 10
    times = sorted((t, i.end - i.start) for i in timeline.intervals for t in i.starts())
    now = 0.0
    for start, seconds in times:  # written out, they follow each other without a gap
        assert start == pytest.approx(now)
        now = start + seconds
    assert now == pytest.approx(timeline.step_seconds)


def test_a_loop_that_never_runs_costs_nothing():
    read = build(body=BODY, main=[loop("body", 0), work("w", 1)])
    assert simulate(read, CHIP, LINK).step_seconds == 1


def test_branches_are_taken_evenly():
    branch = item("b", "conditional", called=("left", "right"))
    read = build(left=[work("w", 2)], right=[work("v", 6)], main=[branch])
    timeline = simulate(read, CHIP, LINK)
    assert timeline.step_seconds == (2 + 6) / 2
    assert timeline.compute_seconds == 4


def test_the_roofline_prices_what_has_no_estimate_and_says_so():
    by_bytes = item("f", bytes_accessed=50, flops=100.0)
    by_flops = item("g", bytes_accessed=50, flops=1000.0)
    timeline = simulate(build(main=[by_bytes, by_flops]), CHIP, LINK)
    by_rates = 50 / (10 * MEMORY_EFFICIENCY) + 1000 / (100 * MATRIX_EFFICIENCY)
    assert timeline.step_seconds == pytest.approx(by_rates)
    (listed,) = timeline.unpriced
    assert (listed.what, listed.count) == ("fusion", 2)
    assert listed.seconds == pytest.approx(by_rates)


def test_a_gpu_pays_for_every_launch_and_lists_only_kernels():
    chip = dataclasses.replace(CHIP, platform="gpu", clock=unknown("hertz"))
    kernel = item("k", "custom-call", target="attention")
    timeline = simulate(build(main=[item("f", flops=2000.0), kernel]), chip, LINK)
    product = 2000 / (100 * MATRIX_EFFICIENCY)
    bytes_of_kernel = timeline.step_seconds - product - 2 * LAUNCH_SECONDS
    assert bytes_of_kernel == pytest.approx(100 / (10 * MEMORY_EFFICIENCY))
    assert [u.what for u in timeline.unpriced] == ["attention"]
    assert any("launch" in line for line in timeline.assumptions)


def test_a_dtype_without_throughput_is_listed():
    chip = dataclasses.replace(CHIP, platform="gpu")
    read = build(main=[item("f", flops=1e6, dtype="float64", bytes_accessed=10)])
    (listed,) = simulate(read, chip, LINK).unpriced
    assert "float64" in listed.reason


def test_host_calls_are_waited_for_and_listed():
    call = item("h", "async-start", wrapped="custom-call", target="HostExecute")
    finish = item("h-done", "async-done", operands=("h",))
    timeline = simulate(build(main=[call, work("w", 5), finish]), CHIP, LINK)
    # 100 bytes over the slower direction, 50 s, 5 of them under work.
    assert (timeline.step_seconds, timeline.exposed_seconds) == (50, 45)
    assert [u.what for u in timeline.unpriced] == ["HostExecute"]


def test_work_on_a_known_host_is_taken_at_its_rate():
    # Two results of two arrays that come in; one result is made of the other, too.
    given = [item(name, "parameter", bytes_accessed=0) for name in ("m", "g")]
    moment = item("m2", "add", operands=("m", "g"), flops=0.0)
    scaled = item("s", "multiply", operands=("m2",))
    result = item("p2", "subtract", operands=("g", "s"))
    root = item("root", "tuple", operands=("m2", "p2"))
    update = [*given, moment, scaled, result, root]
    fields = {"wrapped": "custom-call", "target": "HostExecute", "called": ("update",)}
    call = item("h", "async-start", **fields)
    finish = item("h-done", "async-done", operands=("h",))
    program = build(update=update, main=[call, finish])
    rate = 10.0  # bytes per second for each of the host's chips
    bandwidth = assumed(rate * CHIP.chips_per_host / HOST_EFFICIENCY, RATE, "a test")
    chip = dataclasses.replace(CHIP, host_bandwidth=bandwidth)
    timeline = simulate(program, chip, LINK)
    # The first loop reads 100 + 100 bytes and writes 100, and so does the second.
    assert timeline.exposed_seconds == pytest.approx(600 / rate)
    assert timeline.unpriced == ()
    # A product is no matter of bytes alone: it is listed.
    product = dataclasses.replace(moment, flops=1e3)
    program = build(update=[*given, product, *update[3:]], main=[call, finish])
    assert [u.what for u in simulate(program, chip, LINK).unpriced] == ["HostExecute"]


def test_loops_of_unknown_length_are_listed():
    body = [work("w", 4)]
    read = build(uncounted=["loop-body"], body=body, main=[loop("body", None)])
    timeline = simulate(read, CHIP, LINK)
    assert [u.what for u in timeline.unpriced] == ["loop-body"]
    assert timeline.step_seconds == 4


def test_copies_inside_the_device_are_work_of_the_memory():
    inside = item("p", "copy-start", bytes_accessed=40)
    finish = item("p-done", "copy-done", operands=("p",))
    timeline = simulate(build(main=[inside, work("w", 1), finish]), CHIP, LINK)
    assert timeline.step_seconds == 40 / (10 * MEMORY_EFFICIENCY)
    assert timeline.compute_seconds == timeline.step_seconds
    assert timeline.exposed_seconds == 0


# --- compiled programs ---------------------------------------------------------------


def test_compute_on_a_tpu_is_the_compilers_cycles_over_the_clock():
    read = program("plain", "v5e-4")
    cycles = sum(
        (item.estimated_cycles or 0) * computation.executions
        for computation in read.computations.values()
        for item in computation.instructions
    )
    timeline = simulate(read, CHIPS["v5e"], LINK)
    clock = CHIPS["v5e"].clock.value
    assert timeline.step_seconds == timeline.compute_seconds
    # Copies into the chip's fast memory and scalars come on top.
    assert cycles / clock <= timeline.compute_seconds < 1.25 * cycles / clock


@pytest.mark.parametrize(("target", "chip"), [("v5e-4", "v5e"), ("h200", "h200")])
def test_compute_is_never_below_the_peak(target, chip):
    flops = 6 * LAYERS * 2 * ROWS * WIDTH * HIDDEN
    timeline = simulate(program("plain", target), CHIPS[chip], LINK)
    assert timeline.compute_seconds > flops / CHIPS[chip].matrix_rate("bfloat16")


@pytest.mark.parametrize(("target", "chip"), [("v5e-4", "v5e"), ("h200", "h200")])
def test_the_links_are_busy_with_the_bytes_that_cross(target, chip):
    link = Link(device_to_host=1e9, host_to_device=2e9)
    timeline = simulate(program("streamed", target), CHIPS[chip], link)
    state = BLOCKS * BLOCK_ROWS * COLUMNS * 4
    assert timeline.device_to_host_seconds == pytest.approx(state / 1e9)
    assert timeline.host_to_device_seconds == pytest.approx(state / 2e9)
    # The schedule loads, updates and stores one block after the other.
    assert timeline.exposed_seconds == pytest.approx(state / 1e9 + state / 2e9, rel=0.1)


@pytest.mark.quick("h200-h200")
@pytest.mark.parametrize(("target", "chip"), [("v5e-4", "v5e"), ("h200", "h200")])
def test_a_fast_link_hides_what_a_slow_one_exposes(target, chip):
    read = program("offloaded", target)
    slow = simulate(read, CHIPS[chip], Link(device_to_host=1e9, host_to_device=1e9))
    fast = simulate(read, CHIPS[chip], Link(device_to_host=1e15, host_to_device=1e15))
    assert fast.exposed_seconds < 1e-3 * fast.step_seconds
    assert slow.exposed_seconds > 0.5 * slow.step_seconds
    assert fast.compute_seconds == pytest.approx(slow.compute_seconds)
