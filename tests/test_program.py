"""Reading compiled programs of TPUs and GPUs that are not there."""

import functools
import itertools
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import compiled_programs
from compiled_programs import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    HIDDEN,
    LAYERS,
    ROWS,
    SCOPE_IN,
    SCOPE_OUT,
    WIDTH,
    compiled,
    machine,
    program,
)
from stowax._errors import ArgumentError
from stowax._hlo._program import read_program, transfers_named

TARGETS = ("v5e-4", "h200")
BFLOAT16, FLOAT32 = 2, 4

_LINE = re.compile(r"\s*(?:ROOT )?%(\S+) = (\S.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})? ([a-z-]+)\(")


def instructions(read):
    return [i for c in read.computations.values() for i in c.instructions]


def total(read, attribute):
    return sum(
        getattr(item, attribute) * computation.executions
        for computation in read.computations.values()
        for item in computation.instructions
    )


def text_of(name, target):
    """The compiled text by computation: name -> list of (instruction, rest of line)."""
    found, current = {}, None
    for line in compiled(name, target).as_text().splitlines():
        if line.startswith("%") or line.startswith("ENTRY"):
            current = line.removeprefix("ENTRY ").split()[0].removeprefix("%")
            found[current] = []
        elif current and (match := _LINE.match(line)):
            found[current].append(match.groups())
    return found


# --- the wire format: every field that we read, against XLA's own text ---------------


@pytest.mark.quick("offloaded-h200", "plain-h200", "on_the_host-h200")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["offloaded", "plain", "on_the_host"])
def test_computations_are_in_the_order_of_the_text(name, target):
    text = text_of(name, target)
    read = program(name, target)
    for computation in read.computations.values():
        if computation.name.startswith("async_computation"):
            continue  # the text writes these as one line of their caller
        names = [item.name for item in computation.instructions]
        assert names == [written for written, _ in text[computation.name]]


@pytest.mark.parametrize("target", TARGETS)
def test_opcodes_shapes_spaces_and_names_are_those_of_the_text(target):
    text = text_of("offloaded", target)
    sizes = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
    arrays = spaces = names = 0
    for computation in program("offloaded", target).computations.values():
        lines = dict(text[computation.name])
        for item in computation.instructions:
            if named := re.search(r'op_name="([^"]*)"', lines[item.name]):
                assert item.op_name == named.group(1).replace("\\'", "'")
                names += 1
            if (array := _ARRAY.match(lines[item.name])) and array.group(1) in sizes:
                dtype, dimensions, space, opcode = array.groups()
                shape = [int(d) for d in dimensions.split(",") if d]
                assert item.result_bytes == math.prod(shape) * sizes[dtype]
                assert item.opcode == opcode or item.opcode.startswith("async-")
                arrays += 1
                spaces += space is not None
    assert min(arrays, names) > 20
    assert spaces >= 3


@pytest.mark.parametrize("target", TARGETS)
def test_the_source_line_is_where_the_user_wrote_it(target):
    (copy,) = transfers_named(program("offloaded", target), SCOPE_IN)
    path, line = copy.source.rsplit(":", 1)
    assert path == compiled_programs.__file__
    with open(path) as file:
        written = file.read().splitlines()[int(line) - 1]
    assert "dynamic_index_in_dim" in written or "device_put" in written


def test_cycle_estimates_are_those_of_the_text():
    written = sorted(
        int(cycles)
        for rest in itertools.chain.from_iterable(text_of("plain", "v5e-4").values())
        for cycles in re.findall(r'"estimated_cycles":"(\d+)"', rest[1])
    )
    read = [i.estimated_cycles for i in instructions(program("plain", "v5e-4"))]
    kept = sorted(cycles for cycles in read if cycles is not None)
    assert kept
    assert set(kept) <= set(written)
    assert sum(kept) > 0.9 * sum(written)  # the rest stands inside fusions


