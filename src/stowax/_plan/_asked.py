"""What `plan` was asked, checked before any work is done, and how it shows progress.

One clear error per argument: later the same mistake would come out of JAX, the compiler
or the solver, in words of theirs.
"""

import functools
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from .._errors import ArgumentError
from .._survey._asked import MOST_MISSES
from .._target._machine import Target
from .._units import format_bytes, parse_bytes, parse_share

QUIET_SECONDS = 2.0
"""Progress is shown, by default, once planning has taken this long."""

_LEAST_BUDGET = 1024
"""Bytes. Who writes less has left out the unit, and would wait for compiles first."""

Progress = Callable[[str], None] | Literal[False] | None


def check_kinds(
    pin: Any, forbid: Any, donate: Any, compiler_options: Any, progress: Any
) -> None:
    """**Raises:** `ArgumentError` for an argument of `plan` of the wrong kind."""
    if pin is not None and not (isinstance(pin, Mapping) and _texts(pin)):
        raise ArgumentError(
            "pin", f"{pin!r}", "Write a dict such as {'*attention*': 'keep'}."
        )
    if not isinstance(forbid, str) and not (
        isinstance(forbid, Collection) and _texts(forbid)
    ):
        raise ArgumentError(
            "forbid",
            f"{forbid!r}",
            "Write decisions such as ('offload', 'recompute:*attention*').",
        )
    if donate is not None and not isinstance(donate, bool):  # 0 is a position
        raise ArgumentError(
            "donate",
            f"{donate!r}",
            "Write True, False, or None for where the memory is needed; which "
            "arguments are state is found by itself.",
        )
    if compiler_options is not None and not (
        isinstance(compiler_options, Mapping) and _texts(compiler_options)
    ):
        raise ArgumentError(
            "compiler_options",
            f"{compiler_options!r}",
            "Write a dict of XLA's options, names without dashes in front.",
        )
    if progress not in (None, False) and not callable(progress):
        raise ArgumentError(
            "progress",
            f"{progress!r}",
            "Write a function of one text, False for silence, or leave it out.",
        )


def check_compiles(compiles: Any) -> None:
    """**Raises:** `ArgumentError` for less than `MOST_MISSES`; `None` is the usual."""
    if compiles is None:
        return
    if type(compiles) is not int or compiles < MOST_MISSES:
        raise ArgumentError(
            "compiles",
            f"{compiles!r}",
            f"Write how many programs may be compiled, {MOST_MISSES} or more.",
        )


def _texts(items: Collection[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def device_budget(
    given: int | str | None, machine: Target, name: str = "budget"
) -> int | float:
    """Bytes per device that a plan may use; by default what the target has.

    A share of what the step takes as it is written stays a share, below one or not
    much above.
    """
    if given is None:
        return machine.device_bytes
    if (share := parse_share(given, name)) is not None:
        return share
    amount = parse_bytes(given, name, shares=True)
    if amount < _LEAST_BUDGET:
        raise ArgumentError(
            name,
            f"{given!r}, which is {amount} bytes",
            f"Write a unit: '{amount}GiB'.",
        )
    if amount > machine.memory_bytes:
        most = format_bytes(machine.memory_bytes)
        raise ArgumentError(
            name,
            f"{given!r}, more than the {most} that a device of {machine.name} has",
            f"Write at most {most!r}, or leave it out for all of it.",
        )
    return amount


def device_budgets(given: Any, machine: Target) -> list[int | float]:
    """Bytes per device of each budget that a plan is asked for."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(
            "budgets",
            f"{given!r}",
            "Write several, such as ('12GiB', '16GiB'), or call plan for one.",
        )
    limits = [device_budget(budget, machine, "budgets") for budget in given]
    if not limits:
        raise ArgumentError(
            "budgets", "none", "Write at least one, such as ('12GiB', '16GiB')."
        )
    return limits


def host_budget(
    given: int | str | None, reserve: int | str | None, machine: Target
) -> tuple[int, int]:
    """Bytes of host memory per device that a plan may use, and those in reserve.

    The reserve comes off the budget, given or the target's.
    """
    if given is not None and _is_nothing(given):
        raise ArgumentError(
            "host_budget",
            f"{given!r}",
            "To leave the host alone write forbid=('offload',).",
        )
    whole = machine.host_bytes if given is None else parse_bytes(given, "host_budget")
    if reserve is None or _is_nothing(reserve):
        return whole, 0
    kept = parse_bytes(reserve, "host_reserve")
    if kept >= whole:
        which = f"that a device of {machine.name} has of its host"
        raise ArgumentError(
            "host_reserve",
            f"{reserve!r}, all of the {format_bytes(whole)} "
            + (which if given is None else "of host_budget"),
            "Write less, per device; to leave the host alone write "
            "forbid=('offload',).",
        )
    return whole - kept, kept


def _is_nothing(reserve: int | str) -> bool:
    """Whether it says zero bytes, in whatever unit."""
    if isinstance(reserve, str):
        return bool(re.fullmatch(r"\s*0+(\.0*)?\s*([KMGT]?i?B)?\s*", reserve))
    return isinstance(reserve, int) and not isinstance(reserve, bool) and reserve == 0


def reserve_note(reserve: int, budget: int) -> str:
    """What a plan that does not fit has to say of the reserve; empty where none is.

    **Arguments:** bytes of host memory per device: what others have, what is left.
    """
    if not reserve:
        return ""
    return (
        f"host_reserve keeps {format_bytes(reserve)} of the host's memory per device "
        f"for others, and plans may take the other {format_bytes(budget)}"
    )


RAISED = "stowax: raised by the function that was given as progress"
"""The note on an error of a user's, by which planning knows that it is to stop."""


def _told(progress: Callable[[str], None], line: str) -> None:
    """Tells the user's function; what that raises is marked as theirs."""
    try:
        progress(line)
    except Exception as error:
        error.add_note(RAISED)
        raise


def sayer(progress: Progress, started: float) -> Callable[[str], None]:
    """Where lines of progress go: by default standard error, once it takes a while."""
    if progress is False:
        return lambda line: None
    if progress is not None:
        return functools.partial(_told, progress)
    waiting: list[str] = []

    def say(line: str) -> None:
        waiting.append(line)
        if time.perf_counter() - started > QUIET_SECONDS:
            for text in waiting:
                print(f"stowax: {text}", file=sys.stderr, flush=True)  # noqa: T201
            waiting.clear()

    return say
