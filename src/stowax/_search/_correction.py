"""What the planner's model leaves out, learned from programs: one linear correction.

The model adds up what is alive and lets copies hide in all of a layer's arithmetic. A
lowered program says better what memory it needs, a compiled one knows, and its schedule
knows what is waited for. What they say beyond the model depends on what a program
stores, so it is explained by that: one part of every program, and one for each way to
store each value, in proportion to its bytes. Each part is a random number with mean
zero; what was seen gives every other program its expected sum and says how far off that
may be: Gaussian process regression with a linear kernel (Rasmussen and Williams,
*Gaussian Processes for Machine Learning*, 2006, equations 2.25 and 2.26).

`Memory` corrects bytes, `Stalls` seconds. Both are told to the solver as prices of its
values, so that it looks for what will fit and hide, not for what the model is wrong
about.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._hlo._program import transfers_named
from .._planner import evaluate
from .._records._stages import Body, Decision, Decisions, Evaluation, Problem, Value
from .._survey._survey import Survey, predict

WAYS: tuple[Decision, ...] = ("keep", "offload")

_SUSPECTED = 0.5
"""Part of the others' stall, per byte, that is assumed of what was never offloaded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far a model may be off: standard deviations.

    Of the part of every program, of those that offload, and of what no part explains,
    relative to the budget; of a stored value's part, relative to its bytes.
    """

    everywhere: float
    offloading: float
    stored: float
    rest: float


# Models of the benchmarks were off by up to a tenth of the budget before their programs
# were lowered; predictions by a few percent.
OF_MODEL = Spread(everywhere=0.1, offloading=0.0, stored=0.5, rest=0.002)
OF_PREDICTION = Spread(everywhere=0.05, offloading=0.03, stored=0.15, rest=0.015)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """By how much a model is off for any decisions, given what was seen of some.

    `seen` has the bytes of some decisions beyond the model's, `scale` is the size of
    the programs in question: the budget. What follows from them is worked out once: a
    plan of many small values asks for thousands of sums.
    """

    bodies: Sequence[Body]
    seen: Mapping[Decisions, int]
    scale: int
    spread: Spread

    def expected(self, decisions: Decisions) -> int:
        """The bytes that decisions are expected to need beyond the model's."""
        return int(self._weights @ self._features(decisions)) if self.seen else 0

    def deviation(self, decisions: Decisions) -> int:
        """One standard deviation of that."""
        mine = self._features(decisions)
        variance = mine @ mine + self._noise
        if self.seen:
            alike = self._known @ mine
            variance -= alike @ np.linalg.solve(self._kernel, alike)
        return int(max(variance, 0.0) ** 0.5)

    def parts(self) -> tuple[int, dict[str, list[tuple[int, int]]]]:
        """Bytes of every program, and by body for keeping and offloading each value.

        The same as `expected` says, but that storing never gives memory back: half of
        what keeping takes is believed to be saved at most, and of what offloading
        takes, one layer's.
        """
        if not self.seen:
            return 0, {}
        from scipy.optimize import lsq_linear  # a third of a second: for those who plan

        least = [-np.inf, -np.inf]
        for body in self.bodies:
            pair = -0.5 / self.spread.stored, -1.0 / body.copies / self.spread.stored
            least += pair * len(body.values)
        known, rest = self._known, self.spread.rest * self.scale
        told = known.any(axis=0)  # of what no program stores nothing is learned
        off_by = np.array(list(self.seen.values()), dtype=np.float64)
        found = np.zeros(known.shape[1])
        # Far from a bound scipy multiplies infinity by zero, and takes another way.
        with np.errstate(invalid="ignore"):
            found[told] = lsq_linear(
                np.vstack([known[:, told] / rest, np.eye(told.sum())]),
                np.concatenate([off_by / rest, np.zeros(told.sum())]),
                bounds=(np.array(least)[told], np.inf),
            ).x
        stored, at = {}, 2
        for body in self.bodies:
            pairs = []
            for value in body.values:
                whole = self.spread.stored * body.copies * value.bytes
                pairs.append((int(whole * found[at]), int(whole * found[at + 1])))
                at += 2
            stored[body.name] = pairs
        return int(self.spread.everywhere * self.scale * found[0]), stored

    @property
    def _noise(self) -> float:
        return (self.spread.rest * self.scale) ** 2

    @functools.cached_property
    def _known(self) -> np.ndarray:
        return np.array([self._features(decisions) for decisions in self.seen])

    @functools.cached_property
    def _kernel(self) -> np.ndarray:
        known = self._known
        return known @ known.T + np.eye(len(known)) * self._noise

    @functools.cached_property
    def _weights(self) -> np.ndarray:
        """The expected size of every part, in standard deviations."""
        off_by = np.array(list(self.seen.values()), dtype=np.float64)
        return self._known.T @ np.linalg.solve(self._kernel, off_by)

    def _features(self, decisions: Decisions) -> np.ndarray:
        """One number per part: its standard deviation, 0 where a program has none."""
        every = [decision for chosen in decisions for decision in chosen]
        stored = [[decision == way for way in WAYS] for decision in every]
        of_all = self.spread.everywhere, self.spread.offloading * ("offload" in every)
        values = self._sizes[:, None] * np.array(stored).reshape(-1, len(WAYS))
        return np.concatenate([np.array(of_all) * self.scale, values.ravel()])

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """Standard deviations of the values' parts, in the order of decisions."""
        sizes = [
            0 if value.virtual else body.copies * value.bytes
            for body in self.bodies
            for value in body.values
        ]
        return self.spread.stored * np.array(sizes, dtype=np.float64)


