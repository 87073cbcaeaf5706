"""Two inspections side by side, as text and as a page; what a notebook shows."""

import dataclasses
import json
import pathlib
import re

import pytest
from click.testing import CliRunner

from page_records import NASTY, block, found
from report_records import INSPECTION, PLAN
from stowax._cli._cli import main
from stowax._inspect._inspect import Inspection
from stowax._plan._plan import Plan
from stowax.report import differences_page, differences_text
from stowax.report._differences import differences

MIB = 2**20


def faster():
    """The same step without its workspace at the peak, and half a second faster."""
    plain = found()
    memory = plain.memory_timeline
    device = dataclasses.replace(
        memory.device,
        peak_bytes=204 * MIB,
        blocks=(
            *(b for b in memory.device.blocks if b.name != "more"),
            block("in flight", 24, "offload in flight", 6, 6),
        ),
    )
    return dataclasses.replace(
        plain,
        hazards=INSPECTION.hazards,
        transfers=plain.transfers[:1],
        memory_timeline=dataclasses.replace(memory, device=device),
        timeline=dataclasses.replace(
            plain.timeline, step_seconds=5.5, exposed_seconds=0.0
        ),
    )


def test_every_figure_is_that_of_its_record():
    groups = dict(differences(found(), faster()))
    by_role = {
        r.title: (r.first, r.second) for r in groups["device memory at the peak"]
    }
    assert by_role == {
        "parameter": (100 * MIB, 100 * MIB),
        "kept activation": (80 * MIB, 80 * MIB),
        "offload in flight": (0, 24 * MIB),
        "workspace": (60 * MIB, 0),
    }
    times = {row.title: row.change for row in groups["time"]}
    assert times["step"] == "−500.0 ms (−8.3%)"
    assert times["waiting for the host"] == "−500.0 ms"
    assert times["computing"] == "same"
    copies = {row.title: row.change for row in groups["copies between device and host"]}
    back = (160 * 31 + 8) * MIB  # all of what came back is missing
    assert copies["host to device, a step"] == f"−{back / 2**30:.2f} GiB"
    assert copies["device to host, a step"] == "same"
    assert [(r.title, r.change) for r in groups["hazards"]] == [("host-compute", "+1")]
    (gone,) = [r for r in groups["largest places at the peak"] if not r.second]
    assert gone.title == "model.py:16  workspace  float32[60,1024,256]"


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_text_keeps_to_its_width(width):
    text = differences_text(found(), faster(), ("plain", "planned"), width)
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"^workspace +60.0 MiB +– +−60.0 MiB$", text, re.MULTILINE)
    assert "time" in text


def test_names_that_start_alike_are_told_apart():
    names = ("a-very-long-name-plain", "a-very-long-name-planned")
    head = differences_text(found(), faster(), names, 80).splitlines()[3]
    assert "name-plain" in head
    assert "…ame-planned" in head


def test_the_page_says_the_same_and_escapes_names():
    page = differences_page(found(NASTY), faster(), (NASTY, "planned"))
    assert NASTY not in page
    assert "−500.0 ms (−8.3%)" in page
    assert 'id="over-time"' in page
    (text,) = re.findall(r"^start\((.*)\);$", page, re.MULTILINE)
    assert set(json.loads(text)["drawings"]) == {"over-time", "by-role"}


def test_what_has_no_curve_is_compared_by_its_totals():
    page = differences_page(INSPECTION, INSPECTION)
    assert 'id="over-time"' not in page
    assert "60.0 GiB" in page
    assert "60.0 GiB" in differences_text(INSPECTION, INSPECTION, width=80)


def run(*words):
    return CliRunner().invoke(main, ["inspect", *words])


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("plain.json").write_text(found().to_json())
    pathlib.Path("planned.json").write_text(faster().to_json())


@pytest.mark.usefixtures("saved")
def test_the_command_compares_what_was_saved():
    result = run("--compare", "plain.json", "planned.json", "--html", "both.html")
    assert (result.exit_code, result.stderr) == (0, "saved both.html\n")
    assert "plain" in result.stdout
    assert "−500.0 ms (−8.3%)" in result.stdout
    assert "−500.0 ms (−8.3%)" in pathlib.Path("both.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "plain.json", "none.json"], "path: got 'none.json', which"),
        (
            ["--compare", "plain.json", "planned.json", "--json"],
            "--json: got it beside",
        ),
        (
            ["step.py:make", "--compare", "plain.json", "planned.json"],
            "FILE.py:FUNCTION: got it beside --compare",
        ),
        ([], "FILE.py:FUNCTION: got none. Name the step, or write --compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {message}")


def test_a_notebook_shows_a_few_kilobytes_without_scripts():
    inspection = Inspection.from_json(
        dataclasses.replace(found(NASTY), hazards=INSPECTION.hazards).to_json()
    )
    shown = inspection._repr_html_()
    assert len(shown) < 20_000
    assert NASTY not in shown
    assert "240.0 MiB at the peak" in shown
    assert "host-compute" in shown
    fields = {f.name: getattr(PLAN, f.name) for f in dataclasses.fields(PLAN)}
    text = Plan(**fields)._repr_html_()
    assert text.startswith("<pre")
    assert "FITS: 60.0 GiB of 64.0 GiB per device" in text
