"""What more of a TPU's fast memory did for a plan, or could do for a step."""

from .._search._loop import Search
from .._search._space import Attempt
from .._survey._options import FAST_MEMORY, fast_memory_kib
from .._units import format_seconds


def fast_memory_notes(search: Search, best: Attempt) -> tuple[str, ...]:
    """What the option did for a plan; for a step left as it is, that it is there."""
    known = fast_memory_kib(best.space.survey.target)
    if known is None or FAST_MEMORY in search.asked.compiler_options:
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
        if a.decisions == best.decisions
        and a.space.name == best.space.name
        and a.measured.step_seconds
        and FAST_MEMORY not in a.options
    ]
    if not without:
        return ""
    before, now = format_seconds(min(without)), best.measured.step_seconds
    return f": {before} a step became {format_seconds(now)}"
