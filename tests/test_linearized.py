"""A body is split into its two programs once per survey, and comes out the same.

Plans are looked for by tracing the step again and again; what is the same in every
trace is not made again. Programs that run never take part in that.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from layered import LAYERS, WEIGHTS, X, gradient_step, layer, run_layers
from planned_steps import offload_inputs, recompute_all
from stowax._jaxprs._jaxpr import evaluate, trace
from stowax._layers import _linearize
from stowax._records._stages import Options
from stowax._step._trace import store_all, trace_step
from stowax._survey._apply import StackPlan, StepPlan, apply_decisions
from stowax._survey._take import take_survey


@pytest.fixture
def split(monkeypatch):
    """The bodies that were split, by how many inputs are differentiated."""
    numbers = []
    original = _linearize.linearize_body

    def counting(body, active, *others):
        numbers.append(len(active))
        return original(body, active, *others)

    monkeypatch.setattr(_linearize, "linearize_body", counting)
    return numbers


def loss(weights, x):
    return jnp.mean(run_layers(layer, x, weights))


def by_weights_and_by_inputs(weights, x):
    """The same layers twice, differentiated by other things each time."""
    marked = stowax.stow(loss)
    return jax.grad(marked)(weights, x), jax.grad(marked, argnums=1)(weights, x)


def plans_of(step):
    """Step plans for three ways of storing, for the survey they belong to."""
    return [
        StepPlan(
            stacks={
                name: StackPlan(
                    fingerprint=traced.body.forward.fingerprint,
                    stored=choose(traced.stack, traced.body),
                )
                for name, traced in step.stacks.items()
            }
        )
        for choose in (store_all, recompute_all, offload_inputs)
    ]


@pytest.mark.parametrize(
    ("function", "bodies"), [(gradient_step(loss), 1), (by_weights_and_by_inputs, 2)]
)
def test_every_program_of_a_survey_is_the_one_of_a_first_trace(function, bodies, split):
    target, options = stowax.target("h200"), Options()
    step = trace_step(function, (WEIGHTS, X), options)
    plans = plans_of(step)

    def text(survey, plan):
        return str(survey.lower(plan).compiler_ir())

    def survey():
        return take_survey(function, (WEIGHTS, X), step, target, options)

    mine = survey()
    assert {len(k) for k in (step.stacks, step.linearized)} == {bodies}
    split.clear()
    programs = [text(mine, plan) for plan in plans]
    assert not split
    assert len(set(programs)) == len(plans)
    for plan, program in zip(plans, programs, strict=True):
        other = survey()
        step.linearized.clear()
        split.clear()
        assert text(other, plan) == program
        assert len(split) == bodies


def test_a_program_that_runs_reads_its_own_constants(split):
    """Two closures with the same text: what was split for one is not run for both."""

    def scaled(scales):
        @jax.custom_jvp
        def times(x):
            return x * scales

        times.defjvp(lambda primal, dot: (times(*primal), dot[0] * scales))
        return gradient_step(
            lambda w, x: jnp.mean(run_layers(lambda x, p: times(layer(x, p)), x, w))
        )

    for scale in (1.0, 3.0):
        step = scaled(np.full(X.shape, scale, np.float32))
        plan = plans_of(trace_step(step, (WEIGHTS, X), Options()))[0]
        split.clear()
        got = apply_decisions(step, plan, Options())(WEIGHTS, X)
        assert len(split) == 1
        wanted = jax.jit(step)(WEIGHTS, X)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted
        )


def test_a_body_that_holds_a_value_of_a_trace_is_not_known_to_the_next(split):
    known = {}
    linearize = _linearize.linearizer(False, known)

    @jax.jit
    def outer(scale, x):
        body = trace(lambda x: [x * scale], x)
        held = linearize(body, (0,), (0, 1), 0)
        return evaluate(held.forward.jaxpr, [x])[0]

    for scale in (2.0, 5.0):
        rows = X[: LAYERS - 1] if scale == 2.0 else X
        np.testing.assert_array_equal(outer(scale, rows), rows * scale)
    assert not known
    assert len(split) == 2
