"""The campaign around the instrument: its table, and processes that die."""

import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import __main__ as runner
from benchmarks import differential, differential_table
from benchmarks._record import Records


def record(seed, outcome, kind="", features=(), moved=()):
    verdict = {"outcome": outcome, "kind": kind, "message": f"{kind} of {seed}"}
    verdict |= {"moved": moved, "warned": (), "compared": 5, "seconds": 1.0}
    return {"seed": seed, "features": list(features), "verdicts": [verdict]}


RECORDS = [
    record(1, "planned", features=["loop: scan"], moved=["loop"]),
    record(2, "foreign", "KeyError", ["loop: scan", "form: vjp"]),
    record(3, "wrong", "wrong numbers", ["loop: fori loop"]),
    record(4, "foreign", "KeyError", ["loop: fori loop", "form: vjp"]),
    record(5, "refused", "pin | budget", ["loop: scan"]),
]


def test_failures_are_sorted_by_how_often_they_are():
    found = differential_table.classes(RECORDS, ("wrong", "foreign"))
    assert [(outcome, seeds) for outcome, _, seeds, _ in found] == [
        ("foreign", [2, 4]),
        ("wrong", [3]),
    ]
    assert differential_table.common(RECORDS, [2, 4]) == "form: vjp (100%)"


def test_the_table_counts_by_feature():
    text = differential_table.table(RECORDS, "command")
    assert "| loop: scan | 3 | 1 | 0 | 1 | 0 | 1 | 0 |" in text
    assert "| loop: fori loop | 2 | 0 | 0 | 0 | 1 | 1 | 0 |" in text
    assert "| moved: loop | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "| 1 | refused | pin \\| budget |  | 5 |" in text
    assert differential_table.has_faults(RECORDS)
    assert not differential_table.has_faults(RECORDS[:1])


class StandIn:
    """A worker without a process."""

    def __init__(self, more, flags=""):
        self.more = more

    def judge(self, seed):
        return record(seed, "planned")

    def close(self):
        pass


def test_a_campaign_takes_every_seed_once(monkeypatch):
    monkeypatch.setattr(differential, "_Worker", StandIn)
    found = differential.campaign(range(20), 1, 3, [], lambda records: None)
    assert sorted(r["seed"] for r in found) == list(range(20))


def test_a_process_that_dies_is_a_failure_with_its_seed(monkeypatch):
    monkeypatch.setattr(differential, "_PROCESS", (sys.executable, "-c", "1 / 0"))
    worker = differential._Worker([])
    found = worker.judge(7)
    (verdict,) = found["verdicts"]
    assert (found["seed"], verdict["outcome"]) == (7, "foreign")
    assert verdict["kind"] == "the process ended with 1"
    assert "ZeroDivisionError" in verdict["message"]
    worker.close()


def test_records_are_kept_from_one_run_to_the_next(monkeypatch, tmp_path):
    class StandIn:
        def __init__(self, *_):
            pass

        def judge(self, seed):
            verdict = {"outcome": "planned", "kind": "", "message": "", "moved": []}
            return {"seed": seed, "features": ["one"], "verdicts": [verdict]}

        def close(self):
            pass

    monkeypatch.setattr(differential, "_Worker", StandIn)
    keep, out = tmp_path / "records.jsonl", tmp_path / "table.md"
    for programs in (3, 5):
        given = ["--programs", str(programs), "--keep", str(keep), "--out", str(out)]
        given += ["--output", str(tmp_path / "differential.jsonl")]
        assert runner.run("differential", given) == 0
    assert not keep.exists()
    packed = gzip.decompress((tmp_path / "records.jsonl.gz").read_bytes()).decode()
    seeds = [json.loads(line)["seed"] for line in packed.splitlines()]
    assert sorted(seeds) == [0, 1, 2, 3, 4]
    assert "5 random programs under 5 plans" in out.read_text()
    run = Records("differential", "", tmp_path / "differential.jsonl").cells["table"]
    assert (run["programs"], run["outcomes"]["planned"]) == (5, 5)
