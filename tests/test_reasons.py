"""The sentences that say why a value of a layer is where it is."""

import dataclasses

import pytest

from planner_problems import chain
from stowax._explain._reasons import layer_reason
from stowax._records._stages import Link

MIB = 2**20
BYTES = 8 * MIB


def reason(decision, *, index=2, seconds=2e-3, primitive="mul", window=1.0, **more):
    """Why a value of 8 MiB is where it is; its copy takes `window` forward runs."""
    body = dataclasses.replace(chain(bytes=BYTES), **more)
    made = dataclasses.replace(body.operations[1], seconds=seconds, primitive=primitive)
    body = dataclasses.replace(
        body, operations=(body.operations[0], made, body.operations[2])
    )
    rate = BYTES / (window * body.forward_seconds)
    link = Link(device_to_host=rate, host_to_device=rate)
    return layer_reason(body, body.values[index], decision, link)


def test_what_is_recomputed_has_its_price_and_its_gain():
    assert reason("recompute") == "costs 2.0 ms, frees 8.00 MiB a layer"
    assert (
        reason("recompute", seconds=9e-8)
        == "costs next to nothing, frees 8.00 MiB a layer"
    )


def test_a_segment_is_no_layer():
    assert reason("recompute", count=1) == "costs 2.0 ms, frees 8.00 MiB"
    assert reason("keep", count=1) == "computing it again would take 2.0 ms"
    given = "what is made elsewhere cannot be computed again"
    assert reason("keep", index=0, count=1) == given


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (0.414, "fills 41 % of the forward window"),
        (1.0, "fills 100 % of the forward window"),
        (1.24, "takes 1.2 × the forward window"),
        (57.49, "takes 57 × the forward window"),
    ],
)
def test_copies_that_take_longer_than_a_layer_are_no_percentage(window, says):
    assert reason("offload", window=window) == (
        f"its copy {says}; computing it again would take 2.0 ms"
    )


def test_what_a_layer_reads_is_given():
    given = "what a layer reads cannot be computed again"
    assert reason("keep", index=0) == given
    assert reason("offload", index=0).endswith("would take no time: it is given")


@pytest.mark.parametrize(
    ("primitive", "what"),
    [("squeeze", "a view"), ("convert_element_type", "a conversion"), ("mul", None)],
)
def test_a_kept_view_stands_in_for_what_it_is_a_view_of(primitive, what):
    behind = "without it, the value behind it is kept or computed again"
    expected = f"{what}: {behind}" if what else "computing it again would take {}"
    assert reason("keep", primitive=primitive, seconds=0.0) == expected.format(
        "next to nothing"
    )
    # What takes time to make is kept for that.
    assert reason("keep", primitive=primitive) == (
        "computing it again would take 2.0 ms a layer"
    )
