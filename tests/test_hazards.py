"""Every kind of hazard, planted in a compiled step and found at its line; and none in
the same step put right, nor in plans."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

import hazard_programs
from compiled_programs import machine
from hazard_programs import LAYERS, hazards_of, inspected, line_of
from stowax._hazards import HAZARD_KINDS, SEARCHES
from stowax._inspect._inspect import inspect

pytestmark = pytest.mark.usefixtures("full_effort")

MIB = 2**20


def kinds(found):
    return {hazard.kind for hazard in found.hazards}


def test_the_list_is_closed_and_every_kind_says_what_it_is():
    assert list(HAZARD_KINDS) == [
        "misplaced-copy",
        "host-compute",
        "known-bad-version",
        "memory-kinds-dropped",
        "offload-vanished",
        "policy-name-unmatched",
        "state-moved",
        "host-memory-exceeded",
        "synchronous-copy",
        "unhidden-copy",
        "argument-not-donated",
        "donated-in-vain",
        "stacked-again",
        "kept-to-be-summed",
        "turned-stack",
        "rematerialization",
        "duplicate-copy",
        "cheaper-to-recompute",
        "small-copy",
        "unaligned-offload",
    ]
    assert SEARCHES.keys() == HAZARD_KINDS.keys()
    assert all(text.endswith(".") for text in HAZARD_KINDS.values())


def test_the_documentation_has_the_list():
    page = pathlib.Path(__file__).parents[1] / "docs" / "inspect.md"
    lines = page.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `") and line.endswith(". |")]
    assert rows == [f"| `{kind}` | {what} |" for kind, what in HAZARD_KINDS.items()]


# --- what was asked for and did not happen ------------------------------------------


def test_a_policy_that_names_nothing():
    (hazard,) = inspected("policy_names_nothing", "h200").hazards
    assert hazard.kind == "policy-name-unmatched"
    assert hazard.where.endswith(line_of(hazard_programs._scanned, "jax.checkpoint("))
    assert "no value is called 'hiden' (names that are given: 'hidden')" in hazard.cost
    assert "stores nothing, and all of it is computed again" in hazard.cost
    assert inspected("clean_policy", "h200").hazards == ()


@pytest.mark.slow
def test_a_policy_that_names_nothing_under_the_newer_remat():
    """There a policy stands in an operation of another kind, and lines are lost."""
    jax.config.update("jax_remat3", True)
    try:
        found = hazard_programs.inspect_on("policy_names_nothing", machine("h200"))
        right = hazard_programs.inspect_on("clean_policy", machine("h200"))
    finally:
        jax.config.update("jax_remat3", False)
    assert right.hazards == ()
    if jax.__version_info__ < (0, 12):
        (omission,) = found.omissions
        assert omission.what == "policy-name-unmatched"
        assert "newer remat leaves no policy in the trace" in omission.reason
    else:
        (hazard,) = found.hazards
        assert hazard.kind == "policy-name-unmatched"
        assert line_of(hazard_programs._layer, 'x @ w["up"]') in hazard.where


@pytest.mark.slow
def test_an_offload_that_the_compiler_folds_away():
    found = inspected("round_trip_folded_away", "h200")
    assert found.memory.host.total == 0
    assert [h.kind for h in found.hazards] == ["offload-vanished"] * LAYERS
    made = line_of(hazard_programs._block_forward, "device_put(hidden, HOST)")
    assert found.hazards[0].where.endswith(f"{made} (dot_general)")
    assert "2.00 MiB per step were to go to the host, 0 B do" in found.hazards[0].cost
    kept = inspected("clean_offload", "h200")
    assert kept.memory.host.total == LAYERS * 2 * MIB
    assert not hazards_of(kept, "offload-vanished")


def test_memory_kinds_dropped_on_the_way_to_the_compiler():
    found = inspected("specs_without_memory_kinds", "h200")
    (hazard,) = hazards_of(found, "memory-kinds-dropped")
    assert not hazards_of(found, "state-moved")  # the same, said once
    assert hazard.where.endswith("(args[0][1])")
    assert "brings 1 argument(s), 16.0 MiB, to the device" in hazard.cost
    assert "jax.eval_shape drops it" in hazard.remedy
    assert not hazards_of(inspected("clean_state", "h200"), "memory-kinds-dropped")


def test_devices_without_memories_are_said():
    """Somebody lowers over compile-only GPUs by hand."""
    there = machine("h200")
    mesh = jax.sharding.Mesh([there.compile_devices[0]], ("device",))
    host = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host"
    )
    state = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=host)
    compiled = jax.jit(lambda state: state * 2).lower(state).compile()
    found = inspect(compiled, target="h200")
    assert found.memory.host.total == 0
    (omission,) = [o for o in found.omissions if "memory-kinds-dropped" in o.what]
    assert "devices that have no memories" in omission.reason
    assert "stowax.target(name).compile(jitted, *specs)" in omission.reason


# --- state --------------------------------------------------------------------------


def test_state_that_comes_back_in_another_memory():
    found = inspected("state_comes_back_elsewhere", "h200")
    (hazard,) = found.hazards
    assert hazard.kind == "state-moved"
    step = line_of(hazard_programs._update, "def _update")
    assert hazard.where.endswith(f"{step} (args[0][1])")
    assert "16.0 MiB come in host memory and leave as its result[1] in device" in (
        hazard.cost
    )
    assert hazard.seconds == 16 * MIB / machine("h200").link.host_to_device
    assert inspected("clean_state", "h200").hazards == ()


def test_state_that_is_not_donated():
    found = inspected("state_not_donated", "h200")
    (hazard,) = found.hazards  # one for all of an argument: they are donated together
    assert hazard.kind == "argument-not-donated"
    assert hazard.where.endswith("(args[0][0])")
    assert "32.0 MiB in 2 arrays of device memory" in hazard.cost
    assert hazard.count == 2
    given = inspected("clean_donated", "h200")
    assert given.hazards == ()
    saved = found.memory.device.total - given.memory.device.total
    assert saved == 2 * 16 * MIB  # what the hazard says


def test_what_is_donated_in_vain():
    (hazard,) = inspected("donated_for_nothing", "h200").hazards
    assert hazard.kind == "donated-in-vain"
    assert hazard.where.endswith("(args[1])")
    assert "16.0 MiB of device memory are given away" in hazard.cost


def test_gradients_are_no_state():
    """They have the type of their weights, and need memory of their own."""
    assert inspected("clean_policy", "h200").hazards == ()


# --- copies -------------------------------------------------------------------------


def test_what_a_loop_fetches_again_and_again():
    found = inspected("fetched_in_every_trip", "h200")
    (hazard,) = hazards_of(found, "duplicate-copy")
    used = line_of(hazard_programs.fetched_in_every_trip, "device_put(w, DEVICE)")
    assert f"{used} " in hazard.where
    assert "4.00 MiB are fetched 8 x per step, unchanged" in hazard.cost
    assert hazard.count == 8
    assert inspected("clean_fetch", "h200").hazards == ()


def test_values_that_leave_and_stay_as_well():
    found = inspected("there_and_back", "v5p-8")
    (hazard,) = hazards_of(found, "duplicate-copy")
    assert "went to the host and come back, and were on the device" in hazard.cost
    # Where it is used, or where it was kept apart: versions of XLA name either.
    step = hazard_programs.there_and_back
    lines = [line_of(step, text) for text in ("optimization_barrier", "y @ back")]
    assert any(line in hazard.where for line in lines)


def test_what_is_fetched_again_while_it_is_still_there():
    found = inspected("fetched_twice", "h200")
    (hazard,) = hazards_of(found, "duplicate-copy")
    assert "16.0 MiB are fetched again while the first copy of them is" in hazard.cost
    step = hazard_programs.fetched_twice
    lines = [line_of(step, text) for text in ("optimization_barrier", "y @ second")]
    assert any(line in hazard.where for line in lines)


def test_values_that_are_cheaper_to_make_again():
    found = inspected("cheap_values_offloaded", "h200")
    (hazard,) = hazards_of(found, "cheaper-to-recompute")
    made = line_of(hazard_programs.cheap_values_offloaded, "jnp.sin(x)")
    assert hazard.where.endswith(f"{made} (wave)")
    assert hazard.seconds < found.timeline.exposed_seconds
    assert hazard.seconds > 0.9 * found.timeline.exposed_seconds
    assert "32.0 MiB per step go to the host and back" in hazard.cost


@pytest.mark.slow
def test_hidden_copies_are_not_held_against_anybody():
    """The same loops with the copies in flight for a whole layer."""
    assert inspected("clean_pipelined", "v5p-8").hazards == ()


def test_many_small_copies():
    found = inspected("many_small_copies", "h200")
    hazards = hazards_of(found, "small-copy")
    assert hazards
    assert hazards[0].count == 64
    assert "64 copies per step" in hazards[0].cost
    assert "of at most 4.00 KiB" in hazards[0].cost
    assert line_of(hazard_programs.many_small_copies, "put(s) + g") in hazards[0].where
    assert inspected("one_large_copy", "h200").hazards == ()


@pytest.mark.slow
def test_arrays_that_do_not_fill_tiles():
    found = inspected("narrow_values_offloaded", "v5p-8")
    hazards = hazards_of(found, "unaligned-offload")
    assert {h.count for h in hazards} == {LAYERS}
    rows, columns, padded = 8192, 9, 16
    assert found.memory.host.temp == LAYERS * rows * padded * 2
    assert "144.0 KiB" in hazards[0].cost  # rows x columns x 2 bytes
    assert rows * columns * 2 == 144 * 1024
    assert "256.0 KiB in tiles" in hazards[0].cost
    assert not hazards_of(inspected("clean_offload", "v5p-8"), "unaligned-offload")
