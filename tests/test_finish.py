"""The last program of a plan for a TPU: the best one with more of the fast memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import arguments, compiled_total, plan, target_or_skip, train
from stowax._survey._options import FAST_MEMORY, fast_memory_kib

# --- by the real compiler -------------------------------------------------------------

WIDE = arguments(width=1024, rows=32768)
BUDGET = "1.5GiB"


@functools.cache
def by_itself(**options):
    return plan(train, *WIDE, target="v5p-8", budget=BUDGET, **options)


@pytest.mark.slow
def test_the_last_program_for_a_tpu_has_more_unless_compiles_are_counted():
    counted, found = by_itself(), by_itself(compiles=None)
    assert FAST_MEMORY not in counted.program.compiler_options
    assert found.fits
    assert max(len(found.search.trials), len(counted.search.trials)) <= 4
    assert found.search.trials[-1].step_seconds == found.step_seconds
    assert found.program.compiler_options[FAST_MEMORY] == "32768"
    assert found.step_seconds < counted.step_seconds
    assert any("of the chip's fast memory" in note for note in found.proof.notes)
    assert compiled_total(found, train, *WIDE) == found.device_bytes


@pytest.mark.slow
def test_a_step_that_fits_as_it_is_is_told_of_it_and_left_alone():
    kept = {"forbid": ["recompute"], "target": "v5p-8"}  # else a plan is faster
    found = plan(train, *arguments(), compiles=None, **kept)
    assert found.outcome == "unneeded"
    assert (
        found.program.compiler_options.keys()
        == plan(train, *arguments(), **kept).program.compiler_options.keys()
    )
    assert any(
        note.startswith("each kernel may hold 16 MiB") for note in found.proof.notes
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e-1", "v5p-8", "v6e-1"])
def test_the_default_is_what_the_compiler_has_by_itself(name):
    """What the table says a chip's kernels have is what libtpu gives them."""
    chip = target_or_skip(name)
    usual, _ = fast_memory_kib(chip)
    sizes = ((4096, 2048), (2048, 4096))
    arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]

    def cycles(options):
        step = jax.jit(lambda x, w: jax.nn.gelu(x @ w))
        program = chip.compile(step, *arrays, compiler_options=options)
        return stowax.inspect(program, target=chip).timeline.step_seconds

    assert cycles({FAST_MEMORY: str(usual)}) == cycles({})
    assert cycles({FAST_MEMORY: str(usual // 2)}) > cycles({})
