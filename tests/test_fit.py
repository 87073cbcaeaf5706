"""The largest batch for a budget: few questions, compiled answers, the front."""

import dataclasses
import importlib.util
import json
import textwrap

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import stowax
from stowax._cli._cli import main
from stowax._errors import ArgumentError, StepError
from stowax._fit import _fit
from stowax._fit._bracket import bracket
from stowax._fit._fit import _confirmed
from stowax._records._fit import BatchTrial, FitRecord
from stowax.report import fit_page, fit_text
from too_large import activations

MIB, GIB = 2**20, 2**30
WIDTH, LAYERS = 128, 4
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="needs jax's plugin"
)


def of_batch(batch):
    return activations(batch, width=WIDTH, layers=LAYERS)


# --- where to ask -------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize(
    "grown",
    [
        lambda batch: 10_000 + 37 * batch,  # a line
        lambda batch: 10_000 + 37 * (-(-batch // 128) * 128),  # padded to tiles
        lambda batch: max(40_000, 37 * batch),  # flat at first
        lambda batch: 10_000 + batch * batch // 50,
    ],
)
def test_the_largest_is_found_with_few_questions(grown, unit):
    asked = []

    def bytes_of(batch):
        asked.append(batch)
        return grown(batch)

    low, high = bracket(bytes_of, 100_000, first=8 * unit, unit=unit)
    assert grown(low) <= 100_000 < grown(high)
    assert low % unit == high % unit == 0
    assert len(asked) == len(set(asked)) <= 12
    line = grown(2) - grown(1) == grown(2000) - grown(1999) == 37
    if line:
        assert high - low == unit
        assert len(asked) <= 5


def test_nothing_fits_and_nothing_is_too_large():
    assert bracket(lambda batch: 1000 + batch, 100, first=8, unit=1) == (0, 1)
    low, high = bracket(lambda batch: 10, 100, first=8, unit=1)
    assert low > 2**20
    assert high == 0


def test_a_bracket_moves_by_what_the_compiler_needs():
    """Programs take a fifth more than predicted, and a tenth less."""
    for taken in (1.2, 0.9):
        compiled = []

        def needs(batch, taken=taken):
            return int((100 + 10 * batch) * taken)

        def fits(batch, compiled=compiled, needs=needs):
            compiled.append(batch)
            return needs(batch) <= 10_000

        best = _confirmed(
            lambda batch: 100 + 10 * batch, needs, fits, 10_000, first=8, unit=1
        )
        assert needs(best) <= 10_000 < needs(best + 2)
        assert len(compiled) == 2


# --- the record ---------------------------------------------------------------------


def trial(batch, way, seconds, gibibytes=1.0, fits=True):
    return BatchTrial(
        batch=batch,
        way=way,
        predicted_bytes=GIB,
        predicted_seconds=0.5,
        fits=fits,
        device_bytes=int(gibibytes * GIB),
        step_seconds=seconds,
    )


RECORD = FitRecord(
    step="step",
    target="v5p-8",
    compile_only=True,
    budget_bytes=16 * GIB,
    host_budget_bytes=64 * GIB,
    largest_as_written=32,
    next_as_written=33,
    largest=96,
    next=100,
    trials=(
        trial(16, "as written", 0.1, 8.0),
        trial(32, "as written", 0.25, 15.9),
        trial(32, "plan", 0.2, 12.0),
        BatchTrial(
            batch=33,
            way="as written",
            predicted_bytes=17 * GIB,
            predicted_seconds=0.4,
            fits=False,
        ),
        trial(96, "plan", 0.8, 15.8),
        trial(100, "plan", 0.7, 17.0, fits=False),
    ),
    seconds=12.0,
)


def test_the_front_has_what_is_not_beaten():
    """Of 32 the plan is faster; what does not fit is on no front."""
    assert [(t.batch, t.way) for t in RECORD.front] == [
        (16, "as written"),
        (32, "plan"),
        (96, "plan"),
    ]
    assert RECORD.fastest.per_second == 16 / 0.1
    alone = dataclasses.replace(RECORD, trials=RECORD.trials[3:4])
    assert alone.front == ()
    assert alone.fastest is None


def test_the_text_at_both_widths():
    text = fit_text(RECORD, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(
        textwrap.dedent("""\
        stowax fit of step on v5p-8 (compile-only), 16.0 GiB per device
        Largest batch as written: 32 (33 does not fit).
        Largest batch under a plan: 96 (100 does not fit), 3 times as many.
        Most items a second: 160, with 16 as written.

           batch  way         predicted  compiled   step time  items/s  fits
        ▸     16  as written   1.00 GiB  8.00 GiB    100.0 ms      160  yes
              32  as written   1.00 GiB  15.9 GiB    250.0 ms      128  yes
        ▸     32  plan         1.00 GiB  12.0 GiB    200.0 ms      160  yes
              33  as written   17.0 GiB         –  (400.0 ms)        –  no (predicted)
        ▸     96  plan         1.00 GiB  15.8 GiB    800.0 ms      120  yes
             100  plan         1.00 GiB  17.0 GiB    700.0 ms    142.9  no
        """)
    )
    wide = fit_text(RECORD, width=160)
    assert "      160  ████████████  yes" in wide
    assert "      120  █████████     yes" in wide


def test_of_many_sizes_the_compiled_ones_are_shown():
    guessed = RECORD.trials[3]
    more = tuple(dataclasses.replace(guessed, batch=b) for b in range(200, 208))
    text = fit_text(dataclasses.replace(RECORD, trials=(*RECORD.trials, *more)))
    assert "\nand 9 sizes more, predicted only\n" in text
    assert "203" not in text


def test_what_is_not_finished_says_so():
    text = fit_text(RECORD, 80, so_far=True)
    assert "Largest batch under a plan so far: " in text
    assert "Interrupted after " in text
    assert "Found in" not in text


def test_nothing_that_fits_is_said():
    none = dataclasses.replace(
        RECORD,
        largest=0,
        largest_as_written=0,
        next=1,
        next_as_written=1,
        trials=(dataclasses.replace(RECORD.trials[3], batch=1),),
    )
    text = fit_text(none, width=80)
    assert "Largest batch as written: none (1 does not fit)." in text
    assert "Largest batch under a plan: none (1 does not fit)." in text
    assert "Most items" not in text
    page = fit_page(none)
    assert 'id="front"' not in page
    assert "none (1 does not fit)" in page


def test_the_page_has_a_picture_and_every_size():
    page = fit_page(RECORD)
    assert '<div id="front"></div><div id="rate"></div>' in page
    assert '"front": {"target_id"' in page
    assert page.count("<tr><td") == len(RECORD.trials)
    assert "Largest batch under a plan: 96 (100 does not fit)" in page


def test_json_marks_the_front():
    data = json.loads(RECORD.to_json())
    assert [t["front"] for t in data["trials"]] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    assert data["largest"] == 96
    assert data["trials"][0]["per_second"] == 160


# --- what is refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budget": "60%"},
            "budget: got '60%', a share of what the step takes, which grows with the "
            "batch. Write bytes, or text such as '16GiB'.",
        ),
        (
            {"multiple_of": 0},
            "multiple_of: got 0. Write a whole number above zero.",
        ),
        (
            {"batches": (8, 12), "multiple_of": 8},
            "batches: got 12. Write whole numbers above zero that are multiples of 8, "
            "such as (64, 128).",
        ),
        (
            {"batches": ()},
            "batches: got (). Write whole numbers above zero, such as (8, 16).",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_traced(options, message):
    with pytest.raises(ArgumentError) as error:
        stowax.fit(of_batch, **options)
    assert str(error.value) == message


def test_what_is_no_function_of_the_batch_is_refused():
    with pytest.raises(ArgumentError) as error:
        stowax.fit(3)
    assert str(error.value) == (
        "step_of_batch: got int. Give a function of the batch size that returns "
        "(step, args)."
    )
    with pytest.raises(ArgumentError) as error:
        stowax.fit(lambda batch: batch, target="h200", progress=False)
    assert str(error.value) == (
        "step_of_batch: got a function that returned int for a batch of 8. Return "
        "(step, args): the training step, and a tuple of its arguments for a batch of "
        "that size."
    )


# --- real steps ---------------------------------------------------------------------


@pytest.mark.slow
@needs_cuda
def test_the_largest_batches_are_compiled_and_fit():
    lines = []
    budget = 16 * MIB
    found = stowax.fit(
        of_batch,
        budget="16MiB",
        target="h200",
        multiple_of=128,
        progress=lines.append,
    )
    assert 0 < found.largest_as_written < found.largest
    assert found.largest % 128 == found.largest_as_written % 128 == 0
    plan = found.plans[found.largest]
    assert plan.fits
    assert plan.device_bytes <= budget == found.budget_bytes
    # Few are planned: what finds the two largest, and two below them.
    assert len(found.plans) <= 2 * _fit._MOST_COMPILES + 2
    assert found.plans.keys() < {t.batch for t in found.trials}
    written = {t.batch: t for t in found.trials if t.way == "as written"}
    most = written[found.largest_as_written]
    assert most.compiled
    assert most.device_bytes <= budget
    assert found.next > found.largest
    assert found.front
    assert any(line.startswith("batch 1024: predicted ") for line in lines)
    assert str(found).splitlines()[0] == fit_text(found).splitlines()[0]


@pytest.mark.slow
@needs_cuda
def test_sizes_that_cannot_fit_are_only_predicted():
    found = stowax.fit(
        of_batch, budget="16MiB", target="h200", batches=(2**16, 128), progress=False
    )
    assert list(found.plans) == [128]
    assert found.largest == 128
    assert found.next == 2**16
    assert {t.batch for t in found.trials if not t.compiled} == {2**16}


FILE = """
    import sys
    sys.path.insert(0, {tests!r})
    from too_large import activations

    def make(batch):
        return activations(batch, width=128, layers=4)

    def none():
        return make(8)

    def broken(batch):
        return [1][batch]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    tests = __file__.rpartition("/")[0]
    path.write_text(textwrap.dedent(FILE.format(tests=tests)))
    return path


@needs_cuda
def test_the_command_writes_plan_and_picture(file, tmp_path):
    page, saved = tmp_path / "front.html", tmp_path / "plan.json"
    common = ["--target", "h200", "--batch", "256", "--batch", "128"]
    result = CliRunner().invoke(
        main,
        ["fit", f"{file}:make", *common, "--html", str(page), "-o", str(saved)],
    )
    assert result.exit_code == 0, result.output
    assert "Largest batch as written: 256." in result.stdout
    assert stowax.load_plan(saved).fits
    assert '<div id="front"></div>' in page.read_text()
    short = CliRunner().invoke(
        main, ["fit", f"{file}:make", *common, "--budget", "1KiB", "--json"]
    )
    assert short.exit_code == 1
    assert json.loads(short.stdout)["largest"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none in {file} takes no argument. It has to take the batch size"),
        (["broken"], "broken in {file} failed for a batch of 8."),
        (["make", "--batch", "0"], "--batch: got 0. Write whole numbers above zero"),
        (["make", "--multiple-of", "0"], "--multiple-of: got 0. Write a whole number"),
    ],
)
def test_the_command_says_what_to_write(file, arguments, message):
    name, *options = arguments
    result = CliRunner().invoke(
        main, ["fit", f"{file}:{name}", *options, "--target", "h200"]
    )
    assert result.exit_code == 2
    assert f"error: {message.format(file=file)}" in result.stderr


def test_a_size_that_cannot_be_traced_says_what_sizes_may_be():
    def step_of(batch):
        def step(w, x):
            def loss(w):
                parts = x.reshape(4, -1, 16)  # microbatches
                return jnp.tanh(parts @ w).sum()

            return jax.grad(loss)(w)

        spec = jax.ShapeDtypeStruct
        return step, (spec((16, 16), jnp.float32), spec((batch, 16), jnp.float32))

    with pytest.raises(StepError) as caught:
        stowax.fit(step_of, budget="1MiB", batches=(6,), progress=False)
    said = str(caught.value)
    assert said.startswith(
        "step_of_batch: the step for a batch of 6 fails with TypeError: "
    )
    assert said.endswith("say so: multiple_of=4, or --multiple-of 4.")
