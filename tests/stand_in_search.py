"""A search with a compiler made up, for tests of what `improve` does with it.

Seconds are the model's and what each test adds to them. Solver, model and proposals are
real.
"""

import dataclasses
import types

from planner_problems import chain, problem
from stowax._planner import evaluate, solve
from stowax._search._attempt import Attempt
from stowax._search._charges import charged, charges_of
from stowax._search._forms import Found
from stowax._search._improve import improve
from stowax._survey._options import overlap_options

TPU = types.SimpleNamespace(platform="tpu", chip=types.SimpleNamespace(key="v5p"))
SET = {**overlap_options(TPU), "mine": "yes"}


@dataclasses.dataclass
class Search:
    """What `improve` needs of a `_loop.Search`, with a compiler made up."""

    question: object
    waits: dict[int, float] = dataclasses.field(default_factory=dict)
    factor: object = lambda options: 1.0
    user_options: dict = dataclasses.field(default_factory=lambda: {"mine": "yes"})
    attempts: list = dataclasses.field(default_factory=list)
    charges: dict = dataclasses.field(default_factory=dict)
    said: list = dataclasses.field(default_factory=list)
    vanished: object = lambda decisions: ()

    def __post_init__(self):
        self.log, self.say = self.attempts, self.said.append
        self.budget = self.question.device_bytes
        self.host_budget = self.question.host_bytes
        self.survey = types.SimpleNamespace(
            bodies=self.question.bodies,
            state=None,
            target=TPU,
        )
        self.forecast = types.SimpleNamespace(
            known=lambda d, caution: evaluate(self.question, d).device_bytes
        )

    def problem(self):
        return charged(self.question, self.charges)

    def settle(self):
        return solve(self.problem())

    def options_for(self, decisions):
        return dict(SET)

    def fits(self, attempt):
        return attempt.measured.compiled_bytes <= self.budget

    def best(self):
        fitting = filter(self.fits, self.attempts)
        return min(fitting, key=lambda a: a.measured.step_seconds)

    def plan(self):
        self.compile(self.settle(), 4)

    def compile(self, solution, most, options=None):
        options = SET if options is None else options
        found = evaluate(self.question, solution.decisions)
        (body,), (chosen,) = self.question.bodies, solution.decisions
        waits = {
            i: body.count * self.waits.get(i, 0.0)
            for i, decision in enumerate(chosen)
            if decision == "offload"
        }
        exposed = found.exposed_seconds + sum(waits.values())
        inspection = types.SimpleNamespace(
            timeline=types.SimpleNamespace(
                exposed_seconds=exposed,
                step_seconds=found.seconds + sum(waits.values()),
            ),
            transfers=[
                types.SimpleNamespace(
                    op_name=f"stowax.offload.{body.name}.{i}",
                    direction="device-to-host",
                    exposed_seconds=seconds,
                )
                for i, seconds in waits.items()
            ],
        )
        seconds = (found.seconds + sum(waits.values())) * self.factor(options)
        attempt = Attempt(
            decisions=solution.decisions,
            solution=solution,
            evaluation=found,
            options=options,
            donated=True,
            measured=types.SimpleNamespace(
                compiled_bytes=found.device_bytes,
                step_seconds=seconds,
                excess=0,
                inspection=inspection,
                vanished=self.vanished(solution.decisions),
                not_on_host=(),
            ),
        )
        self.attempts.append(attempt)
        moved = charges_of(self.survey, solution.decisions, found, inspection)
        self.charges.update(moved)
        return attempt


# Three values of 8 bytes of which one can be kept; the link carries one for nothing.
QUESTION = problem(
    chain(count=10, bytes=8, needed=(1, 2, 3), forward_seconds=3.0), device_bytes=250
)


def improved(search, most):
    search.compile(search.settle(), 4)
    found = Found(search=search, best=search.best(), rolled=search)
    return improve(found, most)


def offloaded(attempt):
    return [i for i, d in enumerate(attempt.decisions[0]) if d == "offload"]
