"""Planted hazards and their clean twins, on compile-only targets; memory by kind."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from compiled_programs import (
    BLOCK_ROWS,
    BLOCKS,
    COLUMNS,
    HIDDEN,
    LAYERS,
    PROGRAMS,
    ROWS,
    SCOPE_IN,
    SCOPE_OUT,
    WIDTH,
    compiled,
    machine,
)
from stowax._errors import ArgumentError
from stowax._hlo._program import transfers_named
from stowax._inspect._inspect import inspect
from stowax.report import inspection_text

TARGETS = ("v5e-4", "h200")
MISPLACED = ["misplaced-copy"] * 2 if jax.__version_info__ < (0, 11) else []
"""What jaxlib 0.10 makes of blocks that begin at a multiple of the loop's counter."""


def kinds(inspection):
    return [hazard.kind for hazard in inspection.hazards]


# --- memory -------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_memory_is_booked_by_kind_and_donation_is_taken_off(target):
    found = inspect(compiled("streamed", target)).memory
    state = BLOCKS * BLOCK_ROWS * COLUMNS * 4
    assert found.host.argument == found.host.output == found.host.alias == state
    assert found.host.total == state + found.host.temp
    assert found.device.argument == state  # the gradient
    assert found.device.output == 0
    # In place and by blocks: never the whole state on the device.
    assert found.device.total < 1.5 * state


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_offloaded_values_are_host_temporaries(target):
    found = inspect(compiled("offloaded", target)).memory
    assert found.host.temp == LAYERS * ROWS * WIDTH * 2
    assert found.host.total == found.host.temp
    device = found.device
    total = device.argument + device.output - device.alias + device.temp
    assert device.total == total
    assert device.argument == 2 * LAYERS * WIDTH * HIDDEN * 2 + ROWS * WIDTH * 2


# --- hazards ------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_moved_to_the_hosts_processor():
    text = compiled("on_the_host", "v5e-4").as_text()
    found = inspect(compiled("on_the_host", "v5e-4"))
    hazards = [h for h in found.hazards if h.kind == "host-compute"]
    assert hazards
    assert found.hazards[0].kind == "host-compute"
    first = hazards[0]
    assert "compiled_programs.py" in first.where
    assert "GFLOP of matrix products" in first.cost
    assert "jax.device_put(x, jax.memory.Space.Device)" in first.remedy
    assert first.seconds > 0
    # Two products forward, two again and four backward in each of four layers: what is
    # missing on the device is on the host.
    calls = re.findall(r'-start\(.*execution_thread="host"', text)
    assert len(hazards) == len(calls) > 0  # every call, each with its lines
    everything = 4 * 8 * 2 * ROWS * WIDTH * HIDDEN
    assert found.flops < 0.75 * everything
    assert any(u.what == "HostExecute" for u in found.timeline.unpriced)


def test_a_kernel_of_a_sparse_core_is_not_on_the_host():
    spec = jax.ShapeDtypeStruct
    step = jax.jit(lambda table, rows, more: table.at[rows].add(more))
    args = spec((1536,), "float32"), spec((1024,), "int32"), spec((1024,), "float32")
    found = machine("v5p-8").compile(step, *args)
    assert 'async_execution_thread="sparsecore"' in found.as_text()
    inspection = inspect(found)
    assert "host-compute" not in kinds(inspection)
    assert {interval.lane for interval in inspection.timeline.intervals} == {"compute"}


def test_arithmetic_in_host_memory_on_a_gpu():
    found = inspect(compiled("arithmetic_in_host_memory", "h200"))
    (hazard,) = found.hazards
    assert hazard.kind == "host-compute"
    assert hazard.where.endswith("/add)")
    assert "8.00 MiB read and written" in hazard.cost  # 4 MiB in, 4 MiB out


@pytest.mark.parametrize("target", TARGETS)
def test_copies_that_nothing_hides(target):
    found = inspect(compiled("streamed", target))
    wrong = MISPLACED if target == "h200" else []
    assert kinds(found) == [*wrong, "unhidden-copy", "unhidden-copy"]
    directions = sorted(t.direction for t in found.transfers)
    assert directions == ["device-to-host", "host-to-device"]
    for hazard in found.hazards[len(wrong) :]:
        assert hazard.count == BLOCKS
        assert "4.00 MiB" in hazard.cost
        assert "8 x per step" in hazard.cost
    waiting = sum(h.seconds for h in found.hazards)
    assert waiting == pytest.approx(found.timeline.exposed_seconds, rel=0.1)


