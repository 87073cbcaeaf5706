"""The largest places at a peak; those of layers that are alike share a row."""

import dataclasses

from .._records._memory import Block, MemoryCurve
from .._scopes import scopes_of
from ._layout import short_source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """`count` places of one size, role, name, shape and source line.

    `first` is the largest and first of them, `name` what it is called: the innermost
    scope and the operation, an argument's path, or else the instruction.
    """

    first: Block
    count: int
    name: str

    @property
    def bytes(self) -> int:
        """All of them together."""
        return self.first.bytes * self.count

    @property
    def padding(self) -> int:
        """The part of `bytes` that no array needs."""
        return self.first.padding * self.count

    def text(self) -> str:
        """Number, source line, name and shape in a line."""
        block = self.first
        parts = (short_source(block.source), self.name, block.shape)
        times = f"{self.count} × " * (self.count > 1)
        return times + "  ".join(part for part in parts if part)


def largest(curve: MemoryCurve) -> list[Alike]:
    """All that is in memory at the peak, the most bytes first.

    >>> [row.text() for row in largest(curve)[:1]]  # doctest: +SKIP
    ['6 × model.py:37  attention/dot_general  float32[192,1024,1024]']
    """
    found: dict[tuple[object, ...], list[Block]] = {}
    for block in curve.at(curve.peak_position):
        where = short_source(block.source)
        key = (block.bytes, block.padding, block.role, where, short_name(block))
        found.setdefault((*key, block.shape), []).append(block)
    rows = [
        Alike(first=blocks[0], count=len(blocks), name=short_name(blocks[0]))
        for blocks in found.values()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def short_name(block: Block) -> str:
    """What a place is called: of an operation the last two parts of its name.

    An argument's name is a path and stays whole.
    """
    named = block.framework_name
    name = "/".join(scopes_of(named)[-2:]) if ")/" in named else named
    return name or block.name
