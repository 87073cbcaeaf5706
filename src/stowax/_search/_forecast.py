"""The device memory that a program is expected to need once compiled.

A prediction read off the lowered program, and what compilers were seen to need beyond
such predictions. That excess depends on what a program stores: one value is laid out
with padding, another keeps a buffer alive. With at most four programs there is no
telling which, but programs that store much the same need much the same. So the excess
is explained by what programs store (`_regression`); programs that copy to the host have
a part of their own.
"""

import dataclasses

import numpy as np

from .._records._stages import Decisions
from .._survey._survey import Survey, predict
from ._regression import explained, stored_parts

# Standard deviations: of the part of every program and of the programs that offload,
# relative to the target's memory budget; of a stored value's part, relative to its
# bytes; of what is left, relative to the budget.
_EVERYWHERE = 0.05
_OFFLOADING = 0.03
_STORED = 0.15
_REST = 0.015


@dataclasses.dataclass(slots=True, kw_only=True)
class Forecast:
    """Expected device bytes of the survey's step under any decisions.

    `scale` is the size of the programs in question, roughly: the budget. `predictions`
    has what was read off lowered programs: bytes on the device, and on the host.
    """

    survey: Survey
    scale: int
    predictions: dict[Decisions, tuple[int, int]] = dataclasses.field(
        default_factory=dict
    )
    compiled: dict[Decisions, int] = dataclasses.field(default_factory=dict)

    def learn(self, decisions: Decisions, compiled_bytes: int) -> None:
        """Takes note of what a compiled program really needs."""
        self.compiled[decisions] = compiled_bytes

    def predicted(self, decisions: Decisions) -> int:
        """Bytes read off the lowered program, whatever was compiled so far."""
        if decisions not in self.predictions:
            plan = self.survey.step_plan(decisions)
            _, prediction = predict(self.survey, plan)
            both = prediction.device_total, prediction.host_total
            self.predictions[decisions] = both
        return self.predictions[decisions][0]

    def on_host(self, decisions: Decisions) -> int:
        """Bytes that the host is predicted to need, 0 where nothing was predicted."""
        return self.predictions.get(decisions, (0, 0))[1]

    def excess(self, decisions: Decisions) -> int:
        """Bytes expected beyond `predicted`, by what the compiled programs needed."""
        measured = [self.compiled[d] - self.predicted(d) for d in self.compiled]
        pairs = zip(self._weights(decisions), measured, strict=True)
        return int(sum(weight * much for weight, much in pairs))

    def spread(self, decisions: Decisions) -> int:
        """Bytes by which `expected` may be off: one standard deviation."""
        mine = self._features(decisions)
        variance = mine @ mine + self._rest
        for known, weight in zip(self.compiled, self._weights(decisions), strict=True):
            variance -= weight * (self._features(known) @ mine)
        return int(max(variance, 0.0) ** 0.5)

    def expected(self, decisions: Decisions) -> int:
        """Bytes that the compiled program is expected to need."""
        return self.predicted(decisions) + self.excess(decisions)

    def known(self, decisions: Decisions, caution: float) -> int:
        """Bytes that the compiled program needs.

        If there is none yet, the expected ones and `caution` standard deviations.
        """
        compiled = self.compiled.get(decisions)
        if compiled is not None:
            return compiled
        return self.expected(decisions) + int(caution * self.spread(decisions))

    def credible(self, decisions: Decisions) -> int:
        """Bytes to promise for a program that is much smaller than those compiled.

        As `known`, but where these needed less than predicted, no larger part is taken
        off than of theirs: what large programs save a small one may not have. Planning
        does without: it compiles what it expects too little of, and learns.
        """
        parts = [self.compiled[d] / self.predicted(d) for d in self.compiled]
        least = min([1.0, *parts]) * self.predicted(decisions)
        return max(self.known(decisions, 0.0), int(least))

    def _weights(self, decisions: Decisions) -> np.ndarray:
        """What the excess of each compiled program counts for."""
        if not self.compiled:
            return np.zeros(0)
        known = np.array([self._features(known) for known in self.compiled])
        return explained(known, self._rest, known @ self._features(decisions))

    @property
    def _rest(self) -> float:
        return (_REST * self.scale) ** 2

    def _features(self, decisions: Decisions) -> np.ndarray:
        """One number per unknown part: its standard deviation, 0 where it has none."""
        offloads = any("offload" in chosen for chosen in decisions)
        return np.array(
            [
                _EVERYWHERE * self.scale,
                _OFFLOADING * self.scale * offloads,
                *stored_parts(self.survey.bodies, decisions, _STORED),
            ]
        )
