"""Host memory that saves stage between steps: measured, and said with the argument."""

import pathlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._audit._find import findings_of
from stowax._records._audit import Event, Recording, Resident
from stowax._where import Place

STEP = Place("train.py", 7, "main", 1)
MIB = 1 << 20
LEVEL = 1000 * MIB


def audited(sizes, peaks=(), devices=(1, "gpu"), **compiled):
    """A loop with the process's memory at each step, and most of it since the last."""
    events = [
        Event("call", STEP, "step", 0, at=float(k), bytes=8, **compiled.get(str(k), {}))
        for k in range(len(sizes))
    ]
    peaks = dict(enumerate(sizes)) | dict(peaks)
    resident = [Resident(k, size, peaks[k]) for k, size in enumerate(sizes)]
    return findings_of(
        Recording(events=tuple(events), resident=tuple(resident), devices=devices)
    )


def sizes_with(rises, count=16):
    return [LEVEL + rises.get(k, 0) * MIB for k in range(count)]


def test_what_is_given_back_before_the_next_step():
    """Step 6 is the sixth: what is seen until the next begins was taken after it."""
    record = audited(sizes_with({}), {6: LEVEL + 300 * MIB, 11: LEVEL + 200 * MIB})
    assert record.findings == ()
    assert record.staged_bytes == 300 * MIB
    assert record.to_json()["staged_bytes"] == 300 * MIB
    assert record.notes == (
        "The process takes 300.0 MiB more of the host's memory after steps 6, 11 than "
        "after others, as saves do that stage the state there. Plan with "
        "host_reserve='300MiB'.",
    )


def test_a_copy_that_takes_several_steps_and_is_written_by_and_by():
    record = audited(sizes_with({6: 200, 7: 400, 8: 390, 9: 100}))
    assert record.staged_bytes == 400 * MIB
    assert "after steps 6, 7 than after others" in record.notes[0]


def test_every_device_has_its_part_and_gibibytes_are_rounded_up():
    record = audited(sizes_with({6: 9000}), devices=(4, "tpu"))
    assert record.staged_bytes == 9000 * MIB
    assert 9000 / 1024 / 4 < 2.2
    (note,) = record.notes
    assert note.endswith("Plan with host_reserve='2.2GiB', for each of its 4 devices.")


def test_what_stays():
    kept = {k: 300 * (k > 5) + 300 * (k > 11) for k in range(16)}
    (note,) = audited(sizes_with(kept)).notes
    assert "300.0 MiB more" in note
    assert note.endswith("not given back: the next save may take as much again.")


@pytest.mark.parametrize(
    "rises",
    [
        {},  # nothing happens
        {1: 500},  # what compiles, and fills caches, comes first
        {6: 20},  # an allocator's
        {k: 300 * (k % 2) for k in range(16)},  # every second step is the step's own
        {k: 300 * k for k in range(16)},  # it grows, which is a finding
    ],
)
def test_nothing_is_said_of_other_changes(rises):
    record = audited(sizes_with(rises))
    assert record.staged_bytes == 0
    assert record.notes == ()


def test_what_compiles_takes_memory_for_itself():
    peaks = {6: LEVEL + 300 * MIB}
    again = {"5": {"compiled_seconds": 1.0, "changed": "its shapes"}}
    assert audited(sizes_with({}), peaks, **again).staged_bytes == 0
    assert audited(sizes_with({}), peaks).staged_bytes == 300 * MIB


def test_memory_that_is_not_known():
    assert audited([0] * 16).staged_bytes == 0


# --- as it is measured --------------------------------------------------------------

SIDE = 12 << 20  # of float32: 48 MiB, and three of them are a state
STATE = 3 * 4 * SIDE
# What the process has freed before, and not given back, it takes first.
LEAST = 0.7 * STATE


def loop(save, steps=20):
    """A loop that saves twice; `save` gets the state."""
    state = {k: jnp.ones((SIDE,), jnp.float32) for k in ("w", "m", "v")}
    step = jax.jit(
        lambda s: jax.tree.map(lambda a: a * jnp.float32(0.9), s), donate_argnums=0
    )
    with stowax.audit() as audit:
        for number in range(steps):
            state = step(state)
            jax.block_until_ready(state)
            if number in (8, 14):
                save(number, state)
    return audit.record


def copy_to_host(number, state):
    """What an asynchronous save does: a copy, which a thread writes and drops."""
    copies = jax.tree.map(np.array, state)
    writer = threading.Thread(target=lambda _: time.sleep(0.05), args=(copies,))
    del copies
    writer.start()
    writer.join()


needs_linux = pytest.mark.skipif(
    not pathlib.Path("/proc/self/statm").exists(), reason="memory is unknown"
)


@pytest.mark.slow
@needs_linux
def test_a_copy_of_the_state_is_measured():
    record = loop(copy_to_host)
    assert LEAST <= record.staged_bytes < 1.5 * STATE
    (note,) = [note for note in record.notes if "host_reserve" in note]
    assert note.endswith("On a CPU arrays of JAX's are in it, too.")
    assert loop(lambda number, state: None).staged_bytes == 0


@pytest.mark.slow
@needs_linux
def test_orbax_saves_are_measured(tmp_path):
    """On a CPU Orbax reads the arrays themselves: the next step makes the copy.

    What Orbax has written by then needs none, so one array's copy is all that is sure.
    """
    checkpoint = pytest.importorskip("orbax.checkpoint")
    options = checkpoint.CheckpointManagerOptions(enable_async_checkpointing=True)
    with checkpoint.CheckpointManager(tmp_path, options=options) as manager:

        def save(number, state):
            manager.save(number, args=checkpoint.args.StandardSave(state))

        record = loop(save)
    assert LEAST / 3 <= record.staged_bytes < 3 * STATE
    assert any("host_reserve" in note for note in record.notes)
