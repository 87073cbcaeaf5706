"""What things are called in tables: names that are too long, and stacks."""

import dataclasses

import pytest

from plan_parts import changed
from report_records import PLAN, STACK
from stowax.report import plan_text
from stowax.report._layout import cut_path, cut_paths

STATE = [
    f"args[*][0].{where}['params']['encoder']['MlpBlock_*']['Dense_*']['kernel']"
    for where in ("params", "opt_state[0].mu", "opt_state[0].nu")
]


def test_parameters_and_moments_are_told_apart():
    assert cut_paths(STATE, 46) == [
        "args[*]….params…['Dense_*']['kernel']",
        "args[*]….mu…['Dense_*']['kernel']",
        "args[*]….nu…['Dense_*']['kernel']",
    ]


@pytest.mark.parametrize("width", range(20, 80, 7))
def test_no_name_is_wider_than_its_column(width):
    found = cut_paths(STATE, width)
    assert max(map(len, found)) <= width
    assert width < 40 or len({*found}) == 3


def test_names_that_are_alike_stay_so():
    whole = "args[1]['mu']['head']['kernel']"
    assert cut_paths([whole, whole], 20) == [cut_path(whole, 20)] * 2
    names = [f"dot_general model.py:104 in Sequential/{n}" for n in ("up", "down")]
    assert cut_paths(names, 24) == [cut_path(names[0], 24)] * 2
    assert cut_paths(names, 60) == names


def test_segments_have_one_name_and_take_no_number_from_layers():
    named = ("layers", False), ("first", True), ("heads", False), ("last", True)
    stacks = tuple(
        dataclasses.replace(STACK, name=name, segment=segment)
        for name, segment in named
    )
    binding = [f"device memory in the backward pass of {name}" for name, _ in named]
    text = plan_text(changed(PLAN, stacks=stacks, binding=tuple(binding)), 160)
    assert (
        "limited by  device memory in the backward pass of model.py:88 #1, device "
        "memory in the backward pass of straight-line code, device memory in the "
        "backward pass of model.py:88 #2"
    ) in " ".join(line.strip() for line in text.splitlines())
    one = changed(PLAN, stacks=stacks[:2], binding=tuple(binding[:2]))
    assert "backward pass of model.py:88, device" in plan_text(one, 160)
