"""Traces in the forms of real TPUs and GPUs become timelines; every second is counted.

The program (`traces.step_program`) is a loop of two trips that offloads, then a fetch
and an all-reduce beside a fusion, a copy between the chip's own memories, and a fusion
that writes to host memory itself.
"""

import pytest

from compiled_programs import program
from stowax._errors import TraceError
from stowax._timing._measured import timeline_of
from stowax._timing._xplane import MARK, executions
from traces import MODULE, event, step_program, trace

MICRO = 1e-6


def measured(planes):
    device, runs = executions(trace(planes), step_program())
    return timeline_of(runs, device)


def seconds(timeline):
    """Compute, exposed, collective wait, idle, out, in and collective, in µs."""
    figures = (
        timeline.compute_seconds,
        timeline.exposed_seconds,
        timeline.collective_wait_seconds,
        timeline.idle_seconds,
        timeline.device_to_host_seconds,
        timeline.host_to_device_seconds,
        timeline.collective_seconds,
    )
    assert timeline.origin == "measured"
    assert timeline.step_seconds == pytest.approx(sum(figures[:4]))
    return [pytest.approx(figure / MICRO, abs=1e-3) for figure in figures]


def intervals(timeline, lane):
    """Name, start and end in µs, and whether it waits."""
    return [
        (i.name, round(i.start / MICRO), round(i.end / MICRO), i.waits)
        for i in timeline.intervals
        if i.lane == lane
    ]


# --- TPU ------------------------------------------------------------------------------


def tpu(start=1000, slow=0):
    """One run on a TPU: what stands on each line. `slow` lengthens the last fusion."""

    def at(name, begin, end, **stats):
        text = f"%{name} = (bf16[8]{{0:S(5)}}, u32[]) {name.split('.')[0]}(bf16[8] %x)"
        return event(text, start + begin, start + end, **stats)

    return {
        "XLA Modules": [event(f"{MODULE}(77)", start, start + 100 + slow, run_id=1)],
        "XLA Ops": [
            at("fusion.2", 0, 10),
            at("while.1", 10, 60),
            at("copy-start.1", 10, 11),
            at("fusion.1", 11, 26),
            at("copy-done.1", 26, 35),  # 9 waited
            at("copy-start.1", 35, 36),
            at("fusion.1", 36, 51),
            at("copy-done.1", 51, 60),  # 9 waited
            at("copy-start.2", 60, 61),
            at("all-reduce-start.1", 61, 62),
            at("fusion.3", 62, 70),
            at("all-reduce-done.1", 70, 74),  # 4 waited for others
            at("copy-done.2", 74, 75),  # 1 waited
            at("prefetch-start.1", 75, 76),
            at("prefetch-done.1", 76, 80),  # the chip's own memory: its work
            at(
                "fusion.4", 84, 100 + slow
            ),  # 4 idle before; all of it a synchronous copy
        ],
        "Async XLA Ops": [
            at("copy-start.1", 11, 34),
            at("copy-start.1", 36, 59),
            at("copy-start.2", 61, 75),
            at("all-reduce-start.1", 62, 74),
            at("prefetch-start.1", 76, 80),
        ],
    }


def merged(*runs):
    lines = {}
    for run in runs:
        for name, events in run.items():
            lines.setdefault(name, []).extend(events)
    return lines


TPU_SECONDS = [
    10 + 2 * (1 + 15) + 2 + 8 + 5,  # compute: fusions, issuing, the prefetch
    2 * 9 + 1 + 16,
    4,
    4,
    2 * 23 + 16,
    14,
    12,
]


def test_a_tpus_trace():
    found = measured({"/device:TPU:0": tpu(), "/host:CPU": {}})
    assert seconds(found) == TPU_SECONDS
    assert found.step_seconds == pytest.approx(100 * MICRO)
    # Copies under the names that the program gives them, as in a simulation.
    assert intervals(found, "device-to-host") == [
        ("stowax.copy-start.1", 11, 34, False),
        ("stowax.copy-start.1", 36, 59, False),
        ("stowax.fusion.4", 84, 100, False),
    ]
    waits = [i for i in intervals(found, "compute") if i[3]]
    assert waits == [
        ("copy-done.1", 26, 35, True),
        ("copy-done.1", 51, 60, True),
        ("all-reduce-done.1", 70, 74, True),
        ("copy-done.2", 74, 75, True),
        ("fusion.4", 84, 100, True),
    ]
    assert not [i for i in intervals(found, "compute") if i[0] == "while.1"]


