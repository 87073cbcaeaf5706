"""The page without a browser: data, tables, what is escaped, and saved inspections."""

import base64
import dataclasses
import gzip
import html
import json
import pathlib
import re
import sys

import pytest
from click.testing import CliRunner

from page_records import NASTY, found, large
from report_records import INSPECTION, PLAN
from stowax._cli._cli import main
from stowax._errors import ArgumentError, MissingExtraError
from stowax._inspect._inspect import Inspection, load_inspection
from stowax._records._audit import AuditRecord, Finding
from stowax._records._memory import MEMORY_ROLES
from stowax.report import inspection_page
from stowax.report._looks import STYLES
from stowax.report._page_data import RESERVED, bands_of, filled, page_data

MIB = 2**20


def call_of(page):
    """What the page's script is started with."""
    (text,) = re.findall(r"^start\((.*)\);$", page, re.MULTILINE)
    return json.loads(text)


def data_of(page):
    return json.loads(gzip.decompress(base64.b64decode(call_of(page)["packed"])))


def rows_of(page, name):
    """The texts of a table's cells, row by row."""
    (body,) = re.findall(rf'<table id="{name}".*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_bands_are_the_bytes_by_role_and_what_is_reserved_is_apart():
    curve = found().memory_timeline.device
    assert bands_of(curve) == ["parameter", "kept activation", RESERVED, "workspace"]
    amounts = filled(curve, found().memory_timeline.loops)
    for moment, by_band in zip(curve.moments, amounts, strict=True):
        assert sum(by_band.values()) == moment.total
        assert by_band[RESERVED] == moment.empty
        # All that is empty here is in the stack.
        kept = moment.bytes[MEMORY_ROLES.index("kept activation")]
        assert by_band["kept activation"] == kept - moment.empty
    data = page_data(found())["curves"]["device"]
    assert [sum(column) for column in zip(*data["values"], strict=True)] == [
        moment.total for moment in curve.moments
    ]
    assert data["peak"] == curve.peak_bytes == max(m.total for m in curve.moments)


def test_every_band_looks_different_and_neighbours_differ_in_both():
    assert set(STYLES) == {*MEMORY_ROLES, RESERVED}
    assert len(set(STYLES.values())) == len(STYLES)


def test_the_page_has_every_copy_hazard_and_decision():
    inspection = dataclasses.replace(found(), hazards=INSPECTION.hazards)
    page = inspection_page(inspection, PLAN)
    ranges = call_of(page)["ranges"]
    assert ranges["near"][1] < 64 * 1.5 < 142 < ranges["all"][1]  # GiB
    assert len(rows_of(page, "transfers")) == len(inspection.transfers) == 3
    (hazard,) = rows_of(page, "hazards")
    assert hazard[0] == "host-compute"
    assert hazard[-1].startswith("Bring the operands to the device")
    # What moves first, what is alike in one row.
    rows = [(row[0], row[1], row[4]) for row in rows_of(page, "decisions")]
    assert rows == [
        ("attention output", "offload", "1"),
        ("dot_general model.py:52 in layer", "recompute", "2"),
        ("log-sum-exp", "keep", "1"),
    ]
    points = {(row[0], row[1]) for row in rows_of(page, "points")}
    assert ("this plan", "this plan, compiled") in points
    assert ("keep all", "hand-written policies, predicted") in points
    assert ("plan 1", "other trials, compiled") in points
    assert "Fits the budget: 60.0 of 64.0 GiB (94%)" in page


def test_the_peak_is_one_of_the_moments_to_the_digit():
    inspection = found()
    memory = inspection.memory_timeline
    moments = tuple(
        dataclasses.replace(m, seconds=m.seconds / 3) for m in memory.device.moments
    )
    at = memory.device.peak_seconds / 3
    device = dataclasses.replace(memory.device, moments=moments, peak_seconds=at)
    memory = dataclasses.replace(memory, device=device)
    data = page_data(dataclasses.replace(inspection, memory_timeline=memory))
    curve = data["curves"]["device"]
    assert curve["peakSeconds"] in curve["seconds"]


def test_figures_sort_by_what_they_are():
    page = inspection_page(found())
    keys = re.findall(r'<td class="number" data-sort="([^"]*)">', page)
    assert keys
    assert all(float(key) >= 0 for key in keys)


def test_names_from_the_program_are_text():
    page = inspection_page(found(NASTY), PLAN)
    assert NASTY not in page
    assert "<img" not in page
    data = data_of(page)
    assert NASTY in data["names"]  # whole, where only the script reads it
    assert f'title="jit(step)/layers/{html.escape(NASTY)}"' in page
    # The scripts are those that we wrote, and end where we end them.
    assert page.count("<script>") == page.count("</script>") == 6


def test_the_page_asks_nobody_for_anything():
    page = inspection_page(found())
    head = page.partition("<style>")[0]
    assert "default-src 'none'" in head
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"http", page)


