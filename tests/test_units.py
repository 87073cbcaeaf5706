"""Bytes and seconds as people write and read them."""

import math
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest

from stowax._errors import ArgumentError
from stowax._units import format_bytes, format_seconds, parse_bytes

BINARY = {"": 1, "B": 1} | {
    f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)
}
DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}


@hypothesis.given(
    st.integers(1, 4095),
    st.sampled_from(sorted((BINARY | DECIMAL).items())),
    st.sampled_from(["", " ", "  "]),
    st.sampled_from([str, str.lower, str.upper]),
)
def test_reads_every_unit(count: int, unit: tuple, space: str, case: Callable) -> None:
    name, factor = unit
    assert parse_bytes(case(f"{count}{space}{name}"), "budget") == count * factor


@hypothesis.given(st.integers(1, 2**50))
def test_what_is_printed_can_be_read_back(count: int) -> None:
    # Printed to three digits, or four just below the next unit: half of the last off.
    printed = format_bytes(count)
    assert parse_bytes(printed, "budget") == pytest.approx(count, rel=0.006, abs=1)


@hypothesis.given(st.integers(1, 2**60))
def test_an_int_is_bytes(count: int) -> None:
    assert parse_bytes(count, "budget") == count


def test_fractions_of_a_unit() -> None:
    assert parse_bytes("1.5 TiB", "budget") == 3 * 2**39
    assert parse_bytes(".5GiB", "budget") == 2**29
    assert parse_bytes("2e9", "budget") == 2 * 10**9


@pytest.mark.parametrize(
    "bad", ["16 GB?", "", "GiB", "sixteen", "16 QiB", "-1GiB", "1 2"]
)
def test_text_that_is_no_amount(bad: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse_bytes(bad, "budget")
    assert str(error.value) == (
        f"budget: got {bad!r}. Write bytes as an int, or text such as '16GiB'."
    )


@pytest.mark.parametrize("bad", [0, -1, "0GiB", math.nan, math.inf, 0.0])
def test_amounts_that_cannot_be(bad: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"host_budget: got .*not above zero.*'16GiB'"
    ):
        parse_bytes(bad, "host_budget")


@pytest.mark.parametrize("bad", [None, True, [16], b"16GiB", 1.5])
def test_things_that_are_no_amount(bad: object) -> None:
    with pytest.raises(ArgumentError, match="Write bytes as an int"):
        parse_bytes(bad, "budget")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (16 * 2**30, "16.0 GiB"),
        (-3 * 2**30, "-3.00 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_as_printed(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 s"), (1.5, "1.50 s"), (0.01234, "12.3 ms"), (4.2e-6, "4.2 µs")],
)
def test_seconds_as_printed(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
