"""Plans for several budgets as a table."""

import pytest

from plan_parts import changed
from report_records import PLAN
from stowax._errors import ArgumentError
from stowax.report import budgets_text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_several_budgets_have_a_line_each_the_smallest_first(width):
    gib = 2**30
    made = {"planning_seconds": 2.0, "exposed_seconds": 0.0}
    large = changed(
        PLAN, budget_bytes=24 * gib, device_bytes=23 * gib, step_seconds=1.0, **made
    )
    small = changed(
        large, budget_bytes=16 * gib, device_bytes=15 * gib, step_seconds=1.25
    )
    none = changed(
        large, budget_bytes=gib, fits=False, smallest_budget=10 * gib, step_seconds=9.0
    )
    text = budgets_text([large, none, small], width)
    assert all(len(line) <= width for line in text.splitlines())
    lines = text.splitlines()
    assert lines[0].startswith("stowax plans for ")
    above = next(n for n, line in enumerate(lines) if line.split()[0] == "budget")
    assert ("waiting" in lines[above]) == (width >= 80)
    rows = lines[above + 1 :]
    assert [row.split()[0] for row in rows[:3]] == ["1.00", "16.0", "24.0"]
    assert rows[0].split()[-1] == "no"
    assert rows[1].split()[-1] == "yes"
    assert "%" not in rows[0] + rows[1]  # what others are compared with
    assert "-20.0%" in rows[2].split()
    assert rows[3].startswith("about 10.0 GiB, predicted: the smallest budget")
    assert "Planned in 6.00 s." in " ".join(" ".join(rows[4:]).split())
    assert "smallest budget" not in budgets_text([small, large], width)


def test_no_plans_are_no_table():
    with pytest.raises(ArgumentError) as caught:
        budgets_text([])
    assert str(caught.value) == (
        "records: got no plan. Give what stowax.plans returns."
    )