def test_the_compilers_own_rematerialization():
    found = inspect(compiled("too_large", "h200"))
    (hazard,) = [h for h in found.hazards if h.kind == "rematerialization"]
    product = 2 * 2**19 * 4096 * 4096
    assert ".remat" in hazard.instruction
    assert hazard.count >= 1
    # Each recomputed product costs at least its operations at the chip's peak.
    rate = machine("h200").chip.matrix_rate("bfloat16")
    assert hazard.seconds >= product / rate
    assert f"{hazard.count:g} recomputed operations" in hazard.cost


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["plain", "offloaded"])
def test_clean_programs_have_no_hazards(name, target):
    assert inspect(compiled(name, target)).hazards == ()


# --- what inspect takes, and what it gives ------------------------------------------


def test_planned_offloads_are_looked_up_in_an_inspection():
    found = inspect(compiled("offloaded", "h200"))
    (out,) = transfers_named(found, SCOPE_OUT)
    assert out.total_bytes == LAYERS * ROWS * WIDTH * 2
    assert transfers_named(found, SCOPE_IN)
    vanished = inspect(compiled("plain", "h200"))
    assert transfers_named(vanished, SCOPE_OUT) == ()


def test_a_jitted_function_is_compiled_for_the_target_by_name():
    there = machine("v5e-4")
    jitted, args = PROGRAMS["nested"](there.sharding(), there.sharding())
    by_name = inspect(jitted, *args, target="v5e-4")
    assert by_name == inspect(jitted, *args, target=there)
    assert by_name.target == "v5e-4"
    assert by_name.flops == 3 * 5 * 2 * ROWS * WIDTH * WIDTH


def test_what_jax_compiled_is_inspected_as_it_is():
    program = compiled("nested", "v5e-4")
    found = inspect(program.jax_compiled)
    assert found.memory == inspect(program).memory
    assert found.timeline == inspect(program).timeline  # the chip was recognized


def test_the_attached_device_is_the_default():
    found = inspect(jax.jit(lambda x: x @ x), jnp.ones((64, 64)))
    assert found.memory.device.argument == 64 * 64 * 4
    assert found.transfers == ()
    assert found.timeline.step_seconds > 0


def test_an_inspection_is_json():
    found = inspect(compiled("streamed", "h200"))
    record = json.loads(found.to_json())
    assert record["version"] == 1
    assert record["memory"]["device"]["total"] == found.memory.device.total
    assert [h["kind"] for h in record["hazards"]] == kinds(found)
    moved = BLOCKS * BLOCK_ROWS * COLUMNS * 4
    assert [t["total_bytes"] for t in record["transfers"]] == [moved, moved]
    assert record["timeline"]["step_seconds"] == found.timeline.step_seconds


def test_an_inspection_is_one_line_in_a_notebook():
    found = inspect(compiled("streamed", "h200"))
    assert found.timeline.intervals
    assert len(repr(found)) < 200
    assert repr(found).startswith("<Inspection of jit_")
    assert "on h200: device" in repr(found)
    assert f"2 transfers, {2 + len(MISPLACED)} hazards" in repr(found)
    assert str(found) == inspection_text(found)  # and all of it where it is printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((len,), r"jitted_or_compiled: got builtin_function_or_method. Write stowax"),
        ((jax.jit(len), 3, "not a target"), None),
    ],
)
def test_what_cannot_be_inspected_is_refused(arguments, message):
    if message is None:
        with pytest.raises(ArgumentError, match="target: got 'not a target'"):
            inspect(*arguments[:2], target=arguments[2])
        return
    with pytest.raises(ArgumentError, match=message):
        inspect(*arguments)


def test_arguments_beside_a_compiled_program_are_refused():
    with pytest.raises(ArgumentError, match="args: got 1 beside a compiled program"):
        inspect(compiled("nested", "v5e-4"), jnp.ones(3))
