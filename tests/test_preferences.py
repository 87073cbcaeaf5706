"""Pins and forbidden decisions: what they narrow, and what they refuse."""

import dataclasses

import pytest

from planner_problems import EVERY, chain, operation
from stowax._errors import ArgumentError
from stowax._records._stages import GROUPED, Value
from stowax._survey._preferences import Preferences

INSTEAD = (
    "Write 'offload', 'recompute', 'host update' or 'tile', alone or with a pattern "
    "after a colon: 'recompute:*dropout*'. To forbid keeping, pin another decision."
)
ALL = frozenset({"keep", "offload", "recompute"})


def value(name="dot_general model.py:41 in attention", *, allowed=ALL, **fields):
    given = {
        "index": 7,
        "name": name,
        "source": "/home/me/model.py:41",
        "shape": (8, 16),
        "dtype": "float32",
        "bytes": 512,
        "operation": 3,
        "available": False,
        "needed": True,
        "allowed": frozenset(allowed),
    }
    return Value(**{**given, **fields})


@pytest.mark.parametrize(
    "pattern",
    ["*attention*", "*ATTENTION", "model.py:41", "*/model.py:4?", "activation"],
)
def test_a_pin_matches_name_role_and_source_in_any_case(pattern):
    preferences = Preferences(pin={pattern: "offload"})
    assert preferences.allow(value()) == {"offload"}
    assert preferences.matched(value()) == pattern
    assert preferences.count(pattern, "offload") == 1
    preferences.check_matched()


def test_groups_are_not_why_something_stays_that_was_not_to_leave():
    body = chain()
    stays = [
        dataclasses.replace(v, allowed=frozenset({"keep"}), stays=why)
        for v, why in zip(
            body.values, (GROUPED, GROUPED, "it is small", ""), strict=True
        )
    ]
    body = dataclasses.replace(body, values=tuple(stays))
    forbids = Preferences(pin={}, forbid=("offload:v0", "offload:v2"))
    (narrowed,) = forbids.narrow([body])
    why = ("forbid has 'offload:v0'", GROUPED, "it is small", "")
    assert tuple(v.stays for v in narrowed.values) == why


def test_a_folder_is_no_part_of_a_plain_file_name():
    preferences = Preferences(pin={"me/model.py:41": "keep"})
    assert preferences.allow(value()) == ALL


def test_brackets_are_a_part_of_a_name():
    """`args[0]*` is about the first argument, not about names with a 0 in them."""
    preferences = Preferences(pin={"args[0]['m']*": "keep"}, forbid=["offload:w[1]*"])
    assert preferences.allow(value("args[0]['m']['w']")) == {"keep"}
    assert preferences.allow(value("args0'")) == ALL
    assert preferences.allow(value("w[1].kernel")) == {"keep", "recompute"}


def test_later_pins_win():
    preferences = Preferences(pin={"*": "keep", "*attention*": "recompute"})
    assert preferences.allow(value()) == {"recompute"}
    assert preferences.allow(value("tanh")) == {"keep"}
    assert preferences.matched(value()) == "*attention*"
    turned = Preferences(pin={"*attention*": "recompute", "*": "keep"})
    assert turned.allow(value()) == {"keep"}


def test_forbidden_decisions():
    preferences = Preferences(pin={}, forbid=("offload", "recompute:*attention*"))
    assert preferences.allow(value()) == {"keep"}
    assert preferences.allow(value("tanh")) == {"keep", "recompute"}
    assert preferences.matched(value()) is None  # nobody pinned it
    assert preferences.patterns() == ()


def test_weights_and_constants_are_left_alone():
    preferences = Preferences(pin={"*weight*": "recompute"})
    weight = value("weight 3", available=True, allowed={"keep"}, operation=None)
    assert preferences.allow(weight) == {"keep"}
    assert preferences.matched(weight) is None
    with pytest.raises(ArgumentError, match="matches no value"):
        preferences.check_matched()


@pytest.mark.parametrize(
    ("asked", "allowed", "fields", "says"),
    [
        ("recompute", {"keep", "offload"}, {"operation": None}, "enters the layer"),
        ("recompute", {"keep", "offload"}, {}, "running its operation again"),
        ("offload", {"keep", "recompute"}, {}, "smaller than 1.00 MiB"),
        ("offload", {"keep", "recompute"}, {"bytes": 2**20}, "no host memory"),
        ("offload", {"keep", "recompute"}, {"dtype": "int32"}, "no floating-point"),
        ("offload", {"keep", "recompute"}, {"shape": (8,)}, "two axes or more"),
        ("keep", {"recompute"}, {}, "depends on constants alone"),
    ],
)
def test_what_is_impossible_is_refused_with_the_reason(asked, allowed, fields, says):
    preferences = Preferences(pin={"*attention*": asked})
    assert preferences.allow(value(allowed=allowed, **fields)) == allowed
    with pytest.raises(ArgumentError) as caught:
        preferences.check_matched()
    message = str(caught.value)
    assert message.startswith(f"pin['*attention*']: got {asked!r}, which is impossible")
    assert says in message
    assert "/home/me/model.py:41" in message
    assert value(**fields).dtype in message
    for possible in allowed:
        assert repr(possible) in message.split("Pin it to")[1]


def test_a_pin_against_a_prohibition_is_refused():
    preferences = Preferences(pin={"*attention*": "offload"}, forbid=("offload",))
    with pytest.raises(ArgumentError, match="which is forbidden by 'offload'"):
        preferences.allow(value())


def test_a_wide_pin_holds_where_it_is_possible():
    preferences = Preferences(pin={"*attention*": "offload"})
    small = value(allowed={"keep", "recompute"}, index=8)
    assert preferences.allow(value()) == {"offload"}
    assert preferences.allow(small) == {"keep", "recompute"}
    assert preferences.matched(small) is None
    assert preferences.count("*attention*", "offload") == 1
    preferences.check_matched()


