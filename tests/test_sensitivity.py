"""A plan that would be another one inside the range of the link's rate says so."""

import dataclasses
import types

import pytest

import stowax
from planned_models import QUICK, arguments, train
from planner_problems import chain, problem
from stowax._explain._sensitivity import changes, link_notes
from stowax._planner import evaluate, solve
from stowax._records._stages import HostUpdate, Link
from stowax._target._target import target

GB = 10**9
BYTES = 8 * GB  # of a value, per layer


def link(rate):
    return Link(device_to_host=rate * GB, host_to_device=rate * GB)


def question(rate):
    """Ten layers of 3 s forward: room for one value of three, the link as given."""
    body = chain(count=10, bytes=BYTES)
    asked = problem(body, device_bytes=15 * BYTES, host_bytes=10**15)
    return dataclasses.replace(asked, link=link(rate))


def offloaded(asked, decisions):
    return sum(
        value.bytes * body.count
        for body, chosen in zip(asked.bodies, decisions, strict=True)
        for value, how in zip(body.values, chosen, strict=True)
        if how == "offload"
    )


def test_an_end_with_another_answer_is_found():
    asked = question(rate=16)  # 8 GB in half a second: a layer hides several copies
    planned = solve(asked).decisions
    (found,) = changes(asked, planned, [link(0.5), link(17)])
    # In 16 s a copy hides in no layer of 3 s; a little faster changes nothing.
    assert found.link == link(0.5)
    assert found.planned_offloaded == offloaded(asked, planned) > found.offloaded
    then = dataclasses.replace(asked, link=link(0.5))
    assert found.planned_seconds == evaluate(then, planned).seconds
    assert found.seconds == pytest.approx(solve(then).evaluation.seconds)
    assert found.seconds < found.planned_seconds


def test_what_compiled_programs_decided_otherwise_is_no_change_of_the_link():
    asked = question(rate=16)
    (body,) = solve(asked).decisions
    slower = ((body[0], *("recompute" for _ in body[1:])),)
    assert evaluate(asked, slower).seconds > 1.01 * solve(asked).evaluation.seconds
    assert changes(asked, slower, [link(17)]) == []


def test_the_host_updates_nothing_that_the_link_would_do_faster():
    part = HostUpdate(
        values=(0,), update_in=GB, update_out=GB, seconds=1.0, stream_seconds=2.0
    )
    update = dataclasses.replace(
        chain(count=1, bytes=BYTES, name="state"), phase="update", host_updates=(part,)
    )
    from stowax._explain._sensitivity import _at

    asked = problem(update)
    assert _at(asked, link(0.9)).bodies[0].host_updates == (part,)
    assert _at(asked, link(1.1)).bodies[0].host_updates == ()


def best(asked, ends, decisions):
    machine = types.SimpleNamespace(link=asked.link, link_range=ends)
    space = types.SimpleNamespace(
        without_stalls=lambda budget: asked,
        survey=types.SimpleNamespace(target=machine),
    )
    return types.SimpleNamespace(space=space, decisions=decisions)


def test_the_note_has_both_rates_and_what_changes():
    asked = question(rate=16)
    planned = solve(asked).decisions
    (note,) = link_notes(0, best(asked, (link(0.5), link(17)), planned))
    assert note.startswith(
        "the host link is assumed, at 16 GB/s (from 0.5 to 17), and the answer depends "
        "on it: at 0.5 GB/s offloading "
    )
    assert "at 17 GB/s" not in note
    assert note.endswith("stowax calibrate measures it where the plan is to run")


def test_nothing_is_said_where_there_is_nothing_to_say():
    asked = question(rate=16)
    planned = solve(asked).decisions
    assert link_notes(0, best(asked, (link(15), link(17)), planned)) == ()
    assert link_notes(0, best(asked, None, planned)) == ()  # the link was measured
    assert link_notes(0, best(asked, (link(0.5), link(17)), None)) == ()


@pytest.mark.slow
def test_a_plan_for_a_machine_that_is_not_there_says_it():
    pytest.importorskip("libtpu")
    machine = target("v5e-1")
    assert machine.link_range == (link(11), link(32))
    # A layer of this model computes for microseconds; 16 MiB take that long at 10 TB/s.
    known = dataclasses.replace(
        machine, link=link(10_000), link_range=(link(1), link(10_000))
    )
    args = arguments(rows=4 * 4096)
    plan = stowax.plan(
        train, *args, target=known, budget="300MiB", compiler_options=QUICK
    )
    notes = [note for note in plan.proof.notes if "the host link is assumed" in note]
    assert any(d.decision == "offload" for d in plan.decisions)
    assert len(notes) == 1
    assert "at 1 GB/s offloading" in notes[0]
