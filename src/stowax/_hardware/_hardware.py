"""What the chips can do: one table of figures, each with where it is from.

The chips that stowax can plan for, TPUs by their cloud names and GPUs by their product
names. Figures are per chip; the methods of `Chip` give them per device as JAX counts
devices (a TPU7x chip is two).

>>> CHIPS["v5p"].matrix_rate("bfloat16")
459000000000000.0
"""

import types
from collections.abc import Mapping

from ._figures import GB, OPERATIONS, RATE, TERA, Chip, assumed, unknown
from ._gpus import GPUS
from ._link_ranges import with_link_range
from ._tpus import TPUS

_CPU = Chip(
    key="cpu",
    title="CPU",
    platform="cpu",
    device_kinds=("cpu",),
    devices_per_chip=1,
    memory=unknown("bytes", "the machine's own; read when the target is made"),
    allowed_bytes=unknown("bytes", "the machine's own; read when the target is made"),
    memory_bandwidth=assumed(20 * GB, RATE, "order of magnitude of one desktop socket"),
    matrix=tuple(
        (name, assumed(0.1 * TERA, OPERATIONS, "order of magnitude of a few cores"))
        for name in ("bfloat16", "float32")
    ),
    vector=assumed(0.02 * TERA, OPERATIONS, "order of magnitude of a few cores"),
    interconnect=unknown(RATE, "devices of one process share its memory"),
    link_out=assumed(10 * GB, RATE, "a copy within main memory"),
    link_in=assumed(10 * GB, RATE, "a copy within main memory"),
    sustained_out=unknown(RATE, "not measured"),
    sustained_in=unknown(RATE, "not measured"),
    chips_per_host=1,
    host_bytes=unknown("bytes", "the machine's own; read when the target is made"),
    host_bandwidth=unknown(RATE, "device and host memory are the same memory"),
    clock=unknown("hertz", "the CPU compiler gives no cycle estimates"),
)

CHIPS: Mapping[str, Chip] = types.MappingProxyType(
    {chip.key: with_link_range(chip) for chip in (*TPUS, *GPUS, _CPU)}
)
"""Every chip of the table by its key."""


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`, or `None` if it is not in the table.

    >>> chip_of_kind("NVIDIA H200").key
    'h200'
    """
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip
    return None