def test_operands_are_those_of_the_text():
    for name, rest in text_of("nested", "h200")[program("nested", "h200").entry]:
        read = next(
            i for i in instructions(program("nested", "h200")) if i.name == name
        )
        inside = rest.split("(", 1)[1] if "(" in rest else ""
        operands = re.findall(r"%([\w.-]+)", inside.split("), ")[0])
        assert list(read.operands) == [o for o in operands if o in read.operands]


# --- loops --------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "trips"),
    [("plain", [LAYERS, LAYERS]), ("streamed", [BLOCKS]), ("nested", [3, 5])],
)
def test_trips_are_counted(name, trips, target):
    read = program(name, target)
    found = [i.trips for i in instructions(read) if i.opcode == "while"]
    # The compiler may unroll or peel: then what is left runs less often, and products
    # stand outside. Flops below hold the two together; here nothing was peeled.
    assert sorted(found) == sorted(trips)
    assert read.uncounted_loops == ()


def test_the_integer_program_agrees_with_what_the_gpu_compiler_writes_down():
    counted = program("plain", "h200")
    known = [i.trips for i in instructions(counted) if i.opcode == "while"]
    serialized = compiled("plain", "h200").hlo_module_protos()[0]
    assert b"known_trip_count" in serialized
    blind = serialized.replace(b"known_trip_count", b"hidden_trip_coun")
    read = read_program(blind)
    assert [i.trips for i in instructions(read) if i.opcode == "while"] == known


@pytest.mark.parametrize("target", TARGETS)
def test_a_loop_whose_length_is_data_is_named(target):
    read = program("open_ended", target)
    (loop,) = [i for i in instructions(read) if i.opcode == "while"]
    assert loop.trips is None
    assert read.uncounted_loops == (loop.name,)


# --- work ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_products_are_counted_in_loops_and_fusions(target):
    # Forward: two products of 2 * ROWS * WIDTH * HIDDEN per layer; backward: each again
    # for the gradient of its input and of its weight.
    product = 2 * ROWS * WIDTH * HIDDEN
    assert total(program("plain", target), "flops") == 6 * LAYERS * product
    square = 2 * ROWS * WIDTH * WIDTH
    assert total(program("nested", target), "flops") == 3 * 5 * square


def _compile(target, function, *shapes, dtype=jnp.bfloat16):
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    serialized = machine(target).compile(jax.jit(function), *specs)
    return read_program(serialized.hlo_module_protos()[0])


@pytest.mark.parametrize("target", TARGETS)
def test_batched_products_count_no_padding(target):
    # TPUs turn the batch into a window with holes; only real positions are work.
    batch, rows, depth, columns = 16, 256, 128, 512
    read = _compile(
        target,
        lambda a, b: jnp.einsum("bik,bkj->bij", a, b),
        (batch, rows, depth),
        (batch, depth, columns),
    )
    assert total(read, "flops") == 2 * batch * rows * depth * columns


