"""The names that are like a pattern of the user's, for an error about it."""

import difflib
import pathlib
from collections.abc import Sequence

_MOST = 5


def near_names(pattern: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words that share most of the pattern's letters in a row, and the next best.

    Letters outside of wildcards count alone. A path says no more than its file's name.
    """
    plain = pattern.translate(str.maketrans("", "", "*?[]")).lower()
    names = {word: pathlib.PurePath(word).name for word in words}
    short = [w for w, name in names.items() if name == w or name not in names]
    like = {word: _likeness(plain, word.lower()) for word in short}
    found = sorted(like, key=lambda word: -like[word])[:_MOST]
    near = [word for word in found if 2 * int(like[word]) > len(plain)]
    return [repr(word) for word in near], [repr(word) for word in found]


def _likeness(plain: str, word: str) -> float:
    matcher = difflib.SequenceMatcher(None, plain, word, autojunk=False)
    shared = sum(block.size for block in matcher.get_matching_blocks())
    longest = matcher.find_longest_match().size
    return longest + shared / (len(plain) + len(word) + 1)
