"""What cannot be inspected is refused, and what cannot be read is said."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from compiled_programs import compiled, machine, program
from report_records import INSPECTION
from stowax._errors import ArgumentError, CallError
from stowax._hlo._program import read_program
from stowax._hlo._proto import Module
from stowax._inspect._inspect import inspect, inspect_program
from stowax._records._inspection import Omission
from stowax.report import inspection_text

SPEC = jax.ShapeDtypeStruct((128, 128), jnp.float32)


def test_a_lowered_function_is_not_compiled():
    lowered = jax.jit(jnp.sin).lower(SPEC)
    with pytest.raises(ArgumentError) as error:
        inspect(lowered)
    assert str(error.value) == (
        "jitted_or_compiled: got Lowered, which is not compiled. Write "
        "stowax.inspect(lowered.compile()), or give the jitted function and its "
        "arguments."
    )


def test_a_function_that_is_not_jitted():
    with pytest.raises(ArgumentError) as error:
        inspect(jnp.sinc.__wrapped__, SPEC)
    assert str(error.value) == (
        "jitted_or_compiled: got function. Write stowax.inspect(jax.jit(step), ...)."
    )


def test_a_program_that_was_compiled_for_another_machine():
    with pytest.raises(ArgumentError) as error:
        inspect(compiled("nested", "v5e-4"), target="h200")
    assert str(error.value) == (
        "target: got h200, and the program was compiled for v5e-4. Leave target out; "
        "or give the jitted function and its arguments, to compile it for h200."
    )


def test_arguments_of_another_machine():
    spec = SPEC.update(sharding=machine("v5e-4").sharding())
    with pytest.raises(ArgumentError) as error:
        inspect(jax.jit(jnp.sin), spec, target="v5p-8")
    assert str(error.value).startswith("args[0]: got a sharding over TPU")
    assert "which target v5p-8 does not have" in str(error.value)
    assert "stowax.target('v5p-8').mesh(...)" in str(error.value)


def test_a_program_without_a_schedule():
    module = Module.FromString(compiled("nested", "v5e-4").hlo_module_protos()[0])
    module.ClearField("schedule")
    unscheduled = read_program(module.SerializeToString())
    assert not unscheduled.scheduled
    analysis = compiled("nested", "v5e-4").memory_analysis()
    with pytest.raises(ArgumentError) as error:
        inspect_program(unscheduled, analysis, machine("v5e-4"))
    assert str(error.value) == (
        "jitted_or_compiled: got jit_step, a program without a schedule. Compile it "
        "for the target: stowax.inspect(jax.jit(step), *args, target='v5p-8')."
    )


def test_a_program_that_is_newer_than_the_reader():
    """Operations and dtypes that nobody has heard of are said, not passed over."""
    there = compiled("nested", "v5e-4")
    known = program("nested", "v5e-4")
    assert known.unread == ()
    module = Module.FromString(there.hlo_module_protos()[0])
    (entry,) = [c for c in module.computations if c.id == module.entry_computation_id]
    root = next(item for item in entry.instructions if item.id == entry.root_id)
    added = entry.instructions.add()
    added.CopyFrom(root)
    added.id, added.name = 10**6, "quantum.1"
    added.opcode = "entangle"
    added.shape.element_type = 99
    for sequence in module.schedule.sequences:
        if sequence.key == entry.id:
            sequence.value.instruction_ids.append(added.id)
    newer = read_program(module.SerializeToString())
    assert newer.unread == (
        "operation entangle (1 times): priced at the bytes it touches",
        "arrays of dtype number 99 (1): their bytes are not counted",
    )
    found = inspect_program(newer, there.memory_analysis(), machine("v5e-4"))
    said = [o.reason for o in found.omissions if o.what == "the program"]
    assert tuple(said) == newer.unread
    # Everything else is read as before.
    assert dataclasses.replace(newer, unread=()).transfers == known.transfers
    assert found.memory == inspect(there).memory


def test_a_report_says_where_it_did_not_look():
    omission = Omission(what="offload-vanished", reason="it is compiled already")
    found = dataclasses.replace(INSPECTION, hazards=(), omissions=(omission,))
    text = inspection_text(found, 80)
    assert "No hazards found.\n\nnot known  offload-vanished: it is compiled" in text


def test_what_is_no_module():
    with pytest.raises(ArgumentError, match="serialized: got no HLO module"):
        read_program(b"\xff\xff")


def test_what_a_step_takes_by_name():
    def step(x, *, batch, kind="sum"):
        return (x @ batch).sum() if kind == "sum" else (x @ batch).mean()

    x = jax.ShapeDtypeStruct((64, 64), "float32")
    jitted = jax.jit(step, static_argnames="kind")
    found = inspect(jitted, x, batch=x, kind="mean", target="h200")
    assert found.memory.device.argument == 2 * 4 * 64 * 64
    with pytest.raises(CallError) as caught:
        inspect(jitted, x, batch=x, targt="h200")
    assert str(caught.value).startswith("targt: got an argument that neither stowax")
    assert "Did you mean target=?" in str(caught.value)
    done = jax.jit(jnp.sin).lower(SPEC).compile()
    with pytest.raises(CallError, match="targt: got 'h200'"):
        inspect(done, targt="h200")
