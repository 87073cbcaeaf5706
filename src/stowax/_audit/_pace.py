"""How often an audit looks, so that the loop keeps its pace; no JAX.

A step of a fraction of a millisecond would take half as long again if all of it were
noted. So what the audit takes is added up, and when it is too large a share of the
time, it passes some steps by: whole ones, from one call of the step to another, never
those at the beginning, and never compilations.
"""

import time
from typing import Any

_AT_FIRST = 8  # steps that are always looked at
_AT_ONCE = 4  # and so many in a row, from then on
_REST_ABOVE, _LOOK_BELOW = 0.1, 0.06  # of the time since the beginning


class Pace:
    """Counts `spent` seconds, and says at each call whether to look or to rest.

    `function` is the id of the function that leads, as it was called last.
    """

    def __init__(self) -> None:
        self.resting = False
        self.spent = 0.0
        self._began = time.perf_counter()
        self._seen: dict[Any, int] = {}
        self._leader: Any = None
        self.function = 0
        self._leads_by = (False, -1)
        self._in_a_row = -_AT_FIRST

    def note(self, call: Any, function: Any, bytes: int, jitted: bool) -> None:
        """A call was noted; the leader is the repeated one that makes most bytes."""
        count = self._seen[call] = self._seen.get(call, 0) + 1
        if call == self._leader:
            self._in_a_row += 1
            self.function = id(function)
        elif count > 1 and (jitted, bytes) > self._leads_by:
            self._leader, self._leads_by = call, (jitted, bytes)
            self._in_a_row = -_AT_FIRST

    def wakes(self, function: Any, slow: bool) -> bool:
        """Whether a call is worth a look while resting."""
        return slow or id(function) == self.function

    def leads(self, call: Any) -> bool:
        """Whether `call` is where steps begin, as far as one can tell meanwhile."""
        return call == self._leader

    def at_call(self, call: Any, now: float) -> bool:
        """Whether to rest from this call on, or to go on resting."""
        if call == self._leader:
            share = self.spent / max(now - self._began, 1e-9)
            if self.resting:
                self.resting = share > _LOOK_BELOW
            elif self._in_a_row >= _AT_ONCE and share > _REST_ABOVE:
                self.resting, self._in_a_row = True, 0
        return self.resting
