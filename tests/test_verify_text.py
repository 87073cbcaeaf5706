"""What a verification looks like in a terminal, at two widths, and as JSON."""

import dataclasses
import json

import pytest

from stowax._records._verification import Blame, LeafCheck, Verification
from stowax.report import verification_text


def leaf(path, role, error, ok, problem="", tolerance=3.2e-05):
    return LeafCheck(
        path=path,
        role=role,
        shape=(40, 5120, 13824),
        dtype="bfloat16",
        step=1 if error is not None else 8,
        error=error,
        tolerance=tolerance,
        change=1.2e-01,
        ok=ok,
        problem=problem,
    )


FAILED = Verification(
    step="make.<locals>.train_step",
    target="h200",
    device="NVIDIA H200",
    reference="cpu",
    steps=10,
    leaves=(
        leaf(
            "out[0]['parameters']['layers']['attention_out']", "parameter", 0.2, False
        ),
        leaf("out[0]['norm']", "parameter", 1.5e-06, True),
        leaf("out[0]['head']", "parameter", 3.1e-05, True),
        leaf(
            "out[1][0].mu['wide_in']",
            "optimizer state",
            None,
            False,
            "NaN or infinity in 1024 of 2048, plain has numbers",
        ),
        leaf("out[2]['tokens']", "output", 0.0, True, tolerance=0.0),
    ),
    repeatable=False,
    blamed=(
        Blame(
            stack="1d5e.0-7",
            value=7,
            name="tanh model.py:41 in block",
            source="/home/me/model.py:41",
            decision="offload",
            instead="keep",
        ),
    ),
    why="With it, and nothing else offloaded, the step is wrong; with all of the plan "
    "but for it the step is right.",
    notes=("Two planned runs on the same arguments differ.",),
    runs=9,
    seconds=61.5,
)
PASSED = dataclasses.replace(
    FAILED,
    leaves=tuple(x for x in FAILED.leaves if x.ok) * 5,
    repeatable=True,
    reference="NVIDIA H200",
    blamed=(),
    why="",
    notes=(),
)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_nothing_is_wider_than_asked_and_nothing_is_lost(width):
    text = verification_text(FAILED, width)
    assert all(len(line) <= width for line in text.splitlines())
    flat = " ".join(text.split())
    assert (
        "train_step under its plan for h200, run on NVIDIA H200, plain on cpu" in flat
    )
    assert "FAILED: 2 of 5 leaves are wrong, and two runs on the same" in flat
    assert "to blame offload tanh model.py:41 in block" in flat
    assert "NaN or infinity in 1024 of 2048, plain has numbers" in flat
    assert text.count("\u2717") == 2
    assert ("bfloat16[40,5120,13824]" in text) == (width == 160)


def test_the_leaves_closest_to_the_tolerance_come_first_and_the_rest_is_counted():
    lines = verification_text(PASSED, 80).splitlines()
    assert lines[2].startswith("PASSED: 15 leaves agree, and two runs gave the same")
    table = [line.split()[0] for line in lines if line.startswith("out[")]
    assert table == ["out[0]['head']"] * 5 + ["out[0]['norm']"] * 3
    assert lines[-1] == "and 7 leaves more that agree"


def test_an_error_that_all_elements_share_is_told_in_words():
    leaning = dataclasses.replace(
        leaf("out[0]['up']", "parameter", 1e-08, False),
        bias=1.0e-04,
        bias_tolerance=3.0e-06,
    )
    text = verification_text(dataclasses.replace(FAILED, leaves=(leaning,)), 100)
    assert (
        "its change is too large by 1.0e-04 of itself, in all of it or in a slice of "
        "it along the first axis; 3.0e-06 is tolerated"
    ) in " ".join(text.split())


def test_as_json():
    found = json.loads(FAILED.to_json())
    assert (found["version"], found["passed"]) == (1, False)
    assert found["leaves"][3]["error"] is None
    assert found["blamed"][0]["decision"] == "offload"
