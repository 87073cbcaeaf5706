"""Slices that a compiled program copies from or to another place than it says."""

from collections.abc import Iterator

from .._records._inspection import Hazard
from ._context import Context, hazard, where


def misplaced_copies(context: Context) -> Iterator[Hazard]:
    """One hazard per slice (`_hlo._offsets`)."""
    for item in context.program.misplaced:
        yield hazard(
            "misplaced-copy",
            where(item),
            "the compiler's note of where it begins is not, or cannot be seen to be, "
            "what the program says",
            instruction=item.name,
        )
