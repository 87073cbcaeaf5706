"""Which buffers a call could have been given, and which it was.

An array that dies unused after a call whose results fit it could have been donated;
weak references say so. One that was donated is told by its id, as long as it is there.
"""

import collections
import traceback
import weakref
from typing import Any, NamedTuple

import jax

from .._jax_hooks import Array
from .._records._audit import Reuse, Unused
from .._where import Place, is_users
from ._arrays import is_reuse
from ._known import ByIdentity, Function

_RECENT = 512  # calls whose donated arguments are remembered


class _Candidate(NamedTuple):
    reference: Any
    unused: Unused


class _Donation(NamedTuple):
    ids: tuple[int, ...]
    names: tuple[str, ...]
    place: Place
    function: str


class Donations:
    """Candidates for donation, arguments that were donated, and those used again."""

    def __init__(self, least_bytes: int):
        self._least = max(least_bytes, 1)
        self._candidates: dict[int, _Candidate] = {}
        self._donated: collections.deque[_Donation] = collections.deque(maxlen=_RECENT)
        self._spares = ByIdentity()  # functions that donate nothing
        self.unused: list[Unused] = []
        self.reused: list[Reuse] = []

    def use(self, leaves: Any) -> None:
        """What is used after a call could not have been donated to it."""
        if self._candidates:
            for leaf in leaves:
                found = self._candidates.get(id(leaf))
                if found is not None and found.reference() is leaf:
                    del self._candidates[id(leaf)]

    def note(
        self,
        number: int,
        function: Any,
        known: Function,
        place: Place,
        leaves: list[Any],
        names: Any,
        made: list[Any],
        largest: int,
    ) -> None:
        """What call `number` was given, and what it could have been given.

        **Arguments:** `names` is called for the names of `leaves`; `largest` has the
        bytes of the largest of its results, `made`.
        """
        if largest < self._least and self._spares.get(function):
            return
        arrays = [
            (k, leaf, leaf.is_deleted())
            for k, leaf in enumerate(leaves)
            if type(leaf) is Array
        ]
        gone = [(k, leaf) for k, leaf, deleted in arrays if deleted]
        if gone:
            called = names()
            self._donated.append(
                _Donation(
                    tuple(id(leaf) for _, leaf in gone),
                    tuple(called[k] for k, _ in gone),
                    place,
                    known.name,
                )
            )
        else:
            self._spares.put(function, True)
        if largest < self._least or len(gone) == len(arrays):
            return
        room: collections.Counter = collections.Counter(
            (leaf.shape, leaf.dtype)
            for leaf in made
            if type(leaf) is Array and _bytes(leaf) >= self._least
        )
        room.subtract((leaf.shape, leaf.dtype) for _, leaf in gone)
        for k, leaf, deleted in arrays:
            if not deleted and room[leaf.shape, leaf.dtype] > 0:
                room[leaf.shape, leaf.dtype] -= 1
                self._follow(leaf, Unused(number, names()[k], _bytes(leaf)))

    def _follow(self, leaf: Any, unused: Unused) -> None:
        key = id(leaf)

        def dead(reference: Any) -> None:
            found = self._candidates.get(key)
            if found is not None and found.reference is reference:
                del self._candidates[key]
                self.unused.append(unused)

        self._candidates[key] = _Candidate(weakref.ref(leaf, dead), unused)

    def forget(self) -> None:
        """Nobody looks for a while: what is used is not seen."""
        self._candidates.clear()

    def use_again(self, leaves: Any, place: Place, message: str) -> None:
        """Notes those of `leaves` that were donated before."""
        for leaf in leaves:
            if type(leaf) is Array and leaf.is_deleted():
                self.reused.append(self._reuse(leaf, place, message))
                return

    def _reuse(self, leaf: Any, place: Place, message: str) -> Reuse:
        for donation in reversed(self._donated):
            if id(leaf) in donation.ids:
                name = donation.names[donation.ids.index(id(leaf))]
                return Reuse(place, message, name, donation.function, donation.place)
        return Reuse(place, message)

    def ended_by(self, error: BaseException) -> None:
        """Notes the donated buffer that was used again, if that is the error."""
        if not is_reuse(error):
            return
        message = str(error).partition("\n")[0]
        for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
            code = frame.f_code
            if is_users(code):
                place = Place(code.co_filename, line, code.co_name, code.co_firstlineno)
                if all(reuse.place != place for reuse in self.reused):
                    self._look_in(frame.f_locals, place, f"{message:.200}")
                return

    def _look_in(self, variables: Any, place: Place, message: str) -> None:
        """The error names no array: it is one that a variable of the line's has."""
        found = [
            self._reuse(leaf, place, message)
            for value in list(variables.values())
            for leaf in _leaves(value)
            if type(leaf) is Array and leaf.is_deleted()
        ]
        named = [reuse for reuse in found if reuse.argument]
        self.reused += (named or found or [Reuse(place, message)])[-1:]


def _leaves(value: Any) -> list[Any]:
    try:
        return jax.tree.leaves(value)
    except Exception:  # a pytree of the user's that does not flatten
        return []


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize
