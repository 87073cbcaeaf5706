"""Where random choices come from: one integer seed, or hypothesis, which shrinks.

What draws a program sees only `choose`. Options are given the simplest first, since
hypothesis shrinks towards the first.
"""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Chooser(Protocol):
    def choose(self, options: Sequence[T]) -> T: ...


class SeededChooser:
    """The choices that one integer makes."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def choose(self, options):
        return options[self._random.randrange(len(options))]


class HypothesisChooser:
    """The choices that hypothesis makes, and makes simpler once one fails."""

    def __init__(self, draw):
        self._draw = draw

    def choose(self, options):
        return options[self._draw(st.integers(0, len(options) - 1))]


def drawn_by(draw):
    """What `draw(chooser)` makes, as a strategy of hypothesis."""

    @st.composite
    def strategy(draw_one):
        return draw(HypothesisChooser(draw_one))

    return strategy()


def chance(chooser, once_in):
    """True once in so many times; false is simpler."""
    return chooser.choose(range(once_in)) == once_in - 1
