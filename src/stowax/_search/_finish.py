"""The last program of a plan for a TPU: the best one, with more of the fast memory.

What a kernel may hold of a TPU's fast memory decides how often products read their
operands, and is worth more than most decisions (`_options`). But a program takes longer
to compile with it. So the search goes on by the compiler's default, leaves a compile if
something fits, and that is for what it found. Assumed: what is the better plan without
is the better one with it, too.
"""

import dataclasses

from .._errors import CompileError
from .._survey._options import FAST_MEMORY, fast_memory_kib
from .._units import format_seconds
from ._attempt import Attempt
from ._forms import Found
from ._improve import best_sound, with_fast_memory
from ._loop import Search


def finished(found: Found) -> Found:
    """`found`, on a TPU compiled once more with more fast memory for each kernel.

    The faster one stays. An option costs nobody a plan: what the compiler refuses is
    as good as what is slower.
    """
    search, best = found.search, found.best
    if best.decisions is None or not search.fits(best):
        return found
    for solution, options in with_fast_memory(search, best):
        search.say("its kernels get more of the fast memory, once")
        try:
            search.compile(solution, len(search.log) + 1, options)
        except CompileError as error:
            search.say(f"refused, so it stays as it was: {error}")
    return dataclasses.replace(found, best=best_sound(search))


def fast_memory_notes(search: Search, best: Attempt) -> tuple[str, ...]:
    """What the option did for a plan; for a step left as it is, that it is there."""
    known = fast_memory_kib(search.survey.target)
    if known is None or FAST_MEMORY in search.user_options:
        return ()
    usual, more = (f"{kib // 1024} MiB" for kib in known)
    if best.decisions is None:
        return (
            f"each kernel may hold {usual} of the chip's fast memory, by default. With "
            f"{more} steps of large models took 10 to 19 % less, and about twice as "
            f"long to compile: compiler_options={{'{FAST_MEMORY}': '{known[1]}'}}",
        )
    if best.options.get(FAST_MEMORY) != str(known[1]):
        return ()
    return (
        f"each kernel may hold {more} of the chip's fast memory, {usual} by default"
        f"{_gained(search, best)}. It is one of the plan's compiler_options",
    )


def _gained(search: Search, best: Attempt) -> str:
    """How long the same decisions take without, if they were compiled so."""
    without = [
        a.measured.step_seconds
        for a in search.attempts
        if a.decisions == best.decisions and FAST_MEMORY not in a.options
    ]
    if not without:
        return ""
    before, now = format_seconds(min(without)), best.measured.step_seconds
    return f": {before} a step became {format_seconds(now)}"
