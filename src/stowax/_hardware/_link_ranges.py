"""Between which rates the link of a chip's host may be, where nobody measured it there.

A plan rests on the rate of the link, and what makers quote is a port, not what the
host's memory gives with every chip at it and both directions busy. Published
measurements differ by factors. So a chip has two ends of each direction beside the
figures that it is planned with, and a plan that would be another one at an end says so
(`_sensitivity`). What is measured on the machine itself (`stowax calibrate`) has no
range.
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


_MEGATRON = "NVIDIA/Megatron-LM, issue 6491"
_HALVED = f"as copies in both directions share the rate ({_NVBANDWIDTH} 41)"


def _rate(low: float, why: str) -> Figure:
    return assumed(low * GB, RATE, why)


def _seen(rate: float, where: str) -> Figure:
    return measured(rate * GB, RATE, where)


_PCIE5_LOW = _rate(24, f"55, {_BOTH_WAYS}")
_PCIE5 = (_PCIE5_LOW, quoted(64 * GB, RATE, "PCIe 5.0 x16"))
_C2C_SHARED = "NVLink-C2C: 900 GB/s both ways for two GPUs"

_GB300_OUT = (
    _rate(91, f"half of 182 with all four GPUs busy ({_MEGATRON}), {_HALVED}"),
    quoted(225 * GB, RATE, _C2C_SHARED),
)
_GB300_IN = (
    _rate(84, f"half of 169 with all four GPUs busy ({_MEGATRON}), {_HALVED}"),
    quoted(225 * GB, RATE, _C2C_SHARED),
)

# The ends of both directions.
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
            _seen(5.5, f"{_NVBANDWIDTH} 11: 5 to 6, all GPUs busy both ways"),
            _seen(26, f"{_NVBANDWIDTH} 11: 25 to 26, one GPU, one way"),
        ),
        "h100": _PCIE5,
        "h200": _PCIE5,
        "b200": _PCIE5,
        "b300": (
            _PCIE5_LOW,
            _rate(110, "0.86 of PCIe 6.0 x16, if the host has it: the H100 reaches it"),
        ),
    }
)

# The ends of the way out, then of the way in, where the two differ.
_TWO_RANGES: Mapping[str, tuple[tuple[Figure, Figure], tuple[Figure, Figure]]] = (
    types.MappingProxyType(
        {
            "gh200": (
                (
                    _rate(85, f"half of 170, {_HALVED}"),
                    _seen(295, "vllm-project/vllm, pull request 6496: one module"),
                ),
                (
                    _rate(171, f"half of 342 (vLLM's 6496: one module), {_HALVED}"),
                    _seen(421, f"{_MEGATRON}: 411 to 421, four modules"),
                ),
            ),
            "gb200": (_GB300_OUT, _GB300_IN),
            "gb300": (_GB300_OUT, _GB300_IN),
        }
    )
)


def with_link_range(chip: Chip) -> Chip:
    """`chip` with the ends of its link's range, if one is known.

    >>> from stowax._hardware._hardware import CHIPS
    >>> CHIPS["v5p"].in_low.value / 1e9, CHIPS["v5p"].in_high.value / 1e9
    (11.0, 32.0)
    """
    if chip.key in _TWO_RANGES:
        out, into = _TWO_RANGES[chip.key]
    elif chip.key in _RANGES:
        out = into = _RANGES[chip.key]
    else:
        return chip
    return dataclasses.replace(
        chip, out_low=out[0], out_high=out[1], in_low=into[0], in_high=into[1]
    )