@pytest.mark.slow
def test_a_hundred_thousand_places_are_a_page_of_under_five_megabytes():
    inspection = large(100_000)
    page = inspection_page(inspection)
    assert len(page.encode()) < 5e6
    data = data_of(page)["curves"]["device"]
    assert len(data["blocks"]["bytes"]) == 100_000
    assert len(rows_of(page, "peak-device")) == 100


def test_an_inspection_without_a_drawing_is_still_a_page():
    page = inspection_page(INSPECTION)
    assert call_of(page)["step"] is None
    assert "It needs 60.0 GiB; what a device has is not known" in page
    assert rows_of(page, "totals")[0] == [
        *("device", "30.0 GiB", "29.0 GiB", "29.0 GiB", "30.0 GiB", "60.0 GiB")
    ]
    assert len(rows_of(page, "transfers")) == 3
    assert 'id="drawing"' not in page


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    inspection = Inspection.from_json(found().to_json())
    path = tmp_path / "report.html"
    inspection.to_html(path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ArgumentError, match=r"path: got .*nowhere.*is no folder"):
        inspection.to_html(tmp_path / "nowhere" / "report.html")


def test_the_command_draws_what_was_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("found.json").write_text(found().to_json())
    PLAN.save("plan.json")
    words = ["inspect", "found.json", "plan.json", "--html", "report.html"]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stderr) == (0, "saved report.html\n")
    assert result.stdout.startswith("jit_train_step on v5p-8")
    page = pathlib.Path("report.html").read_text(encoding="utf-8")
    assert "Fits the budget: 60.0 of 64.0 GiB" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # The step is not even looked for.
        (["no.py:step", "--html", "no/report.html"], "--html: got 'no/report.html'"),
        (["found.json", "--target", "h200"], "--target: got it beside found.json"),
        (["none.json"], "path: got 'none.json', which cannot be read"),
    ],
)
def test_what_cannot_be_written_is_said_first(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["inspect", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_error_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'stowax\[report\]'"):
        inspection_page(found())


def test_an_inspection_comes_back_from_json_as_it_was(tmp_path):
    inspection = found(NASTY)
    path = tmp_path / "found.json"
    path.write_text(inspection.to_json())
    back = load_inspection(path)
    assert dataclasses.asdict(back) == dataclasses.asdict(inspection)
    assert page_data(back) == page_data(inspection)


def changed(**fields):
    return json.dumps(json.loads(found().to_json()) | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "which is no whole JSON"),
        ("[]", "which is no inspection. Give what Inspection.to_json"),
        ('{"format": 3}', "which is no inspection"),
        (changed(version=99), "version 99. This stowax reads version 1: inspect again"),
        (changed(flops="many"), r"no whole inspection \(flops is 'many'\)"),
        (changed(weather="fine"), r"\(weather is not known\)"),
        (changed(transfers=[{}]), r"\(transfers.0.direction is missing\)"),
        (changed(memory=None), r"\(memory is no record\)"),
    ],
)
def test_what_is_no_inspection_is_refused(tmp_path, text, message):
    path = tmp_path / "found.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message) as raised:
        load_inspection(path)
    assert str(raised.value).startswith(f"path: got '{path}'")


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ArgumentError, match=r"cannot be read \(No such file"):
        load_inspection(tmp_path / "none.json")


def test_what_an_audit_found_stands_on_the_page(tmp_path):
    finding = Finding(
        kind="host-read",
        file=f"/home/{NASTY}/train.py",
        line=7,
        count=1,
        bytes=4,
        seconds=0.002,
        what=NASTY,
        remedy="Read it one step late.",
    )
    record = AuditRecord(findings=(finding,), steps=20, step_file="train.py")
    page = inspection_page(INSPECTION, None, record)
    assert rows_of(page, "audit")[0][0] == "host-read"
    assert rows_of(page, "audit")[0][2:6] == ["train.py:7", "1", "4 B", "2.0 ms"]
    assert NASTY not in page
    assert "The loop around the step" not in inspection_page(INSPECTION)
    (tmp_path / "found.json").write_text(INSPECTION.to_json())
    (tmp_path / "audit.json").write_text(json.dumps(record.to_json()))
    saved = [str(tmp_path / name) for name in ("found.json", "audit.json", "out.html")]
    words = ["inspect", saved[0], "--audit", saved[1]]
    CliRunner().invoke(main, [*words, "--html", saved[2]])
    assert "The loop around the step" in pathlib.Path(saved[2]).read_text()
    refused = CliRunner().invoke(main, words)
    assert "--audit: got" in refused.stderr