@dataclasses.dataclass(slots=True, kw_only=True)
class Memory:
    """Device bytes of a survey's step under any decisions.

    `predictions` has what was read off lowered programs (bytes on the device, on the
    host), `compiled` what compilers said, `proposed` the decisions that the model is
    corrected by; `plain` is what programs of another variant were seen to need beyond
    their predictions.
    """

    survey: Survey
    scale: int
    plain: int = 0
    predictions: dict[Decisions, tuple[int, int]] = dataclasses.field(
        default_factory=dict
    )
    compiled: dict[Decisions, int] = dataclasses.field(default_factory=dict)
    proposed: set[Decisions] = dataclasses.field(default_factory=set)
    _modelled: dict[Decisions, Evaluation] = dataclasses.field(
        default_factory=dict, init=False
    )
    _learned: Correction | None = dataclasses.field(default=None, init=False)

    def predicted(self, decisions: Decisions) -> int:
        """Bytes read off the lowered program, whatever was compiled so far."""
        if decisions not in self.predictions:
            plan = self.survey.step_plan(decisions)
            prediction = predict(self.survey, plan)
            both = prediction.device_total, prediction.host_total
            self.predictions[decisions] = both
        return self.predictions[decisions][0]

    def excess(self, decisions: Decisions) -> int:
        """Bytes expected beyond `predicted`, by what compiled programs needed."""
        if self.compiled:
            return self._of_prediction.expected(decisions)
        return self.plain

    def learn(self, decisions: Decisions, device: int, host: int) -> None:
        """Takes note of what a compiled program needs of both memories."""
        self.compiled.setdefault(decisions, device)
        self.predictions[decisions] = self.predicted(decisions), host
        self.proposed.add(decisions)

    def mean_excess(self) -> int:
        """What compiled programs needed beyond `predicted`, on the average."""
        more = [self.compiled[d] - self.predicted(d) for d in self.compiled]
        return sum(more) // len(more) if more else self.plain

    def expected(self, decisions: Decisions) -> int:
        """Bytes that the compiled program is expected to need, or does need."""
        compiled = self.compiled.get(decisions)
        if compiled is not None:
            return compiled
        return self.predicted(decisions) + self.excess(decisions)

    def cautious(self, decisions: Decisions, caution: float) -> int:
        """The same with `caution` standard deviations, unless it was compiled."""
        if decisions in self.compiled:
            return self.compiled[decisions]
        deviation = self._of_prediction.deviation(decisions)
        return self.expected(decisions) + int(caution * deviation)

    def credible(self, decisions: Decisions) -> int:
        """Bytes to promise for a program that is much smaller than those compiled.

        Where these needed less than predicted, no larger part is taken off than of
        theirs: what large programs save a small one may not have.
        """
        parts = [self.compiled[d] / self.predicted(d) for d in self.compiled]
        least = min([1.0, *parts]) * self.predicted(decisions)
        return max(self.expected(decisions), int(least))

    def on_host(self, decisions: Decisions) -> int:
        """Bytes that the host needs or is predicted to; 0 where nothing is known."""
        return self.predictions.get(decisions, (0, 0))[1]

    def host_beyond(self) -> int:
        """The most that a predicted program needs on the host beyond the model."""
        if not self.survey.bodies:
            return 0
        return max(
            0,
            *(self.on_host(d) - self._by_model(d).host_bytes for d in self.proposed),
            0,
        )

    def _by_model(self, decisions: Decisions) -> Evaluation:
        """What the planner's model says, without any correction."""
        if decisions not in self._modelled:
            plain = self.survey.problem(self.scale, self.scale)
            self._modelled[decisions] = evaluate(plain, decisions)
        return self._modelled[decisions]

    def problem(self, budget: int, host: int) -> Problem:
        """The planner's question, its memory corrected by what was proposed so far."""
        off_by = {
            decisions: self.expected(decisions) - self._by_model(decisions).device_bytes
            for decisions in self.proposed
        }
        everywhere, stored = Correction(
            bodies=self.survey.bodies, seen=off_by, scale=self.scale, spread=OF_MODEL
        ).parts()

        def value_of(value: Value, more: tuple[int, int]) -> Value:
            return dataclasses.replace(value, keep_more=more[0], offload_more=more[1])

        problem = self.survey.problem(budget, host, everywhere)
        bodies = tuple(
            dataclasses.replace(
                body,
                values=tuple(map(value_of, body.values, stored[body.name])),
            )
            if stored
            else body
            for body in problem.bodies
        )
        return dataclasses.replace(problem, bodies=bodies)

    @property
    def _of_prediction(self) -> Correction:
        # Copies of this share `compiled`: it may have grown by what they learned.
        if self._learned is None or self._learned.seen.keys() != self.compiled.keys():
            self._learned = Correction(
                bodies=self.survey.bodies,
                seen={d: self.compiled[d] - self.predicted(d) for d in self.compiled},
                scale=self.scale,
                spread=OF_PREDICTION,
            )
        return self._learned


