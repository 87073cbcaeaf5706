"""The reliability campaign in small: its parts run, and find what is planted."""

import argparse
import json
import pathlib
import random
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import reliability, reliability_mutations
from benchmarks._record import Records
from benchmarks.reliability_commands import left_behind
from benchmarks.reliability_damage import damaged
from benchmarks.reliability_readers import KINDS, Kind, WrongNumbersError
from stowax import StowaxError

pytestmark = pytest.mark.usefixtures("usual_promotion")


def no_word(line):
    raise AssertionError(line)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_missed_or_right(name):
    found = reliability_mutations.mutations(name, 25, 7, no_word)
    assert (found["right"], found["said"]) == (25, [])


def test_what_goes_wrong_with_a_file_is_counted(monkeypatch):
    def read(path, draw):
        text = path.read_bytes()
        if len(text) % 5 == 0:
            raise KeyError("memory")
        if len(text) % 5 == 1:
            raise WrongNumbersError("other numbers")
        if len(text) % 5 == 2:
            raise StowaxError("told")
        return "used"

    whole = json.dumps({"a": [*range(50)], "b": {"c": "text"}}).encode()
    monkeypatch.setitem(KINDS, "planted", lambda: Kind("x.json", whole, read))
    said = []
    found = reliability_mutations.mutations("planted", 200, 0, said.append)
    assert min(found[k] for k in ("raw", "lost", "refused", "used")) > 10
    assert found["right"] == found["refused"] + found["used"]
    assert reliability.faults_of(found) == found["raw"] + found["lost"] == len(said)
    assert any("KeyError at test_reliability.py" in line for line in found["said"])


def test_damage_comes_from_its_seed_and_changes_files():
    whole = json.dumps({"a": [1, 2.5, None], "b": {"c": "text", "d": True}}).encode()
    made = [damaged(whole, random.Random(k)) for k in range(300)]
    assert made == [damaged(whole, random.Random(k)) for k in range(300)]
    assert len({*made}) > 150


def test_files_that_are_no_whole_ones_are_seen(tmp_path):
    (tmp_path / "cache").mkdir()
    for name, text in {
        "out.json": '{"program":',
        "out.html": "<html><body>",
        ".out.json.0123abcd": "{}",
        "cache/0123.gz": "half",
        "plan.json": "{}",
    }.items():
        (tmp_path / name).write_text(text)
    assert left_behind(tmp_path) == [
        ".out.json.0123abcd is a draft",
        "cache/0123.gz is no whole program",
        "out.html is half a page",
        "out.json is half a file",
    ]


def records_of(path, *words):
    parser = argparse.ArgumentParser()
    reliability.options(parser)
    records = Records("reliability", "measured", path)
    code = reliability.run(parser.parse_args(words), records)
    return code, records


def test_its_cells_and_its_table(tmp_path, monkeypatch):
    fake = {"tries": 3, "right": 2, "lost": 0, "raw": 1, "said": ["told"]}
    monkeypatch.setattr(reliability, "full_disk", lambda *_: {**fake, "how": "tmpfs"})
    monkeypatch.setattr(reliability, "read_only", lambda *_: 1 / 0)
    monkeypatch.setattr(reliability, "two_at_once", lambda *_: {**fake, "raw": 0})
    code, records = records_of(tmp_path / "r.jsonl", "--part", "disks", "--disks", "3")
    assert code == 1
    page = reliability.page(records)
    assert page.split("\n")[2].startswith("2 of the tries below lost anything")
    assert "| disks | full disk | 3 | 24 | 0 | 1 | 0 | tmpfs |" in page
    assert "ZeroDivisionError" in page


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kills", "signals"])
def test_a_small_campaign_loses_nothing(part, tmp_path, monkeypatch):
    monkeypatch.setattr(reliability, "COMMANDS", ("plan",))
    path = tmp_path / "r.jsonl"
    counts = {"kills": "1", "signals": "2"}
    code, records = records_of(path, "--part", part, f"--{part}", counts[part])
    assert (code, [row.get("said") for row in records.cells.values()]) == (
        0,
        [[]] * len(records.cells),
    )
