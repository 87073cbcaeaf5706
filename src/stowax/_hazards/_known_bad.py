"""Versions of XLA that are known to go wrong with certain options, as data.

Sources are the issue threads; each line says which versions it is known of. Where
nobody has established which version carries the repair, later ones count as bad until
somebody does.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .._records._inspection import Hazard
from .._units import format_bytes
from ._context import Context, hazard, where

Version = tuple[int, ...]


class KnownBad(NamedTuple):
    """One line of the list.

    `since` and `before` bound the jaxlib versions (`None`: open). `wrong` says of a
    program whether it is one of those that go wrong.
    """

    platform: str
    since: Version | None
    before: Version | None
    wrong: Callable[[Context], bool]
    what: str
    remedy: str
    issues: str


def _is_true(context: Context, option: str, default: bool) -> bool:
    value = str(context.intent.options.get(option, default)).lower()
    return value in ("true", "1", "enabled")


def _loops_fetch(context: Context) -> bool:
    return any(
        transfer.direction == "host-to-device" and transfer.trips > 1
        for transfer in context.program.transfers
    )


def _fused_slices(context: Context) -> bool:
    option = "xla_gpu_enable_dynamic_slice_fusion"
    return _loops_fetch(context) and _is_true(context, option, True)


def _pipelined(context: Context) -> bool:
    option = "xla_gpu_enable_pipelined_host_offloading"
    return bool(context.program.transfers) and _is_true(context, option, False)


def _host_counted(context: Context) -> bool:
    """Both memories together exceed the device's, and nothing keeps XLA from adding."""
    memory = context.memory
    if _is_true(context, "xla_gpu_enable_host_memory_offloading", False):
        return False
    disabled = str(context.intent.options.get("xla_disable_hlo_passes", ""))
    if "rematerialization" in disabled.split(","):
        return False
    both = memory.device.total + memory.host.total
    return memory.host.total > 0 and both > context.machine.device_bytes


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        platform="gpu",
        # The repair went into XLA on 27 July 2026, after 0.11.0 and before 0.12.0;
        # which wheel of 0.11 was the first to have it nobody has said.
        since=(0, 11, 0),
        before=(0, 12, 0),
        wrong=_fused_slices,
        what=(
            "offloaded values of a loop may be read in the wrong order: gradients are "
            "wrong by orders of magnitude, memory figures look right"
        ),
        remedy="xla_gpu_enable_dynamic_slice_fusion=False",
        issues="openxla/xla 46231, jax 39478",
    ),
    KnownBad(
        platform="gpu",
        since=None,
        before=None,
        wrong=_pipelined,
        what="a fetched value may be read before it has arrived: the loss is wrong",
        remedy="xla_gpu_enable_pipelined_host_offloading=False",
        issues="openxla/xla 37979, 45393",
    ),
    KnownBad(
        platform="gpu",
        since=None,
        before=None,
        wrong=_host_counted,
        what=(
            "XLA's rematerialization counts host memory as the device's, and computes "
            "again what it need not"
        ),
        remedy="xla_gpu_enable_host_memory_offloading=True",
        issues="openxla/xla 34565",
    ),
)


def known_bad(context: Context) -> Iterator[Hazard]:
    """Lines of the list that this program falls under."""
    version = version_of(context.intent.jaxlib)
    first = next(
        (t for t in context.program.transfers if t.direction != "host-to-host"), None
    )
    place = where(first) if first is not None else context.intent.source
    for line in KNOWN_BAD:
        if line.platform != context.machine.platform or not line.wrong(context):
            continue
        if line.since is not None and version < line.since:
            continue
        if line.before is not None and version >= line.before:
            continue
        moved = sum(t.total_bytes for t in context.program.transfers)
        yield hazard(
            "known-bad-version",
            place,
            f"jaxlib {context.intent.jaxlib} without {line.remedy}: {line.what} "
            f"({line.issues}); {format_bytes(moved)} per step cross the link here",
        )


def version_of(text: str) -> Version:
    """The numbers of a version, `(0, 10, 2)` of `"0.10.2.dev3"`."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