def test_other_programs_and_other_runs_are_told_apart():
    other = {
        "XLA Modules": [event("jit_copy(5)", 0, 500), event("jit_step_2(6)", 500, 900)],
        "XLA Ops": [event("%fusion.1 = f32[] fusion(f32[] %x)", 0, 900)],
    }
    runs = merged(other, tpu(1000), tpu(2000, slow=30), tpu(3000, slow=20))
    found = measured({"/device:TPU:1": tpu(), "/device:TPU:0": runs})
    assert found.step_seconds == pytest.approx(120 * MICRO)  # the median of three
    assert found.assumptions[0] == (
        "/device:TPU:0, the median of 3 steps in the trace, 100.0 µs to 130.0 µs"
    )


def test_a_tpus_trace_without_a_line_for_what_runs_beside():
    lines = tpu()
    del lines["Async XLA Ops"]
    found = measured({"/device:TPU:0": lines})
    # From the start that is issued to the end that is waited for.
    assert seconds(found)[:4] == TPU_SECONDS[:4]
    assert seconds(found)[4:] == [2 * 25 + 16, 15, 13]


def test_starts_and_ends_as_two_events():
    lines = tpu()
    lines["Async XLA Ops"] = [
        e
        for name, start, end, _ in lines["Async XLA Ops"]
        for e in (
            event(name, start, start + 1),
            event(name.replace("-start", "-done"), end - 1, end),
        )
    ]
    assert seconds(measured({"/device:TPU:0": lines})) == TPU_SECONDS


# --- GPU ------------------------------------------------------------------------------


def gpu(start=1000, idle=0, fetch="MemcpyH2D"):
    """One run on a GPU: kernels on one stream, copies and NCCL on others."""

    def at(name, begin, end, op):
        return event(name, start + begin, start + end, hlo_op=op, hlo_module=MODULE)

    late = 70 + idle
    return {
        "Stream #13(Kernel,MemcpyD2D)": [
            at("loop_fusion_2", 0, 10, "fusion.2"),
            at("gemm", 12, 26, "fusion.1"),  # 2 idle before: a launch
            at("gemm", 36, 51, "fusion.1"),  # 10 before, in which a copy ends: 8 waited
            at("gemm_3", 53, 62, "fusion.3"),  # 2 idle, copies on their way or not
            # 8 before, in which first the fetch ends and then the reduction: 7 waited
            at("loop_fusion_4", late, late + 10, "fusion.4"),
            at("MemcpyD2D", late + 10, late + 14, "prefetch-start.1"),
        ],
        "Stream #14(MemcpyD2H)": [
            at("MemcpyD2H", 12, 34, "copy-start.1"),
            at("MemcpyD2H", 38, 55, "copy-start.1"),
        ],
        "Stream #15(MemcpyH2D)": [at(fetch, 53, 66, "copy-start.2")],
        "Stream #20(Kernel)": [
            at("ncclDevKernel_AllReduce", 55, 69, "all-reduce-start.1")
        ],
        # What a viewer derives from the streams repeats them.
        "XLA Ops": [at("fusion.2", 0, 84, "fusion.2")],
        "XLA Modules": [event(MODULE, start, start + 84)],
    }


GPU_SECONDS = [
    10 + 14 + 15 + 9 + 4,
    8 + 10,
    7,
    2 + 2 + 2 + 1,
    22 + 17 + 10,  # the last fusion writes to the host itself
    13,
    14,
]


@pytest.mark.parametrize("fetch", ["MemcpyH2D", "dynamic_slice_kernel"])
def test_a_gpus_trace(fetch):
    found = measured({"/device:GPU:0": gpu(fetch=fetch), "/host:CPU": {}})
    assert seconds(found) == GPU_SECONDS
    assert found.step_seconds == pytest.approx(84 * MICRO)
    waits = [i for i in intervals(found, "compute") if i[3]]
    assert waits == [
        ("copy-done.1", 26, 34, True),
        ("all-reduce-done.1", 62, 69, True),
        ("fusion.4", 70, 80, True),
    ]
    assert any("gap" in note for note in found.assumptions)


@pytest.mark.parametrize("marked", [True, False])
def test_runs_on_a_gpu_are_told_apart(marked):
    """By the host's marks, or where there are none by the first instruction."""
    copied = {"Stream #7(MemcpyH2D)": [event("MemcpyH2D", 500, 900)]}  # an argument's
    lines = merged(gpu(1000), copied, gpu(2000, idle=6), gpu(3000, idle=3))
    marks = [event(MARK, start - 50, start + 90) for start in (1000, 2000, 3000)]
    planes = {"/device:GPU:0": lines, "/host:CPU": {"main": marks if marked else []}}
    found = measured(planes)
    assert found.step_seconds == pytest.approx((84 + 3) * MICRO)
    assert (
        "the median of 3 steps in the trace, 84.0 µs to 90.0 µs"
        in (found.assumptions[0])
    )
    assert found.host_to_device_seconds == pytest.approx(13 * MICRO)


