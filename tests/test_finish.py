"""The last program of a plan for a TPU: the best one with more of the fast memory."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import arguments, compiled_total, plan, target_or_skip, train
from stand_in_search import QUESTION, SET, TPU, Search
from stowax._errors import CompileError
from stowax._plan._finding import Asked, FoundFor, _finished
from stowax._search._finish import fast_memory_notes, finished
from stowax._search._forms import Found
from stowax._survey._options import FAST_MEMORY, fast_memory_kib, more_fast_memory


def faster(options):
    return 0.8 if FAST_MEMORY in options else 1.0


def slower(options):
    return 1.2 if FAST_MEMORY in options else 1.0


def found_by(search):
    search.compile(search.settle(), 4)
    return Found(search=search, best=search.best(), rolled=search)


def test_it_has_the_best_decisions_and_stays_if_it_is_faster():
    search = Search(QUESTION, factor=faster)
    before = found_by(search)
    after = finished(before)
    assert len(search.attempts) == 2
    assert after.best.decisions == before.best.decisions
    assert after.best.options == {**before.best.options, FAST_MEMORY: "32768"}
    assert finished(after) == after
    assert len(search.attempts) == 2  # nothing is compiled twice


def test_it_goes_if_it_is_slower():
    search = Search(QUESTION, factor=slower)
    before = found_by(search)
    assert finished(before).best is before.best
    assert len(search.attempts) == 2
    assert fast_memory_notes(search, before.best) == ()


def test_it_goes_if_it_does_not_fit():
    search = Search(QUESTION, factor=faster)
    before = found_by(search)
    search.fits = lambda attempt: FAST_MEMORY not in attempt.options
    assert finished(before).best is before.best
    assert len(search.attempts) == 2


def test_a_compiler_that_refuses_it_costs_no_plan():
    search = Search(QUESTION)
    before = found_by(search)

    def refuse(*_):
        raise CompileError("no such option")

    search.compile = refuse
    assert finished(before).best is before.best
    assert search.said[-1] == "refused, so it stays as it was: no such option"


@pytest.mark.parametrize(
    ("platform", "chip"), [("gpu", "h200"), ("cpu", "cpu"), ("tpu", "v4")]
)
def test_where_it_is_not_known_to_help_nothing_is_compiled(platform, chip):
    machine = types.SimpleNamespace(
        platform=platform, chip=types.SimpleNamespace(key=chip)
    )
    assert more_fast_memory(machine) == {}
    search = Search(QUESTION, factor=faster)
    search.survey.target = machine
    before = found_by(search)
    assert finished(before).best is before.best
    assert len(search.attempts) == 1
    assert fast_memory_notes(search, before.best) == ()


def test_what_the_user_set_stays():
    search = Search(QUESTION, user_options={FAST_MEMORY: "8192"}, factor=faster)
    search.compile(search.settle(), 4, SET | {FAST_MEMORY: "8192"})
    before = Found(search=search, best=search.best(), rolled=search)
    assert finished(before).best is before.best
    assert len(search.attempts) == 1
    assert fast_memory_notes(search, before.best) == ()


def test_what_does_not_fit_is_not_finished():
    search = Search(QUESTION, factor=faster)
    before = found_by(search)
    search.fits = lambda attempt: False
    assert finished(before) is before
    assert len(search.attempts) == 1


def test_a_program_of_several_budgets_is_finished_once():
    search = Search(QUESTION, factor=faster)
    one = FoundFor(found=found_by(search), preferences=None, seconds=1.0)
    first, second = _finished([one, one])
    assert len(search.attempts) == 2
    assert first.found.best is search.attempts[1]
    assert first.seconds > 1.0
    assert second is one  # the faster program is another's, and is taken from there


def asked(target, **changes):
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Asked))
    options = {"compiler_options": {}, **changes}
    return Asked(**{**fields, "machine": target, **options})


def test_the_last_compile_is_left_for_it():
    after = {n: Found(search=searched(n), best=None, rolled=None) for n in (1, 2)}
    usual = asked(TPU)
    assert usual.finishes
    assert usual.most == 3
    assert [usual.has_one_more(after[n]) for n in (1, 2)] == [True, False]
    gpu = types.SimpleNamespace(platform="gpu", chip=types.SimpleNamespace(key="h200"))
    others = [
        asked(TPU, compiles=4),
        asked(TPU, compiler_options={FAST_MEMORY: "16384"}),
        asked(gpu),
    ]
    for other in others:
        assert not other.finishes
        assert other.most == 4
        assert other.has_one_more(after[2])
    assert asked(TPU, compiles=9).most == 9


def searched(programs):
    """A search that compiled so many programs."""
    return types.SimpleNamespace(log=[None] * programs)


def test_notes_say_what_it_did_and_where_it_was_not_tried():
    search = Search(QUESTION, factor=faster)
    after = finished(found_by(search))
    slow, fast = (a.measured.step_seconds for a in search.attempts)
    assert fast == pytest.approx(0.8 * slow)
    (note,) = fast_memory_notes(search, after.best)
    assert note == (
        "each kernel may hold 32 MiB of the chip's fast memory, 16 MiB by default: "
        f"{slow:.2f} s a step became {fast:.2f} s. It is one of the plan's "
        "compiler_options"
    )
    (note,) = fast_memory_notes(search, types.SimpleNamespace(decisions=None))
    assert note == (
        "each kernel may hold 16 MiB of the chip's fast memory, by default. With 32 "
        "MiB steps of large models took 10 to 19 % less, and about twice as long to "
        "compile: "
        "compiler_options={'xla_tpu_scoped_vmem_limit_kib': '32768'}"
    )


# --- by the real compiler -------------------------------------------------------------

WIDE = arguments(width=1024, rows=32768)
BUDGET = "1.5GiB"


@functools.cache
def by_itself(**options):
    return plan(train, *WIDE, target="v5p-8", budget=BUDGET, **options)


@pytest.mark.slow
def test_the_last_program_for_a_tpu_has_more_unless_compiles_are_counted():
    counted, found = by_itself(), by_itself(compiles=None)
    assert FAST_MEMORY not in counted.compiler_options
    assert found.fits
    assert max(len(found.trials), len(counted.trials)) <= 4
    assert found.trials[-1].step_seconds == found.step_seconds
    assert found.compiler_options[FAST_MEMORY] == "32768"
    assert found.step_seconds < counted.step_seconds
    assert any("of the chip's fast memory" in note for note in found.notes)
    assert compiled_total(found, train, *WIDE) == found.device_bytes


def test_a_step_that_fits_as_it_is_is_told_of_it_and_left_alone():
    found = plan(train, *arguments(), target="v5p-8", compiles=None)
    assert found.outcome == "unneeded"
    assert (
        found.compiler_options.keys()
        == plan(train, *arguments(), target="v5p-8").compiler_options.keys()
    )
    assert any(note.startswith("each kernel may hold 16 MiB") for note in found.notes)


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
