"""How offloaded values travel: what the backward pass begins with comes ahead."""

import dataclasses

import pytest

from planner_problems import chain, replaced
from stowax._records._stages import Link
from stowax._survey._travel import ways_to_store

BYTES = 8
FAST = Link(device_to_host=80.0, host_to_device=80.0)  # a value in a tenth of a second
BODY = chain(bytes=BYTES)  # v0 → v1 → v2 → v3, a second each; backward 6 s
SLOW = Link(device_to_host=4.0, host_to_device=4.0)  # in two seconds


def test_what_is_kept_or_not_stored_does_not_travel():
    assert ways_to_store(BODY, ("keep", "recompute", "keep", None), FAST) == {
        0: "keep",
        2: "keep",
    }


def test_early_values_that_are_read_late_come_in_the_iteration_that_reads_them():
    """The rest is kept: v0 and v1 are read when the first operations' turn comes."""
    found = ways_to_store(BODY, ("offload", "offload", "keep", "keep"), FAST)
    assert found == {0: "offload early", 1: "offload early", 2: "keep", 3: "keep"}


def test_late_values_are_written_a_layer_later():
    found = ways_to_store(BODY, ("keep", "keep", "keep", "offload"), FAST)
    assert found[3] == "offload"


def test_what_the_backward_pass_begins_with_is_made_of_comes_ahead():
    """v3 is read first of all, and is computed again from v1: so v1 is, too."""
    found = ways_to_store(BODY, ("keep", "offload", "recompute", "recompute"), FAST)
    assert found == {0: "keep", 1: "offload ahead"}
    # Where memory is short, it is waited for.
    chosen = ("keep", "offload", "recompute", "recompute")
    assert ways_to_store(BODY, chosen, FAST, tight=True)[1] == "offload early"
    # Nothing begins with v1 where v2 is at hand.
    found = ways_to_store(BODY, ("keep", "offload", "keep", "recompute"), FAST)
    assert found[1] == "offload early"


def test_a_value_that_the_link_brings_too_late_comes_ahead():
    """v1 is read after a third of the backward pass, 2 s; the copy takes as long."""
    chosen = ("keep", "offload", "keep", "keep")
    assert ways_to_store(BODY, chosen, FAST)[1] == "offload early"
    assert ways_to_store(BODY, chosen, SLOW)[1] == "offload early"
    slower = dataclasses.replace(SLOW, host_to_device=3.9)
    assert ways_to_store(BODY, chosen, slower)[1] == "offload ahead"


def test_what_comes_ahead_stands_in_line_before_the_others():
    """v0 alone has 4 s; behind v3, fetched for the next layer, too little."""
    link = dataclasses.replace(SLOW, host_to_device=BYTES / 3.5)
    alone = ways_to_store(BODY, ("offload", "keep", "keep", "keep"), link)
    assert alone[0] == "offload early"
    both = ways_to_store(BODY, ("offload", "keep", "keep", "offload"), link)
    assert both == {0: "offload ahead", 1: "keep", 2: "keep", 3: "offload"}


@pytest.mark.parametrize("needed", [(1, 2, 3), (3,), ()])
def test_every_offloaded_value_travels_somehow(needed):
    body = replaced(chain(bytes=BYTES, needed=needed), 0, needed=False)
    chosen = ("offload",) * 4
    assert set(ways_to_store(body, chosen, FAST)) == {0, 1, 2, 3}


def test_what_the_link_cannot_bring_out_in_time_is_written_a_layer_later():
    """v1 is made after 1 s of 3: the copy may take two."""
    chosen = ("keep", "offload", "keep", "keep")
    in_time = dataclasses.replace(FAST, device_to_host=BYTES / 2.0)
    assert ways_to_store(BODY, chosen, in_time)[1] == "offload early"
    longer = dataclasses.replace(FAST, device_to_host=BYTES / 2.5)
    assert ways_to_store(BODY, chosen, longer)[1] == "offload"
    # It would be on the device a layer longer, and is waited for where memory is short.
    assert ways_to_store(BODY, chosen, longer, tight=True)[1] == "offload early"


def test_nothing_is_left_for_later_where_the_link_had_no_pause():
    """v0 is there from the start: its copy takes 4 s of a layer's 3 either way."""
    slow = dataclasses.replace(FAST, device_to_host=BYTES / 4.0)
    found = ways_to_store(BODY, ("offload", "keep", "keep", "keep"), slow)
    assert found[0] == "offload early"


def test_the_next_layer_begins_with_as_few_as_fill_the_pause():
    """v1 and v2 end after 5.9 s at once, after 4.5 if the link begins with one."""
    body = chain(bytes=BYTES)
    operations = tuple(
        dataclasses.replace(o, seconds=s)
        for o, s in zip(body.operations, (1.0, 0.4, 1.6), strict=True)
    )
    body = dataclasses.replace(body, operations=operations)
    link = dataclasses.replace(FAST, device_to_host=BYTES / 2.25)
    found = ways_to_store(body, ("keep", "offload", "offload", "keep"), link)
    assert [found[i] for i in (1, 2)].count("offload") == 1


def test_what_is_made_last_does_not_hold_up_what_was_there_before():
    """Copies begin when v2 is made, after 2 s of 3: v1, made after 1, takes 1.2."""
    body = replaced(BODY, 2, bytes=BYTES // 4)
    link = dataclasses.replace(FAST, device_to_host=BYTES / 1.2)
    both = ways_to_store(body, ("keep", "offload", "offload", "keep"), link)
    assert both == {0: "keep", 1: "offload early", 2: "offload", 3: "keep"}
    alone = ways_to_store(body, ("keep", "offload", "keep", "keep"), link)
    assert alone[1] == "offload early"


def test_a_layers_input_leaves_before_the_others_are_made_if_all_are_out_in_time():
    """v0 is there from the start and v1 after 1 s of 3: each copy takes 1.5 s, or 1.6.

    Begun together after 1 s, they would take till 4, and one would go a layer later.
    """
    chosen = ("offload", "offload", "keep", "keep")
    in_time = dataclasses.replace(FAST, device_to_host=BYTES / 1.5)
    found = ways_to_store(BODY, chosen, in_time)
    assert [found[i] for i in (0, 1)] == ["offload early"] * 2
    longer = dataclasses.replace(FAST, device_to_host=BYTES / 1.6)
    found = ways_to_store(BODY, chosen, longer)
    assert [found[i] for i in (0, 1)].count("offload") == 1


def test_what_is_small_beside_the_rest_comes_ahead_if_something_is_made_of_it():
    """v0 has 2 s until v1 is read, and v3 takes 0.9 s: the order may be another one."""
    body = replaced(BODY, 3, bytes=9 * BYTES)
    chosen = ("offload", "recompute", "keep", "offload")
    found = ways_to_store(body, chosen, FAST)
    assert found == {0: "offload ahead", 2: "keep", 3: "offload"}
    assert ways_to_store(body, chosen, FAST, tight=True)[0] == "offload early"
    # It is as large as the other, or nothing but the backward pass reads it.
    assert ways_to_store(BODY, chosen, FAST)[0] == "offload early"
    kept = ("offload", "keep", "keep", "offload")
    assert ways_to_store(body, kept, FAST)[0] == "offload early"