def test_an_earlier_pin_holds_where_the_later_is_impossible():
    preferences = Preferences(pin={"*attention*": "keep", "*": "offload"})
    small = value(allowed={"keep", "recompute"})
    assert preferences.allow(small) == {"keep"}
    assert preferences.matched(small) == "*attention*"


def test_what_depends_on_constants_alone_is_computed_whatever_is_forbidden():
    preferences = Preferences(pin={}, forbid=("recompute",))
    assert preferences.allow(value(allowed={"recompute"})) == {"recompute"}


def test_a_pattern_that_matches_nothing_lists_near_names():
    preferences = Preferences(pin={"*atention*": "keep"})
    for name in ("tanh model.py:9", "exp model.py:8", "dot model.py:41 in attention"):
        preferences.allow(value(name))
    with pytest.raises(ArgumentError) as caught:
        preferences.check_matched()
    message = str(caught.value)
    assert message.startswith("pin['*atention*']: got a pattern that matches no value")
    assert "Nearest: 'dot model.py:41 in attention'. Patterns" in message


def test_where_no_name_is_like_a_pattern_some_are_listed():
    preferences = Preferences(pin={"*mlp*": "keep"})
    preferences.allow(value("tanh model.py:9"))
    with pytest.raises(ArgumentError) as caught:
        preferences.check_matched()
    # A path has its file's name beside it.
    assert "None is like it; some are: 'model.py:41', " in str(caught.value)
    assert "/home/me" not in str(caught.value)
    assert "'tanh model.py:9'" in str(caught.value)


def test_forbidding_with_a_pattern_that_matches_nothing():
    preferences = Preferences(pin={}, forbid=("offload:modle.py:41",))
    preferences.allow(value())
    with pytest.raises(ArgumentError) as caught:
        preferences.check_matched()
    assert "forbid 'offload:modle.py:41'" in str(caught.value)
    assert "Nearest: 'model.py:41'" in str(caught.value)


def test_no_layers_at_all():
    preferences = Preferences(pin={"x": "keep"}, forbid=("offload",))
    with pytest.raises(ArgumentError, match="no repeated layers"):
        preferences.check_matched()
    # Forbidding offload where nothing could be offloaded is no mistake.
    Preferences(pin={}, forbid=("offload",)).check_matched()


def test_without_one_pin():
    preferences = Preferences(
        pin={"*attention*": "keep", "tanh*": "recompute"}, forbid=("offload",)
    )
    others = preferences.without("*attention*", "keep")
    assert others.patterns() == (("tanh*", "recompute"),)
    assert others.allow(value()) == {"keep", "recompute"}
    assert others.allow(value("tanh")) == {"recompute"}


def decided(body):
    return [(v.needed, v.allowed) for v in body.values]


def test_what_is_pinned_and_not_read_is_what_the_backward_pass_starts_from():
    # v0 is read by the operation that makes v1, and so on; the backward pass reads v3.
    body = chain(needed=(3,))
    preferences = Preferences(pin={"v1": "offload"})
    (narrowed,) = preferences.narrow([body])
    again = (False, {"recompute"})
    assert decided(narrowed)[1:3] == [(True, {"offload"}), again]
    assert decided(narrowed)[3] == (True, {"recompute"})
    preferences.check_matched()


def test_it_starts_there_only_if_the_pin_means_nothing_else():
    body = chain(needed=(2, 3))
    values = list(body.values)
    for k in (1, 2):
        values[k] = dataclasses.replace(values[k], name=f"pinned {k}")
    named = dataclasses.replace(body, values=tuple(values))
    (narrowed,) = Preferences(pin={"pinned ?": "keep"}).narrow([named])
    assert decided(narrowed)[1] == (False, {"keep"})
    assert decided(narrowed)[3] == (True, EVERY)
    # To compute a value again takes no pin on it to be read.
    (narrowed,) = Preferences(pin={"v1": "recompute"}).narrow([body])
    assert decided(narrowed)[2] == (True, EVERY)


def test_the_cheapest_way_is_taken():
    body = chain(needed=(2, 3))
    dear, cheap = operation(1, (1,), (2,), 9.0), operation(2, (1,), (3,), 1.0)
    body = dataclasses.replace(body, operations=(body.operations[0], dear, cheap))
    (narrowed,) = Preferences(pin={"v1": "keep"}).narrow([body])
    assert decided(narrowed)[2:] == [(True, EVERY), (True, {"recompute"})]


def test_a_pin_that_would_store_what_nothing_reads_is_refused():
    preferences = Preferences(pin={"v1": "offload"}, forbid=("recompute:v3",))
    preferences.narrow([chain(needed=(3,))])
    with pytest.raises(ArgumentError) as caught:
        preferences.check_matched()
    message = str(caught.value)
    assert message.startswith(
        "pin['v1']: got 'offload' for v1 (model.py:2), uint8[8]: the backward pass "
        "reads neither that nor anything that it may compute again from it."
    )
    assert "Leave out the pin" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pin": {"*": "store"}},
            "pin['*']: got 'store'. Write 'keep', 'offload', 'recompute' or 'tile'.",
        ),
        (
            {"pin": {"": "keep"}},
            "pin: got an empty pattern. Write '*' to mean every value.",
        ),
        (
            {"pin": {}, "forbid": ("keep",)},
            f"forbid: got 'keep'. {INSTEAD}",
        ),
        (
            {"pin": {}, "forbid": ("recompute:",)},
            f"forbid: got 'recompute:'. {INSTEAD}",
        ),
    ],
)
def test_what_cannot_be_read(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        Preferences(**arguments)
    assert str(caught.value) == message
