"""A search whose compiler is made up: solver, models and proposals are real.

Programs need what the planner's model says, times `size`, and take its seconds and what
their copies are waited for, times `factor`.
"""

import dataclasses
import types

from planner_problems import problem
from stowax._planner import evaluate
from stowax._records._stages import Options, Point
from stowax._search import _loop, _space
from stowax._search._correction import Memory
from stowax._search._loop import Search
from stowax._search._space import Space
from stowax._survey._preferences import Preferences
from stowax._trial._compiled import Measured

TPU = types.SimpleNamespace(
    platform="tpu", device_count=1, chip=types.SimpleNamespace(key="v5p")
)
GPU = types.SimpleNamespace(
    platform="gpu", device_count=1, chip=types.SimpleNamespace(key="h200")
)


def surveyed(*bodies, rate=8.0, target=GPU):
    """What a search needs of a survey."""

    def asked(device, host, more=0):
        point = Point(reserved_bytes=more, live=(0, 1, 2, 3))
        return problem(
            *(dataclasses.replace(body, points=(point,)) for body in bodies),
            device_bytes=device,
            host_bytes=host,
            rate=rate,
            loss_reserved_bytes=more,
        )

    return types.SimpleNamespace(
        bodies=bodies,
        problem=asked,
        target=target,
        tight=False,
        donates=True,
        state=None,
        refused=(),
        reserved_bytes=0,
        step=types.SimpleNamespace(stacks={}, donate=()),
        step_plan=lambda decisions: decisions,
        options=Options(),
    )


class Predicted(Memory):
    """Predictions say what the planner's model does."""

    def predicted(self, decisions):
        asked = self.survey.problem(self.scale, 10**12)
        found = evaluate(asked, decisions)
        self.predictions[decisions] = found.device_bytes, found.host_bytes
        return found.device_bytes


def asked_for(**wishes):
    """What a search needs of what `plan` was asked."""
    known = {
        "host_budget": 10**12,
        "compiler_options": {"mine": "yes"},
        "compiles": None,
        "roll": True,
        "donate": None,
        "donates": None,
        "first": False,
        "written": {},
        "machine": GPU,
        "cache": None,
        "said": [],
        "given_bytes": 0,
    }
    asked = types.SimpleNamespace(**known | wishes)
    asked.say = asked.said.append
    return asked


def space(survey, budget, asked, memory=Predicted):
    """A variant of which nothing is known."""
    return Space(
        name="rolled",
        asked=asked,
        survey=survey,
        free=survey,
        preferences=Preferences(pin={}),
        memory=memory(survey=survey, scale=budget),
    )


@dataclasses.dataclass
class Compiler:
    """Stands in for `compile_and_read`; `refuses` raises what it wants to."""

    question: object
    waits: dict = dataclasses.field(default_factory=dict)
    size: float = 1.0
    host: float = 1.0
    factor: object = lambda options: 1.0
    refuses: object = lambda decisions, options: None
    plain: tuple = (10**12, 1.0)
    compiled: list = dataclasses.field(default_factory=list)

    def __call__(self, survey, what, decisions, options, *, correction=0, **_):
        self.compiled.append((decisions, dict(options)))
        self.refuses(decisions, options)
        if decisions is None:
            size, seconds = self.plain
            return self.measured(size, seconds, correction, 0.0, [], 0)
        found = evaluate(self.question, decisions)
        (body,), (chosen,) = self.question.bodies, decisions
        waits = {
            i: body.count * self.waits.get(i, 0.0)
            for i, decision in enumerate(chosen)
            if decision == "offload"
        }
        copies = [
            types.SimpleNamespace(
                op_name=f"stowax.offload.{body.name}.{i}",
                direction="device-to-host",
                exposed_seconds=seconds,
            )
            for i, seconds in waits.items()
        ]
        waited = sum(waits.values())
        seconds = (found.seconds + waited) * self.factor(options)
        size = int(found.device_bytes * self.size)
        exposed = found.exposed_seconds + waited
        host = int(self.host * found.host_bytes)
        return self.measured(size, seconds, found.device_bytes, exposed, copies, host)

    def measured(self, size, seconds, predicted, exposed, copies, host):
        trial = types.SimpleNamespace(
            predicted_bytes=predicted,
            compiled_bytes=size,
            host_bytes=host,
            seconds_to_compile=0.0,
        )
        device = types.SimpleNamespace(argument=0)
        inspection = types.SimpleNamespace(
            timeline=types.SimpleNamespace(
                exposed_seconds=exposed, step_seconds=seconds
            ),
            memory=types.SimpleNamespace(device=device),
            transfers=copies,
        )
        return Measured(trial=trial, inspection=inspection)


def searching(monkeypatch, body, budget, *, target=GPU, may_stay=False, **made_up):
    """A search for `body` under a budget, and its compiler."""
    told = "compiles", "first", "written", "host_budget"
    wishes = {n: made_up.pop(n) for n in told if n in made_up}
    asked = asked_for(machine=target, **wishes)
    survey = surveyed(body, target=target)
    question = survey.problem(budget, asked.host_budget)
    compiler = Compiler(question, **made_up)
    monkeypatch.setattr(_loop, "compile_and_read", compiler)
    monkeypatch.setattr(_space, "compile_and_read", compiler)
    monkeypatch.setattr(_loop, "WHERE_NOTHING_FITS", ())
    monkeypatch.setattr(_loop, "BESIDE", ())
    monkeypatch.setattr(_loop, "asks_for_more", lambda space: not may_stay)
    monkeypatch.setattr(_loop, "plain_bytes", lambda space, donate: compiler.plain[0])
    search = Search(
        asked=asked, budget=budget, rolled=space(survey, budget, asked), unopened=[]
    )
    return search, compiler


def offloaded(attempt):
    """The values that an attempt offloads."""
    return [i for i, d in enumerate(attempt.decisions[0]) if d == "offload"]
