"""`benchmarks.gpu` in tiny sizes: every part yields its rows, and no cell is lost.

What it finds on a GPU only a GPU can say. What can go wrong without one is a cell that
no longer runs, an error that nobody sees, and a table that flatters.
"""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import __main__ as runner
from benchmarks import gpu, gpu_table, gpu_tutorial
from benchmarks._record import Records
from benchmarks.gpu_cells import Cell

GIB = 2**30


def called(tmp_path, *more):
    path = tmp_path / "gpu.jsonl"
    given = ["--output", str(path), "--folder", str(tmp_path / "work"), *more]
    return path, runner.run("gpu", given)


def kept(path):
    """The figures of every cell but the device's own."""
    cells = Records("gpu", "measured", path).cells
    return {key: row for key, row in cells.items() if key != gpu.DEVICE}


@pytest.fixture
def quickly_compiled():
    """Nothing is timed here, and LLVM at its best takes most of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_every_part_runs_and_stands_in_the_table(tmp_path):
    path, code = called(tmp_path, "--tiny")
    cells = kept(path)
    assert {key: row["error"] for key, row in cells.items() if "error" in row} == {}
    assert code == 0
    assert {key.partition(": ")[0] for key in cells} == set(gpu.PARTS)
    # Each pattern by hand and under a plan, all of them compared.
    lines = [line for key in cells for line in cells[key].get("lines", [])]
    assert len(lines) == 2 * 3
    assert all(line["error"] is None and not line["wrong"] for line in lines)
    for example in gpu_tutorial.EXAMPLES:
        plain, *others = (
            cells[f"tutorial: {example}, {way}"]["losses"] for way in gpu_tutorial.WAYS
        )
        assert plain[-1] < plain[0]
        assert others == [pytest.approx(plain, rel=1e-2)] * len(others)
    assert all(row["passed"] for key, row in cells.items() if key.startswith("gate"))
    ran = {key: row for key, row in cells.items() if "seconds" in row}
    parts = {key.partition(": ")[0] for key in ran}
    assert parts == {"tutorial", "measured", "llama"}
    assert all(row["measured_seconds"] > 0 for row in ran.values())
    text = path.with_suffix(".md").read_text()
    assert text.count("\n## ") == 6
    assert "no figure here means anything" in text
    assert "What failed" not in text
    # All of it is there: nothing is done again.
    before = path.read_bytes()
    assert called(tmp_path, "--tiny") == (path, 0)
    assert path.read_bytes() == before


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path, code = called(tmp_path)
    assert code == 2
    assert not path.exists()
    assert (
        "needs an attached NVIDIA GPU, and JAX has cpu here" in capsys.readouterr().err
    )


def test_tiny_figures_are_kept_out_of_the_results():
    with pytest.raises(SystemExit):
        runner.run("gpu", ["--tiny"])


@pytest.mark.slow
def test_a_process_that_ends_is_a_row_with_its_last_words(tmp_path):
    cell = Cell(part="no", name="such cell", work=lambda context, row: None)
    row = gpu.isolated(cell, tmp_path, tmp_path / "gpu.jsonl", True, 100)
    assert row["error"].startswith("ChildProcessError: the process ended with 1: ")
    assert "KeyError: 'no: such cell'" in row["error"]
    assert not row["stopped"]
    row = gpu.isolated(cell, tmp_path, tmp_path / "gpu.jsonl", True, 0.01)
    assert row["error"] == "TimeoutError: stopped after 0 s"
    assert row["stopped"]


def test_chunks_and_errors(tmp_path, monkeypatch):
    def fine(context, row):
        row["seen"] = sorted(context.found)

    def fails(context, row):
        row["found"] = 7
        raise ValueError("told")

    first = Cell(part="llama", name="a", work=fails)
    second = Cell(part="gate", name="b", work=fine)
    monkeypatch.setattr(gpu, "all_cells", lambda tiny: [first, second])

    def rows(*more):
        path, code = called(tmp_path, "--tiny", *more)
        return code, kept(path)

    # Of every chunk the first cell is run, however long it takes.
    code, cells = rows("--minutes", "0")
    assert (code, list(cells)) == (3, ["llama: a"])
    # What was found before the error stays beside it, and in the table.
    assert (cells["llama: a"]["found"], cells["llama: a"]["error"]) == (
        7,
        "ValueError: told",
    )
    text = (tmp_path / "gpu.md").read_text()
    assert "| llama: a | ValueError: told |" in text
    code, cells = rows("--minutes", "0")
    assert (code, cells["gate: b"]["seen"]) == (0, [gpu.DEVICE, "llama: a"])
    # An error is tried again when that is asked for.
    assert rows()[1]["llama: a"]["error"] == "ValueError: told"
    monkeypatch.setattr(
        gpu, "all_cells", lambda tiny: [Cell(part="llama", name="a", work=fine)]
    )
    assert "error" in rows()[1]["llama: a"]
    assert "error" not in rows("--retry")[1]["llama: a"]


def test_cells_of_two_devices_are_not_mixed(tmp_path):
    records = Records("gpu", "measured", tmp_path / "gpu.jsonl")
    records.add(gpu.DEVICE, {"device": "NVIDIA H200"})
    with pytest.raises(SystemExit, match="has cells of NVIDIA H200, and this is cpu"):
        called(tmp_path, "--tiny")


def test_losses_are_apart_by_the_worst_step():
    assert gpu_table.apart([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert gpu_table.apart([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert gpu_table.apart([], [1.0]) is None


def ran(seconds, gib, **more):
    return {
        "seconds": seconds,
        "device_bytes": gib * GIB,
        "host_bytes": 0,
        "simulated_seconds": seconds,
        "measured_seconds": seconds,
        "simulated_exposed_seconds": 0.0,
        "measured_exposed_seconds": 0.0,
        "losses": [2.0, 1.0],
        **more,
    }


def test_the_table_compares_with_the_best_that_fits_and_counts_what_is_known(tmp_path):
    plan = "llama: stowax, budget {} of 6"
    cells = {
        "llama: as it is written": ran(1.0, 20),
        "llama: minimal": ran(2.0, 10),
        "llama: nothing_saveable": ran(3.0, 5),
        # Faster than what fits 10 GiB, slower than what fits 20; below 5 none does.
        plan.format(1): ran(4.0, 3, budget_bytes=4 * GIB),
        plan.format(2): ran(1.5, 9, budget_bytes=10 * GIB),
        plan.format(3): ran(1.2, 19, budget_bytes=20 * GIB),
        # The first peak is of the step, the second of its compilation.
        "measured: one": ran(1.0, 10, peak_bytes=11 * GIB, peak_before_bytes=GIB),
        "measured: two": ran(1.0, 10, peak_bytes=10 * GIB, peak_before_bytes=10 * GIB)
        | {"simulated_seconds": 1.2},
    }
    records = Records("gpu", "measured", tmp_path / "gpu.jsonl")
    for cell, figures in cells.items():
        records.add(cell, figures)
    text = gpu_table.page(records)
    assert "No slower than the best policy that fits: 1 of 2 budgets" in text
    assert "minimal, 2000.00 ms | 0.750 |" in text
    assert "as it is written, 1000.00 ms | 1.200 |" in text
    assert "within 10% of measured: 7 of 8." in text
    assert "within 3% of the peak: 0 of 1." in text