Stalls = dict[tuple[str, int], float]
"""Seconds per run of a body, by its name and the value's number."""


def stalled(problem: Problem, stalls: Stalls) -> Problem:
    """The problem with what was waited for on the price of offloading each value.

    What no program has offloaded yet is charged with half of what its like were, byte
    for byte: where the link itself was full, it would be waited for as well.
    """
    if not stalls:
        return problem

    def body_of(body: Body) -> Body:
        seen = {i: s for (name, i), s in stalls.items() if name == body.name}
        moved = sum(body.values[i].bytes for i in seen)
        suspected = _SUSPECTED * sum(seen.values()) / moved if moved else 0.0
        values = tuple(
            dataclasses.replace(
                value,
                offload_seconds=value.offload_seconds
                + seen.get(value.index, suspected * value.bytes),
            )
            for value in body.values
        )
        return dataclasses.replace(body, values=values)

    return dataclasses.replace(problem, bodies=tuple(map(body_of, problem.bodies)))


def stalls_of(
    survey: Survey, decisions: Decisions, expected: Evaluation, inspection: Any
) -> Stalls:
    """What a compiled program waited for beyond the model, by the value that moved.

    Shared out by what each one's own copies were waited for. Copies without
    a name (weights, gradients, those that XLA renamed) count for all that moves, byte
    for byte.

    **Arguments:** `expected` is the model's own opinion, without stalls.
    """
    moving = {
        (body.name, value.index): (value, body.count)
        for body, chosen in zip(survey.bodies, decisions, strict=True)
        for value, decision in zip(body.values, chosen, strict=True)
        if decision == "offload"
    }
    waits = {
        key: sum(
            transfer.exposed_seconds
            for scope in _scopes(survey, *key)
            for transfer in transfers_named(inspection, scope)
        )
        for key in moving
    }
    total = inspection.timeline.exposed_seconds
    surprise = total - expected.exposed_seconds - expected.host_seconds
    if surprise <= 0.0 or total <= 0.0:
        return dict.fromkeys(waits, 0.0)
    everything = sum(value.bytes * count for value, count in moving.values())
    rest = max(0.0, total - sum(waits.values()))
    return {
        key: surprise / total * (waits[key] / count + rest * value.bytes / everything)
        for key, (value, count) in moving.items()
    }


def _scopes(survey: Survey, body: str, number: int) -> list[str]:
    """The named scopes that copies of one value stand under."""
    state = survey.state
    if state is None or body != state.body.name:
        return [f"stowax.offload.{body}.{number}", f"stowax.fetch.{body}.{number}"]
    leaves = state.leaves[number]
    return [f"stowax.{what}.{i}" for what in ("state", "gradient") for i in leaves]
