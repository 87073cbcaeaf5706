"""The hardware table: every figure says where it is from, and unknown stays unknown."""

import dataclasses
import itertools

import pytest

from stowax._hardware._figures import (
    GIB,
    MATRIX_EFFICIENCY,
    MEMORY_EFFICIENCY,
    OPERATIONS,
    RATE,
    Chip,
    Figure,
    measured,
)
from stowax._hardware._gpu_targets import GPU_CHIPS, gpu_memory_bytes, gpu_target_config
from stowax._hardware._hardware import CHIPS, chip_of_kind

ACCELERATORS = [chip for chip in CHIPS.values() if chip.platform != "cpu"]


def test_every_figure_has_an_origin() -> None:
    for chip in CHIPS.values():
        for title, figure in chip.figures():
            where = f"{chip.key}, {title}"
            assert figure.source, where
            assert figure.date[:4].isdigit(), where
            assert (figure.value is None) == (figure.kind == "unknown"), where
            if figure.value is not None:
                assert figure.value > 0, where


def test_the_chips_that_are_promised_are_there() -> None:
    assert {"v4", "v5e", "v5p", "v6e", "7x"} <= set(CHIPS)
    assert set(GPU_CHIPS) <= set(CHIPS)
    assert {"a100-80", "h100", "h200", "b200", "b300", "cpu"} <= set(CHIPS)
    assert {"gh200", "gb200", "gb300"} <= set(CHIPS)  # with Grace on the module


@pytest.mark.parametrize("chip", ACCELERATORS, ids=lambda chip: chip.key)
def test_what_a_device_may_use_is_not_more_than_a_chip_has(chip: Chip) -> None:
    # For v5p the compiler allows 95.7 GiB where the page says 95: allow that one GiB.
    assert chip.allowed_bytes.value * chip.devices_per_chip <= chip.memory.value + GIB


@pytest.mark.parametrize("chip", ACCELERATORS, ids=lambda chip: chip.key)
def test_rates_keep_their_order(chip: Chip) -> None:
    half, single = chip.matrix_rate("bfloat16"), chip.matrix_rate("float32")
    assert single <= half
    assert chip.matrix_rate("float16") == half
    # Blackwell Ultra gave up most of its units for integers.
    ultra = chip.key in ("b300", "gb300")
    for narrow in ("float8_e4m3fn",) if ultra else ("int8", "float8_e4m3fn"):
        if (rate := chip.matrix_rate(narrow)) is not None:
            assert rate >= half
    # Products are faster than elementwise work, or there were no matrix unit; and a
    # chip's own memory is faster than the link to its host.
    if (vector := chip.vector_rate()) is not None:
        assert vector < half
    if chip.link_in.value is not None:
        assert chip.link_in.value < chip.memory_rate()


@pytest.mark.parametrize("chip", ACCELERATORS, ids=lambda chip: chip.key)
def test_the_links_range_has_what_is_planned_with_inside(chip: Chip) -> None:
    for low, sustained, nominal, high in (
        (chip.out_low, chip.sustained_out, chip.link_out, chip.out_high),
        (chip.in_low, chip.sustained_in, chip.link_in, chip.in_high),
    ):
        assert low.value < high.value
        planned = sustained.value or nominal.value
        assert planned is None or low.value <= planned <= high.value


@pytest.mark.parametrize(
    ("key", "out", "into"), [("gh200", 170e9, 411e9), ("gb300", 193e9, 211e9)]
)
def test_each_direction_of_a_link_has_its_own_rate(
    key: str, out: float, into: float
) -> None:
    # NVIDIA/Megatron-LM, issue 6491: nvbandwidth on four modules of each.
    chip = CHIPS[key]
    assert (chip.sustained_out.value, chip.sustained_in.value) == (out, into)
    assert chip.sustained_out.kind == chip.sustained_in.kind == "measured"
    assert chip.out_low.value != chip.in_low.value


def test_what_is_measured_is_what_programs_reach() -> None:
    quoted = CHIPS["7x"]  # two devices a chip
    here = dataclasses.replace(
        quoted,
        matrix=(("bfloat16", measured(8e12, OPERATIONS, "a test")),),
        memory_bandwidth=measured(2e12, RATE, "a test"),
        vector=measured(6e12, OPERATIONS, "a test"),
        host_update=measured(4e9, RATE, "a test"),
    )
    assert here.matrix_reached("bfloat16") == here.matrix_rate("bfloat16") == 4e12
    assert here.memory_reached() == here.memory_rate() == 1e12
    assert here.vector_reached() == 3e12
    assert here.host_rate() == 2e9
    # Of what is quoted a part is reached; what is unknown stays so.
    nominal = quoted.matrix_rate("bfloat16")
    assert quoted.matrix_reached("bfloat16") == nominal * MATRIX_EFFICIENCY
    assert quoted.memory_reached() == quoted.memory_rate() * MEMORY_EFFICIENCY
    assert quoted.vector_reached() is None
    assert quoted.host_rate() is None


def test_a_rate_nobody_gave_is_none_and_not_zero() -> None:
    assert CHIPS["a100-80"].matrix_rate("float8_e4m3fn") is None
    assert CHIPS["v5p"].matrix_rate("int4") is None
    assert CHIPS["7x"].vector_rate() is None


def test_a_chip_that_is_two_devices_gives_each_half() -> None:
    chip = CHIPS["7x"]
    assert chip.devices_per_chip == 2
    whole = dict(chip.matrix)["bfloat16"].value
    assert chip.matrix_rate("bfloat16") * 2 == whole
    assert chip.memory_rate() * 2 == chip.memory_bandwidth.value


def test_the_clock_agrees_with_the_peak_rate() -> None:
    # 2 cores of 4 units of 128 x 128 multiply-adds: the quoted peak is that x clock.
    operations_per_cycle = 2 * 4 * 128 * 128 * 2
    chip = CHIPS["v5p"]
    peak = chip.clock.value * operations_per_cycle
    assert peak == pytest.approx(chip.matrix_rate("bfloat16"), rel=0.01)


def test_device_kinds_are_unambiguous() -> None:
    for one, other in itertools.combinations(CHIPS.values(), 2):
        assert not set(one.device_kinds) & set(other.device_kinds)
    assert chip_of_kind("TPU v5 lite").key == "v5e"
    assert chip_of_kind("TPU v5").key == "v5p"
    assert chip_of_kind("abacus") is None


@pytest.mark.parametrize("key", GPU_CHIPS)
def test_gpu_descriptions_agree_with_the_table(key: str) -> None:
    text = gpu_target_config(key)
    assert f"device_memory_size: {gpu_memory_bytes(key)}" in text
    assert f"major: {8 if key == 'a100-80' else 10 if 'b' in key else 9} " in text
    assert f"minor: {3 if 'b300' in key else 0} " in text
    assert CHIPS[key].memory.value == gpu_memory_bytes(key)
    assert text.count("{") == text.count("}")


def test_figures_cannot_be_changed_by_accident() -> None:
    figure = CHIPS["h100"].memory
    assert isinstance(figure, Figure)
    with pytest.raises(AttributeError):
        figure.value = 1
    with pytest.raises(TypeError):
        CHIPS["h100"] = None
