"""Nothing is traced, lowered or predicted twice for one plan."""

import collections

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import spec
from stowax._records._stages import Options
from stowax._survey import _programs
from stowax._survey._survey import Survey, lowered, predict


def train_step(weights, x):
    def loss(weights):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


@pytest.fixture
def made(monkeypatch):
    """How often each program was lowered for its prediction, and each way was read."""
    seen, lower, trace = collections.Counter(), Survey.lower, _programs.trace_step

    def lowering(survey, plan, *, donate=True, label=False):
        if not label:
            how = survey.options if plan is not None else None
            seen[str((plan, how, donate and survey.donates))] += 1
        return lower(survey, plan, donate=donate, label=label)

    def tracing(recording, specs, options):
        seen[options] += 1
        return trace(recording, specs, options)

    monkeypatch.setattr(Survey, "lower", lowering)
    monkeypatch.setattr(_programs, "trace_step", tracing)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60%", "1500KiB"])
def test_the_step_is_read_once_in_each_way(made, budget):
    lines = []
    found = stowax.plan(
        train_step,
        spec(6, 128, 128),
        spec(256, 128),
        target="h200",
        budget=budget,
        progress=lines.append,
    )
    assert found.decisions
    ways = {what: count for what, count in made.items() if isinstance(what, Options)}
    assert set(ways.values()) == {1}
    assert sum("surveying" in line for line in lines) == 1
    # What is compiled is lowered anew, unless it was the last that was predicted.
    programs = [count for what, count in made.items() if not isinstance(what, Options)]
    again = sum(programs) - len(programs)
    assert again < len(found.search.trials)


class Step:
    """What `predict` and `lowered` ask of a survey."""

    options, donates, target = Options(), True, None

    def __init__(self):
        self.programs, self.lowerings = _programs.Programs(), []

    def lower(self, plan, *, donate):
        self.lowerings.append((plan, donate))
        return f"lowered {len(self.lowerings)}"


def test_programs_are_told_apart_by_plan_donation_and_how_the_step_is_read():
    step = Step()
    for number, (plan, donate) in enumerate([("a", True), ("b", True), ("b", False)]):
        assert lowered(step, plan, donate=donate) == f"lowered {number + 1}"
        assert lowered(step, plan, donate=donate) == f"lowered {number + 1}"
    step.donates = False  # then nobody donates
    assert lowered(step, "b") == "lowered 3"
    step.options = Options(segments=True)
    assert lowered(step, "b") == "lowered 4"
    assert step.lowerings[-1] == ("b", True)


def test_what_was_predicted_is_known_for_the_step_as_written_however_it_is_read():
    step = Step()
    step.programs.predicted = [((None, None, True), 1), (("a", Options(), True), 2)]
    assert predict(step, "a") == 2
    assert predict(step, None) == 1
    step.options = Options(roll=False)
    assert predict(step, None) == 1
    assert step.programs.prediction(("a", step.options, True)) is None
