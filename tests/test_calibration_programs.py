"""What a machine is measured with is what is counted: by compiled programs."""

import jax
import numpy as np
import pytest

from stowax import _jax_targets
from stowax._calibrate import _programs as programs
from stowax._hlo._host_calls import host_call_bytes
from stowax._hlo._program import read_program
from stowax._target._target import target

MIB = 2**20
SIZE = MIB

GPU = pytest.param(
    "h200x8",
    marks=pytest.mark.skipif(_jax_targets.cuda_plugin() is None, reason="no CUDA"),
)
TPU = pytest.param(
    "v5p-8", marks=pytest.mark.skipif(not _jax_targets.has_libtpu(), reason="no libtpu")
)
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute")


def compiled(name, program):
    found = target(name).compile(program.jitted, *program.specs)
    return found, read_program(found.hlo_module_protos()[0])


def instructions(program):
    return [i for c in program.computations.values() for i in c.instructions]


@pytest.mark.usefixtures("full_effort")
@pytest.mark.parametrize("name", [TPU, GPU])
def test_a_copy_is_one_asynchronous_copy_per_device_and_nothing_else(name):
    devices = target(name).devices
    for program, ways in zip(
        programs.copies(devices, SIZE),
        (
            ["device-to-host"],
            ["host-to-device"],
            ["device-to-host", "host-to-device"],
        ),
        strict=True,
    ):
        found, read = compiled(name, program)
        moved = sorted((t.direction, t.bytes) for t in read.transfers)
        assert moved == [(way, SIZE) for way in sorted(ways)]
        # Both are started before either is waited for, and nothing else is done.
        order = [
            i.opcode
            for i in read.computations[read.entry].instructions
            if i.opcode not in ("parameter", "tuple")
        ]
        assert order == ["copy-start"] * len(ways) + ["copy-done"] * len(ways)
        # They go into memory that is there.
        memory = found.memory_analysis()
        assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes
        assert memory.host_temp_size_in_bytes == 0
        assert memory.temp_size_in_bytes < SIZE


@pytest.mark.parametrize("name", [TPU, GPU])
def test_products_are_two_on_each_device_and_cross_nothing(name):
    there, side = target(name), 512
    program = programs.products(there.devices, "bfloat16", side)
    found, read = compiled(name, program)
    assert program.amount == sum(i.flops for i in instructions(read))
    assert program.amount == 2 * (2 * side**3)
    assert not any(word in found.as_text() for word in COLLECTIVES)
    assert found.memory_analysis().argument_size_in_bytes == 2 * side * side * 2


@pytest.mark.parametrize("name", [TPU, GPU])
def test_loops_stay_loops_and_each_round_is_one_kernel_in_place(name):
    devices = target(name).devices
    for program in (
        programs.stream(devices, SIZE, repeats=4),
        programs.arithmetic(devices, SIZE, repeats=4),
    ):
        found, read = compiled(name, program)
        loops = [i for i in instructions(read) if i.opcode == "while"]
        (loop,) = loops  # not unrolled: fused rounds would read memory once
        bodies = [read.computations[c] for c in loop.called]
        big = [
            i
            for body in bodies
            for i in body.instructions
            if i.opcode == "fusion" and i.result_bytes >= SIZE
        ]
        assert len(big) == 1
        memory = found.memory_analysis()
        assert memory.alias_size_in_bytes == SIZE
        assert memory.temp_size_in_bytes < SIZE


def test_arithmetic_is_bound_by_arithmetic_on_every_chip():
    from stowax._hardware._hardware import CHIPS

    each = programs.VECTOR_ROUNDS * programs.VECTOR_OPERATIONS
    for chip in CHIPS.values():
        if chip.vector_rate() is not None:
            in_memory = 2 * 4 / chip.memory_reached()
            assert each / chip.vector_rate() > in_memory, chip.key


@pytest.mark.parametrize("name", [TPU])
def test_an_update_on_the_host_is_one_call_of_so_many_bytes_in_place(name):
    program = programs.update_on_host(target(name).devices[0], SIZE)
    found, read = compiled(name, program)
    entry = read.computations[read.entry].instructions
    (call,) = (i for i in entry if i.called)
    elements = SIZE // 4
    # Two moments are made of themselves and the gradient, the parameter of itself and
    # both: 3 + 3 + 4 arrays of float32.
    assert host_call_bytes(read, call) == (3 + 3 + 4) * 4 * elements == program.amount
    assert not [i for i in entry if "copy" in i.opcode]
    assert found.memory_analysis().host_temp_size_in_bytes == 0


@pytest.mark.parametrize("count", [1, 8])
def test_they_run_again_and_again_and_compute_what_they_say(count):
    devices = jax.devices("cpu")[:count]
    out, into, both = programs.copies(devices, 64 * 1024)
    for program, kinds in (
        (out, ["pinned_host"]),
        (into, ["device"]),
        (both, ["pinned_host", "device"]),
    ):
        run = program.ready()
        run()
        made = jax.tree.leaves(run())
        assert [a.sharding.memory_kind for a in made] == kinds
        for array in made:
            assert len(array.sharding.device_set) == count
            np.testing.assert_array_equal(
                np.asarray(array), np.asarray(programs.filled(program.specs[0]))
            )
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8"):
        one, other = programs.products(devices, dtype, 16).ready()()
        x = np.asarray(
            programs.filled(programs.products(devices[:1], dtype, 16).specs[0])
        )
        expected = x.astype(np.float64) @ x.astype(np.float64)
        for made in (one, other):
            first = np.asarray(made)[:16].astype(np.float64)
            np.testing.assert_allclose(first, expected, rtol=0.01)
    run = programs.stream(devices, 64 * 1024, repeats=30).ready()
    np.testing.assert_allclose(np.asarray(run()), 0.5, rtol=1e-6)  # x = x / 2 + 1 / 4
    assert np.isfinite(
        np.asarray(programs.arithmetic(devices, 4096, 2).ready()())
    ).all()
    update = programs.update(devices, 64 * 1024).ready()
    update()
    assert all(np.isfinite(np.asarray(array)).all() for array in update())
