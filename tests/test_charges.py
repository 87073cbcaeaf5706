"""What was waited for is charged to what moved, and to what would do as well."""

import dataclasses

import pytest

from planner_problems import chain, problem, replaced
from stowax._planner import solve
from stowax._search._charges import charged

NAME = "layer"


def prices(asked):
    return [value.offload_seconds for value in asked.bodies[0].values]


def test_without_charges_nothing_changes():
    asked = problem(chain())
    assert charged(asked, {}) is asked


def test_what_was_seen_costs_that_and_its_like_half():
    asked = problem(replaced(chain(bytes=8), 3, bytes=4))
    found = charged(asked, {(NAME, 0): 3.0, (NAME, 1): 1.0})
    # 4 s for 16 bytes: half of a quarter of a second for every byte of the others.
    assert prices(found) == [3.0, 1.0, 8 / 8, 4 / 8]
    assert prices(asked) == [0.0] * 4


def test_a_value_that_hid_is_not_suspected():
    found = charged(problem(chain(bytes=8)), {(NAME, 0): 3.0, (NAME, 1): 0.0})
    assert prices(found)[:2] == [3.0, 0.0]


@pytest.mark.parametrize("seen", [1, 2, 3])
def test_a_value_by_another_name_costs_the_same(seen):
    """v2 is v1 with a name, and v3 is v2 laid out: free, and as long on the link."""
    body = chain(bytes=8)
    operations = tuple(
        dataclasses.replace(o, seconds=1.0 if o.index == 0 else 0.0)
        for o in body.operations
    )
    asked = problem(dataclasses.replace(body, operations=operations))
    found = charged(asked, {(NAME, seen): 2.0})
    assert prices(found)[1:] == [2.0, 2.0, 2.0]
    assert prices(found)[0] == 1.0  # what they are made of takes work: half


def test_the_solver_moves_something_else_or_nothing():
    asked = problem(chain(bytes=8), device_bytes=250)
    (before,) = solve(asked, time_limit_seconds=60.0).decisions
    moved = {i: 9.0 for i, d in enumerate(before) if d == "offload"}
    assert moved
    asked = charged(asked, {(NAME, i): s for i, s in moved.items()})
    after = solve(asked, time_limit_seconds=60.0)
    offloaded = {i for i, d in enumerate(after.decisions[0]) if d == "offload"}
    assert offloaded < set(moved) or not offloaded & set(moved)


def test_what_no_program_moved_yet_may_be_waited_for_a_little():
    """Values that are as good as those that hid come after them, not before."""
    asked = problem(chain(bytes=8))
    link = min(asked.link.device_to_host, asked.link.host_to_device)
    found = prices(charged(asked, {(NAME, 0): 0.0, (NAME, 2): 0.0}))
    assert found[0] == found[2] == 0.0
    assert found[3] == pytest.approx(0.05 * 8 / link)
