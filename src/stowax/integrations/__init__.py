"""Plans in the words of other projects, to paste into their configurations.

Each function takes a `Plan`, or one that `stowax.load_plan` read, and returns text. The
other project need not be installed.
"""

from ._maxtext import maxtext_remat

__all__ = ["maxtext_remat"]
