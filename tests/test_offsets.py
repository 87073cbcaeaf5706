"""Slices whose place the compiler worked out beforehand: is it the program's?"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import stowax
from stowax._records._program import Misplaced
from stowax._trial import _compiled

BLOCKS, ROWS, COLUMNS = 8, 128, 2048
OLD = jax.__version_info__ < (0, 11)


def written(index_of):
    """Writes to host memory, block by block, one trip after each was made."""

    def step(moment, x):
        def trip(i, carry):
            moment, block, before = carry
            block = jax.device_put(block, jax.memory.Space.Host)
            start = ROWS * index_of(i, before)
            moment = jax.lax.dynamic_update_slice(
                moment, block, (start, 0), allow_negative_indices=False
            )
            return moment, jnp.tanh(x * i), i

        start = moment, jnp.tanh(x), jnp.int32(0)
        return jax.lax.fori_loop(0, BLOCKS, trip, start)[0]

    return step


def misplaced(index_of):
    target = stowax.target("h200")
    host = target.sharding(memory_kind="pinned_host")
    shape = BLOCKS * ROWS, COLUMNS
    moment = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=host)
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    step = jax.jit(written(index_of), donate_argnums=0)
    found = stowax.inspect(step, moment, x, target="h200")
    return [h for h in found.hazards if h.kind == "misplaced-copy"]


def test_what_one_trip_hands_on_is_not_the_loops_counter():
    """The first trip and the second write block 0: XLA has the second write block 1."""
    (hazard,) = misplaced(lambda i, before: before)
    assert "test_offsets.py" in hazard.where
    assert "its numbers are wrong" in hazard.remedy


@pytest.mark.skipif(not OLD, reason="jaxlib 0.11 does not forget it")
def test_what_an_index_is_computed_with_is_not_forgotten():
    """Block `i` begins at row `ROWS * i`: XLA has it begin at row `i`."""
    assert len(misplaced(lambda i, _: i)) == 1


@pytest.mark.skipif(OLD, reason="jaxlib 0.10 is wrong about all of these")
@pytest.mark.parametrize(
    "index_of",
    [
        lambda i, _: i,
        lambda i, _: BLOCKS - 1 - i,
        lambda i, _: i + 1,
        lambda i, _: jnp.abs(i - BLOCKS + 1),
    ],
    ids=["counter", "backwards", "past the end", "computed"],
)
def test_what_is_where_the_program_has_it_is_no_hazard(index_of):
    assert misplaced(index_of) == []


@pytest.mark.slow
def test_a_plan_keeps_what_its_program_would_misplace(monkeypatch):
    """No plan is made of a program that copies from or to other places."""
    read = _compiled.read_program

    def wrong(module):
        program = read(module)
        own = [t for t in program.transfers if "stowax.state." in t.op_name]
        found = tuple(
            Misplaced(name=t.start, op_name=t.op_name, source="") for t in own
        )
        return dataclasses.replace(program, misplaced=found)

    def step(state, x):
        def loss(w):
            return jnp.mean(jnp.square(x @ w - 1))

        w, moment = state
        value, slope = jax.value_and_grad(loss)(w)
        moment = 0.9 * moment + slope
        return (w - 0.1 * moment, moment), value

    spec = jax.ShapeDtypeStruct
    args = (spec((2048, 2048), "float32"),) * 2, spec((32, 2048), "float32")
    options = {"target": "h200", "pin": {"optimizer state": "offload"}}
    right = stowax.plan(step, *args, progress=False, **options)
    assert right.host_bytes > 0
    # No GPU has shown yet that the copies overlap: that is said.
    assert any(
        "one after the other, as XLA runs loops" in note for note in right.proof.notes
    )
    monkeypatch.setattr(_compiled, "read_program", wrong)
    kept = stowax.plan(step, *args, progress=False, **options)
    assert (kept.fits, kept.host_bytes) == (True, 0)
    assert any("from or to other places" in note for note in kept.proof.notes)
    assert not any("one after the other" in note for note in kept.proof.notes)


@pytest.mark.parametrize(("own", "accepted"), [(False, False), (True, True)])
def test_a_slice_without_a_name_counts_unless_the_step_has_it_as_it_is(
    own, accepted, monkeypatch
):
    """XLA's pipelining of collectives drops names of what it moves: whose was it?"""
    read = _compiled.read_program

    def wrong(module):
        program = read(module)
        items = [i for c in program.computations.values() for i in c.instructions]
        planned = any("stowax.layers" in item.op_name for item in items)
        nameless = Misplaced(name="slice", op_name="", source="")
        return dataclasses.replace(program, misplaced=(nameless,) * (planned or own))

    def step(w, x):
        def loss(w):
            layer = lambda x, w: (x + jnp.tanh(x @ w), None)
            return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    spec = jax.ShapeDtypeStruct
    args = spec((4, 256, 256), "float32"), spec((4096, 256), "float32")
    monkeypatch.setattr(_compiled, "read_program", wrong)
    found = stowax.plan(step, *args, progress=False, target="h200", budget="60%")
    again = [d for d in found.decisions if d.decision == "recompute"]
    assert bool(found.fits and again) == accepted
    said = [note for note in found.proof.notes if "other places" in note]
    assert said
    assert ("planned or not" in said[0]) == own
