"""The page of results, its charts and its tables are made from the records beside it.

And the records have one form, however a benchmark comes by them.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import __main__ as runner
from benchmarks import _charts, _page
from benchmarks._record import ENVELOPE, RESULTS, STATUSES, Records
from benchmarks._registry import BENCHMARKS


@pytest.fixture(scope="module")
def found():
    return _page.found()


def module_of(name):
    return importlib.import_module(f"benchmarks.{BENCHMARKS[name].module}")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_there(name, capsys):
    assert BENCHMARKS[name].status in STATUSES
    module = module_of(name)
    module.options(argparse.ArgumentParser())
    assert callable(module.run)
    with pytest.raises(SystemExit) as ended:
        runner.main([name, "--help"])
    assert ended.value.code == 0
    # Its docstring shows the command as it is called.
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


def test_the_runner_lists_them_and_knows_no_others(capsys):
    assert runner.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in BENCHMARKS)
    assert runner.main(["no such"]) == 2
    assert "not one of page, comparison" in capsys.readouterr().err


def test_a_module_that_is_called_by_itself_says_how_it_is_called():
    called = [sys.executable, "-m", "benchmarks.budgets_table"]
    root = RESULTS.parents[1]
    done = subprocess.run(called, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert "`python -m benchmarks NAME` runs one" in done.stderr


def test_every_record_has_the_same_envelope():
    files = sorted(RESULTS.glob("*.jsonl"))
    assert {path.stem for path in files} <= {*BENCHMARKS}
    for path in files:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        cells = [line["cell"] for line in lines]
        assert len(set(cells)) == len(cells), path.name
        for line in lines:
            assert [*line] == [*ENVELOPE, "figures"], (path.name, line["cell"])
            assert line["benchmark"] == path.stem
            assert line["status"] in STATUSES
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
            assert line["command"].startswith(f"python -m benchmarks {path.stem}")
            assert {"python", "jax", "stowax"} <= {*line["versions"]}


def test_the_page_is_what_the_command_makes(found):
    hint = "python -m benchmarks page"
    assert (RESULTS / "README.md").read_text() == _page.text(found), hint
    for name, chart in _charts.CHARTS.items():
        drawn = _charts.path_of(name, RESULTS).read_text()
        assert _charts.digest(chart.data(found)) in drawn, f"{hint}: {name}"


def test_every_table_is_what_its_command_makes(found):
    for name, records in found.items():
        module = module_of(name)
        if hasattr(module, "page") and records.lines:
            table = (RESULTS / f"{name}.md").read_text()
            hint = f"python -m benchmarks {name} --table"
            assert table == module.page(records), hint


def test_nothing_lies_beside_the_page_that_it_does_not_name():
    page = (RESULTS / "README.md").read_text()
    named = {*re.findall(r"\(([\w-]+\.(?:md|svg))\)", page)} | {"README.md"}
    there = {path.name for path in RESULTS.iterdir()}
    assert named <= there
    kept = {f"{name}.jsonl" for name in BENCHMARKS}
    rest = there - named - kept
    assert all(name.endswith("_programs.jsonl.gz") for name in rest), rest


def test_cells_that_are_there_are_not_made_again(tmp_path):
    path = tmp_path / "some.jsonl"

    def fails():
        raise ValueError("told")

    records = Records("some", "compiled", path)
    assert records.made("a", lambda: {"bytes": 1}, {"what": "x"}) == {
        "what": "x",
        "bytes": 1,
    }
    assert records.made("b", fails, {"what": "y"})["error"] == "ValueError: told"
    records = Records("some", "compiled", path)
    assert records.made("a", fails)["bytes"] == 1
    # An error is tried again, and then a later line of the same cell counts.
    assert records.made("b", lambda: {"bytes": 2}) == {"bytes": 2}
    assert len(path.read_text().splitlines()) == 3
    records.settle()
    assert [json.loads(n)["cell"] for n in path.read_text().splitlines()] == ["a", "b"]
    # All of it again, but each cell once.
    records = Records("some", "compiled", path, fresh=True)
    assert records.made("a", lambda: {"bytes": 3})["bytes"] == 3
    assert records.made("a", fails)["bytes"] == 3
    assert records.cells == {"a": {"bytes": 3}, "b": {"bytes": 2}}