def test_runs_as_cuda_graphs_are_told_apart_by_their_launches():
    """As on an H200: kernels of a graph name its command buffer, and no instruction.

    One graph outside of loops, and one that a loop launches twice in each run.
    """

    def launched(buffer, launch, *kernels):
        return [
            event(
                name,
                begin,
                end,
                hlo_op=f"command_buffer_{buffer}",
                hlo_module=MODULE,
                correlation_id=launch,
            )
            for name, begin, end in kernels
        ]

    stream = []
    for run, start in enumerate((1000, 2000, 3000)):
        stream += launched(
            1,
            10 * run,
            ("gemm", start, start + 30),
            ("loop_add", start + 30, start + 35),
        )
        for trip in (0, 1):
            begin = start + 40 + 20 * trip
            stream += launched(
                7, 10 * run + 1 + trip, ("wrapped_dynamic_slice", begin, begin + 18)
            )
    found = measured({"/device:GPU:0": {"Stream #14(Compute)": stream}})
    assert found.step_seconds == pytest.approx(78 * MICRO)
    assert found.compute_seconds == pytest.approx((35 + 2 * 18) * MICRO)
    assert "the median of 3 steps" in found.assumptions[0]


def test_several_kernels_of_one_instruction():
    lines = gpu(1000)
    for line, events in gpu(2000).items():
        lines[line] += events
    kernels = lines["Stream #13(Kernel,MemcpyD2D)"]
    # The first instruction of the schedule is two kernels.
    kernels += [
        event("prologue", start, start + 1, hlo_op="fusion.2", hlo_module=MODULE)
        for start in (999, 1999)
    ]
    found = measured({"/device:GPU:0": lines})
    assert found.step_seconds == pytest.approx(85 * MICRO)


# --- names of real programs -----------------------------------------------------------


@pytest.mark.parametrize("target", ["v5e-4", "h200"])
def test_a_compiled_programs_copies_are_found_by_name(target):
    """One trip of the loop that streams state: 10 µs in, 20 µs work, 30 µs out."""
    read = program("streamed", target)
    copies = {copy.direction: copy for copy in read.transfers}
    into, out = copies["host-to-device"], copies["device-to-host"]
    work = "some_fusion"

    def at(name, start, end, op):
        return event(name, start, end, hlo_op=op, hlo_module=read.name)

    if target == "h200":
        planes = {
            "/device:GPU:0": {
                "Stream #1(Kernel)": [at("start", 0, 0, work), at(work, 10, 30, work)],
                "Stream #2(MemcpyH2D)": [at("MemcpyH2D", 0, 10, into.start)],
                "Stream #3(MemcpyD2H)": [at("MemcpyD2H", 30, 60, out.start)],
            }
        }
    else:
        line = (
            (into.start, 0, 0),
            (into.done, 0, 10),
            (work, 10, 30),
            (out.start, 30, 30),
            (out.done, 30, 60),
        )
        planes = {
            "/device:TPU:0": {
                "XLA Modules": [event(f"{read.name}(1)", 0, 60)],
                "XLA Ops": [event(f"%{name} = f32[]", a, b) for name, a, b in line],
                "Async XLA Ops": [
                    event(f"%{into.start} = f32[]", 0, 10),
                    event(f"%{out.start} = f32[]", 30, 60),
                ],
            }
        }
    device, runs = executions(trace(planes), read)
    found = timeline_of(runs, device)
    assert seconds(found) == [20, 40, 0, 0, 30, 10, 0]
    waits = [i for i in intervals(found, "compute") if i[3]]
    assert waits == [(into.done, 0, 10, True), (out.done, 30, 60, True)]
    assert intervals(found, "device-to-host")[0][0] == (out.op_name or out.start)


# --- what is no trace of the step -----------------------------------------------------


def test_a_trace_without_a_device():
    with pytest.raises(TraceError) as caught:
        measured({"/host:CPU": {"python": [event("f", 0, 5)]}, "Task": {}})
    assert str(caught.value) == (
        "trace: it has no lanes of a device, only /host:CPU, Task. Record it with "
        "jax.profiler.trace in the process that runs the step, on a TPU, a GPU, or the "
        "CPU's default runtime."
    )


def test_a_trace_of_another_program():
    lines = {"Stream #1(Kernel)": [event("k", 0, 5, hlo_op="f", hlo_module="jit_g")]}
    with pytest.raises(TraceError) as caught:
        measured({"/device:GPU:0": lines})
    assert str(caught.value) == (
        "trace: the program jit_step did not run on /device:GPU:0 while it was "
        "recorded. Record at least one whole step of the same jitted function."
    )