@pytest.mark.parametrize("target", TARGETS)
def test_a_convolution_counts_its_window_inside_the_image(target):
    images, size, channels, features = 8, 32, 128, 256
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    read = _compile(
        target,
        convolve,
        (images, size, size, channels),
        (3, 3, channels, features),
    )
    # In one direction a window of 3 over `size` positions misses one at each end.
    positions = (3 * size - 2) ** 2
    expected = 2 * images * positions * channels * features
    assert total(read, "flops") == expected


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_of_a_convolution_take_as_much_as_it_does(target):
    images, size, channels, features, kernel = 8, 32, 128, 256, 2

    def gradients(x, weights):
        def loss(x, weights):
            y = jax.lax.conv_general_dilated(
                *(x, weights, (kernel, kernel), "VALID"),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            return jnp.sum(jnp.tanh(y))

        return jax.grad(loss, argnums=(0, 1))(x, weights)

    shapes = (images, size, size, channels), (kernel, kernel, channels, features)
    read = _compile(target, gradients, *shapes)
    forward = 2 * images * size**2 * channels * features
    assert total(read, "flops") == 3 * forward


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_of_a_scan_are_those_of_slices_not_of_stacks(target):
    read = program("plain", target)
    slots = {ROWS * HIDDEN * BFLOAT16, ROWS * WIDTH * BFLOAT16}
    slots |= {WIDTH * HIDDEN * BFLOAT16}
    writes = [
        (i.bytes_accessed, i.result_bytes // LAYERS)
        for c in read.computations.values()
        if c.executions == LAYERS
        for i in c.instructions
        if i.opcode == "fusion" and i.result_bytes // LAYERS in slots
        if i.result_bytes % LAYERS == 0 and "update" in i.name
    ]
    assert writes
    # A layer's slot is computed from at most two others (and a few numbers), then
    # written: were the stack counted it would be LAYERS and more.
    for touched, slot in writes:
        assert slot <= touched < 4 * slot


# --- transfers ----------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_offloaded_values_are_found_by_scope_with_bytes_and_trips(target):
    read = program("offloaded", target)
    slot = ROWS * WIDTH * BFLOAT16
    (out,) = transfers_named(read, SCOPE_OUT)
    (back,) = transfers_named(read, SCOPE_IN)
    assert (out.direction, out.bytes, out.trips) == ("device-to-host", slot, LAYERS)
    assert (back.direction, back.bytes, back.trips) == ("host-to-device", slot, LAYERS)
    assert out.total_bytes == LAYERS * slot
    assert out.asynchronous
    assert back.asynchronous
    assert out.start != out.done
    assert len(read.transfers) == 2
    assert transfers_named(read, "stowax.offload.") == (out,)
    assert transfers_named(read, "stowax.offload") == ()
    assert transfers_named(read, "offload.30") == ()


@pytest.mark.parametrize("target", TARGETS)
def test_a_scope_inside_a_scan_body_does_not_reach_the_copy_of_its_outputs(target):
    # What the module's docstring says of XLA. If this ever fails, names got better.
    read = program("scanned", target)
    assert transfers_named(read, SCOPE_OUT) == ()
    (copy,) = read.transfers
    assert copy.direction == "device-to-host"
    assert copy.total_bytes == LAYERS * ROWS * HIDDEN * BFLOAT16
    assert "dynamic_update_slice" in copy.op_name


@pytest.mark.parametrize("target", TARGETS)
def test_streamed_state_moves_once_each_way(target):
    read = program("streamed", target)
    block = BLOCK_ROWS * COLUMNS * FLOAT32
    moved = {t.direction: (t.bytes, t.trips) for t in read.transfers}
    assert moved == {
        "device-to-host": (block, BLOCKS),
        "host-to-device": (block, BLOCKS),
    }


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_without_host_memory_has_no_transfers(target):
    assert program("plain", target).transfers == ()


def test_host_computations_have_a_thread_of_their_own():
    read = program("on_the_host", "v5e-4")
    there = [c for c in read.computations.values() if c.execution_thread == "host"]
    assert sum(i.flops for c in there for i in c.instructions) > 0
    here = [c for c in read.computations.values() if c.execution_thread == ""]
    assert read.entry in [c.name for c in here]


@pytest.mark.parametrize("target", TARGETS)
def test_branches_share_the_trips_of_the_loop(target):
    read = program("switched", target)
    branches = [i.called for i in instructions(read) if i.opcode == "conditional"]
    for called in branches:
        # Four layers, each chosen once.
        assert [read.computations[name].executions for name in called] == [1] * 4
    assert total(read, "flops") == 4 * 2 * 2 * ROWS * WIDTH * HIDDEN


# --- bad input ----------------------------------------------------------------------


@pytest.mark.parametrize("serialized", [b"", b"no protobuf at all", b"\x0a\x03abc"])
def test_other_bytes_are_refused(serialized):
    with pytest.raises(ArgumentError, match="serialized: got no HLO module") as error:
        read_program(serialized)
    assert "as_serialized_hlo_module_proto()" in str(error.value)


def test_importing_the_reader_does_not_load_protobuf():
    code = "import sys, stowax._hlo._program, stowax._timing._simulate\n"
    code += "assert 'google.protobuf' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True)
