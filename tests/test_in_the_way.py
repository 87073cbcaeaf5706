"""Steps that do not fit: what is in the way, in inspections, on the page, in plans."""

import dataclasses
import importlib.util
import textwrap

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import stowax
from plan_parts import changed
from report_records import INFEASIBLE, INSPECTION
from stowax._cli._cli import main
from stowax._errors import OutOfMemoryCompileError
from stowax._inspect import _inspect
from stowax._plan._effect import why_it_does_not_fit
from stowax._records._inspection import Memory, MemoryUse
from stowax._records._peak import MemoryPeak, PeakArray, Treatment
from stowax._target._compiled import LoweredProgram
from stowax._units import format_bytes
from stowax._way import _inspect as _way_inspect
from stowax._way import _ways
from stowax.report import inspection_page, inspection_text, plan_text
from too_large import activations, logits, spec

GIB = 2**30
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)
WORDS = "RESOURCE_EXHAUSTED: Ran out of memory on HBM."


def array(role, gibibytes, shape, source="", name="", count=1, padding=0):
    return PeakArray(
        role=role,
        name=name,
        shape=shape,
        source=source,
        count=count,
        bytes=int(gibibytes * GIB),
        padding=padding,
    )


PEAK = MemoryPeak(
    predicted_bytes=int(21.5 * GIB),
    phase="backward",
    source="/home/me/model.py:19",
    arrays=(
        array(
            "logits",
            16,
            "float32[32,1024,65536]",
            "/home/me/model.py:19",
            "jit(step)/jvp()/dot_general",
            count=2,
        ),
        array("fragmentation", 3, "", "/home/me/model.py:7", "what libtpu adds"),
        array("parameter", 2, "float32[65536,8192]", name="params['embed']"),
        array("batch", 0.5, "int32[8,2]", name="tokens", padding=GIB // 4),
        array("workspace", 2**-20, "float32[256]", name="jit(step)/add"),
    ),
    treatments=(
        Treatment(
            what="recompute every layer", needs_bytes=19 * GIB, frees_bytes=2 * GIB
        ),
    ),
    smallest_budget=18 * GIB,
    smallest_budget_is="predicted",
)
REFUSED = dataclasses.replace(
    INSPECTION,
    program="jit_step",
    target="v5e-4",
    memory=Memory(
        device=MemoryUse(argument=2 * GIB, output=0, alias=0, temp=int(19.5 * GIB)),
        host=MemoryUse(argument=0, output=0, alias=0, temp=0),
    ),
    hazards=(),
    transfers=(),
    capacity_bytes=16 * GIB,
    refusal=WORDS,
    peak=PEAK,
)


def test_a_refusal_shows_the_arrays_and_not_the_compilers_line():
    text = inspection_text(REFUSED, width=80)
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    assert lines[0] == "jit_step on v5e-4: nothing compiled"
    assert " ".join(lines[1:3]) == (
        "DOES NOT FIT: it needs 21.5 GiB (predicted; the compiler refused the "
        "program), and a device has 16.0 GiB."
    )
    shown = textwrap.dedent("""\
        In the way: 21.5 GiB predicted at the peak, in the backward pass, at model.py:19

            bytes    padding  role           what
         16.0 GiB          –  logits         2 × float32[32,1024,65536]  model.py:19  d…
         2.00 GiB          –  parameter      float32[65536,8192]  params['embed']
        512.0 MiB  256.0 MiB  batch          int32[8,2]  tokens
         3.00 GiB          –  fragmentation  model.py:7  what libtpu adds
        and 1 smaller, 1.00 KiB

        predicted, if you        leaves     frees
        recompute every layer  19.0 GiB  2.00 GiB
        """)
    assert shown in text
    # What nobody could look for is not said to be in order.
    assert "hazards" not in text.replace("time, copies and hazards", "")
    assert "No copies" not in text
    assert lines.index(f"compiler  {WORDS}") > lines.index(shown.splitlines()[0])
    wide = inspection_text(REFUSED, width=160)
    assert "2 × float32[32,1024,65536]  model.py:19  dot_general" in wide
    assert (
        "about 18.0 GiB, predicted: the smallest budget that a plan reaches, and more "
        "than a device has"
    ) in wide
    assert "16.0 GiB of logits are made outside of repeated layers" in wide


def test_what_fits_says_so_with_the_capacity():
    use = dataclasses.replace(INSPECTION.memory.device, argument=GIB, temp=GIB)
    use = dataclasses.replace(use, output=0, alias=0)
    memory = dataclasses.replace(INSPECTION.memory, device=use)
    found = dataclasses.replace(INSPECTION, memory=memory, capacity_bytes=16 * GIB)
    assert found.fits
    line = "FITS: 2.00 GiB of the 16.0 GiB that a device has (12%)."
    assert line in inspection_text(found, width=80).splitlines()
    short = dataclasses.replace(found, capacity_bytes=GIB)
    assert not short.fits
    line = "DOES NOT FIT: it needs 2.00 GiB, and a device has 1.00 GiB."
    assert line in inspection_text(short, width=80).splitlines()
    unknown = dataclasses.replace(found, capacity_bytes=0)
    assert unknown.fits is None
    assert "FIT" not in inspection_text(unknown, width=80)


def test_no_budget_is_called_the_smallest_that_the_step_itself_stays_below(monkeypatch):
    compiled = dataclasses.replace(INSPECTION, peak=PEAK)
    taken = compiled.memory.device.total
    for step, expected in (
        (compiled, (taken, "compiled")),
        (dataclasses.replace(compiled, refusal=WORDS), (taken + 1, "predicted")),
    ):
        monkeypatch.setattr(_inspect, "inspect", lambda *_, step=step, **__: step)
        above = dataclasses.replace(PEAK, smallest_budget=taken + 1)
        monkeypatch.setattr(_way_inspect, "with_ways", lambda *_, above=above: above)
        found = stowax.inspect(lambda x: x, 1.0).peak
        assert (found.smallest_budget, found.smallest_budget_is) == expected


def test_why_no_plan_can_be_made_is_said():
    peak = dataclasses.replace(
        PEAK,
        treatments=(),
        smallest_budget=0,
        smallest_budget_is="",
        unknown="step: it differentiates nothing.",
    )
    text = inspection_text(dataclasses.replace(REFUSED, peak=peak), width=120)
    assert "a plan   none can be made: step: it differentiates nothing." in text
    assert "smallest budget" not in text


def test_the_page_has_the_arrays_and_no_empty_promises():
    page = inspection_page(REFUSED)
    (section,) = [p for p in page.split("<section>") if "<h2>In the way</h2>" in p]
    for text in ("params[&#x27;embed&#x27;]", "16.0 GiB", "model.py:19", WORDS):
        assert text in section
    assert "Does NOT fit: it needs " in page
    assert "No hazards found" not in page
    assert "No copies between" not in page
    assert "<h2>The step</h2>" not in page


def test_a_refused_inspection_is_saved_and_read_back():
    assert type(REFUSED).from_json(REFUSED.to_json()) == REFUSED


@pytest.fixture
def refusing(monkeypatch):
    """A compiler that has no memory for anything."""

    def refuse(program, options=None, *, with_layout=False):
        raise OutOfMemoryCompileError(
            f"The program does not fit on {program.target_name}: {WORDS}\nmore", 1, 1
        )

    monkeypatch.setattr(LoweredProgram, "compile", refuse)


@pytest.mark.slow
def test_a_refused_step_is_inspected_without_its_program(refusing):
    rows, vocabulary = 2**12, 2**16
    jitted, args = logits(rows, vocabulary=vocabulary)
    found = stowax.inspect(jitted, *args, target="h200")
    assert found.fits is False
    assert found.refusal == WORDS
    assert found.program == "jit_step"
    each = rows * vocabulary * 4
    roles = found.peak.by_role()
    assert roles["logits"] == max(roles.values())
    assert roles["logits"] % each == 0
    assert found.memory.device.total == found.peak.predicted_bytes
    (said,) = found.omissions
    assert said.what == "time, copies and hazards"
    # Layers that are recomputed free most of what they keep.
    ways = {way.what: way for way in found.peak.treatments}
    assert ways["recompute every layer"].frees_bytes > 0
    assert all(
        way.needs_bytes + way.frees_bytes == found.peak.predicted_bytes
        for way in ways.values()
    )
    assert found.peak.smallest_budget_is == "predicted"
    assert each < found.peak.smallest_budget < found.peak.predicted_bytes


def test_a_step_without_layers_is_told_what_is_in_the_way(refusing):
    jitted = jax.jit(lambda x: jnp.sum((x @ x) @ x))
    found = stowax.inspect(jitted, spec(512, 512), target="h200")
    assert found.peak.treatments == ()
    assert found.peak.unknown.startswith("step: ")
    inner = _inspect.inspect(jitted, spec(512, 512), target="h200")
    assert inner.peak == dataclasses.replace(found.peak, unknown="")


def test_what_goes_wrong_with_the_ways_is_no_reason_to_say_nothing(monkeypatch):
    def broken(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(_ways, "opened", broken)
    jitted, args = activations(64)
    peak = _ways.with_ways(PEAK, jitted, args, "h200")
    assert peak == dataclasses.replace(PEAK, unknown="ZeroDivisionError")


STEP = """
    import sys
    sys.path.insert(0, {tests!r})
    from too_large import logits

    def make():
        return logits({rows})
"""


@needs_libtpu
def test_the_command_shows_what_libtpu_refuses(tmp_path):
    file, page = tmp_path / "train.py", tmp_path / "report.html"
    tests = __file__.rpartition("/")[0]
    file.write_text(textwrap.dedent(STEP.format(tests=tests, rows=2**16)))
    arguments = ["inspect", f"{file}:make", "--target", "v5e-4"]
    result = CliRunner().invoke(main, [*arguments, "--html", str(page)])
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "jit_step on v5e-4: nothing compiled"
    assert lines[1].startswith("DOES NOT FIT: it needs ")
    assert any("float32[65536,65536]  too_large.py:" in line for line in lines)
    assert any("the smallest budget that a plan reaches" in line for line in lines)
    assert "<h2>In the way</h2>" in page.read_text()


def test_why_state_stays_is_not_called_what_is_in_the_way():
    """The arrays that are stand in their table; state may be little of them."""
    why = "parameter: 1.74 MiB, of which some stays: no layer reads it"
    made = changed(INFEASIBLE, in_the_way=("logits: 16.0 GiB", why), peak=PEAK)
    text = plan_text(made, 80)
    assert "In the way: 21.5 GiB predicted at the peak" in text
    assert f"\nstate       {why}\n" in text
    assert "in the way  " not in text


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_what_is_in_the_way():
    """It was the arguments and one layer's values; most of the memory was neither."""
    rows, vocabulary = 4096, 65536
    jitted, args = logits(rows, vocabulary=vocabulary)
    wishes = {"target": "h200", "budget": "1GiB", "progress": False}
    assert stowax.plan(jitted, *args, **wishes).fits  # the loss in blocks of tokens
    made = stowax.plan(jitted, *args, **wishes, forbid=("tile",))
    assert not made.fits
    largest, *_ = made.proof.in_the_way
    each = rows * vocabulary * 4
    assert largest.startswith("logits: ")
    assert f"float32[{rows},{vocabulary}] at too_large.py:" in largest
    peak = made.proof.peak
    first = peak.arrays[0]
    assert peak.by_role()["logits"] >= each
    assert peak.named_bytes >= 0.95 * peak.predicted_bytes
    assert peak.bytes == pytest.approx(made.device_bytes, rel=0.1)
    assert f"\nIn the way:\n  {largest}\n" in why_it_does_not_fit(made)
    text = plan_text(made, width=120)
    assert f"\nIn the way: {format_bytes(peak.bytes)} predicted at the peak" in text
    assert "The compiled program needs" not in text
    larger = dataclasses.replace(made.proof, device_bytes=2 * peak.bytes)
    words = " ".join(plan_text(dataclasses.replace(made, proof=larger), 80).split())
    assert (
        f". The compiled program needs {format_bytes(2 * peak.bytes)}: what the "
        "compiler makes beyond the prediction is not below" in words
    )
    assert f"{first.shape}  too_large.py:" in text
    assert len(text.splitlines()) <= 48
