"""Between which rates the link of a chip's host may be, where nobody measured it there.

A plan rests on the rate of the link, and what makers quote is a port, not what the
host's memory gives with every chip at it and both directions busy. Published
measurements differ by factors. So a chip has two ends beside the one figure that it is
planned with, and a plan that would be another one at an end says so (`_sensitivity`).
What is measured on the machine itself (`stowax calibrate`) has no range.
"""

import dataclasses
import types
from collections.abc import Mapping

from ._figures import GB, RATE, Chip, Figure, assumed, measured, quoted

_PCIE_PART = "0.75 of the planned rate: the part of a PCIe port's nominal rate that "
_REACHED = _PCIE_PART + "copies reach (ZaidQureshi/bam, issue 54: 12 of 16, 25 of 32)"
_ROME = "PCIe 4.0 x16, which the host's processor has"
_NVBANDWIDTH = "NVIDIA/nvbandwidth, issue"
_BOTH_WAYS = (
    "as on the A100, whose copies in fall from 25 to 11 while others go out "
    f"({_NVBANDWIDTH} 53)"
)


def _rate(low: float, why: str) -> Figure:
    return assumed(low * GB, RATE, why)


_PCIE5 = (_rate(24, f"55, {_BOTH_WAYS}"), quoted(64 * GB, RATE, "PCIe 5.0 x16"))

_RANGES: Mapping[str, tuple[Figure, Figure]] = types.MappingProxyType(
    {
        "v4": (_rate(12, _REACHED), _rate(32, _ROME)),
        "v5e": (_rate(11, _REACHED), _rate(32, _ROME)),
        "v5p": (
            _rate(11, _REACHED),
            _rate(
                32,
                "PCIe 4.0 x16: published gains of offloading on v5p need about twice "
                "the quoted rate; the host's processor would have PCIe 5.0",
            ),
        ),
        "v6e": (
            _rate(24, _REACHED),
            quoted(64 * GB, RATE, "Cloud TPU documentation, page TPU v6e: PCIe Gen5"),
        ),
        "7x": (
            _rate(15, "the slowest of this table: PCIe 3.0 x16"),
            _rate(64, "PCIe 5.0 x16, as TPU v6e has it"),
        ),
        "a100-80": (
            measured(
                5.5 * GB, RATE, f"{_NVBANDWIDTH} 11: 5 to 6, all GPUs busy both ways"
            ),
            measured(26 * GB, RATE, f"{_NVBANDWIDTH} 11: 25 to 26, one GPU, one way"),
        ),
        "h100": _PCIE5,
        "h200": _PCIE5,
        "b200": _PCIE5,
        "gh200": (
            _rate(
                149,
                "half of what is measured out: copies in both directions at once share "
                f"the rate ({_NVBANDWIDTH} 41)",
            ),
            quoted(450 * GB, RATE, "NVIDIA GH200 data sheet, NVLink-C2C"),
        ),
    }
)


def with_link_range(chip: Chip) -> Chip:
    """`chip` with the ends of its link's range, if one is known.

    >>> from stowax._hardware._hardware import CHIPS
    >>> CHIPS["v5p"].link_low.value / 1e9, CHIPS["v5p"].link_high.value / 1e9
    (11.0, 32.0)
    """
    if chip.key not in _RANGES:
        return chip
    low, high = _RANGES[chip.key]
    return dataclasses.replace(chip, link_low=low, link_high=high)
