"""Decisions fill the budget: what there is room for stays on the device."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import stowax
from stowax._layers._rewrite import Options
from stowax._planner import smallest
from stowax._search._lessons import Lessons
from stowax._search._loop import MOST_COMPILES, Search
from stowax._step._trace import trace_step
from stowax._survey._options import wants_row_major
from stowax._survey._preferences import Preferences
from stowax._survey._survey import take_survey
from stowax._target import _target

pytestmark = [pytest.mark.usefixtures("usual_promotion")]
LAYERS, WIDTH = 4, 4096
MATRIX = WIDTH * WIDTH * 4

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


@stowax.stow
def loss_fn(params, x):
    loss = jnp.mean((forward(params, x) - x) ** 2)
    return loss + 0.001 * sum(jnp.sum(w**2) for w in params)


def forward(params, x):
    for w in params:
        x = gelu(x @ w)
    return x


def train_step(params, state, x):
    grads = jax.grad(loss_fn)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def searching(budget, **pin):
    """A search on an h200 for the step with its layers rolled."""
    pytest.importorskip("jax_plugins")
    target = _target.target("h200")
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = [matrix] * LAYERS
    specs = target.specs(params, jax.eval_shape(optimizer.init, params), matrix)
    options = Options(row_major=wants_row_major(target, specs))
    traced = trace_step(train_step, specs, options)
    survey = take_survey(train_step, specs, traced, target, options)
    bodies = Preferences(pin=pin).narrow(survey.bodies)
    return Search(
        survey=dataclasses.replace(survey, bodies=bodies),
        free=survey,
        budget=budget,
        host_budget=2**40,
        user_options={},
        donate=None,
        as_written=False,
        say=lambda line: None,
    )


@pytest.mark.slow
def test_parameters_stay_where_there_is_room_for_them():
    # Parameters, their gradients once as they come and once with the decay, the batch;
    # and a layer's input for each layer, or an array less.
    budget = (3 * LAYERS + 1 + LAYERS) * MATRIX
    search = searching(budget, **{"optimizer state": "offload"})
    search.plan()
    best = search.best()
    assert best.fits(budget, 2**40)
    assert best.decisions is not None
    state, layers = search.survey.bodies[0], best.decisions[0]
    kept = {v.role for v, d in zip(state.values, layers, strict=True) if d == "keep"}
    assert kept == {"parameter"}
    assert len(search.attempts) <= 4


def test_what_larger_programs_taught_does_not_hide_the_least():
    search = searching(2**20)
    least = search.forecast.predicted(search.needing_least().decisions)
    # As if all that is offloaded had taken as much again, and all that is kept half.
    search.lessons = Lessons(
        stored={
            body.name: [(-v.bytes // 2, body.count * v.bytes) for v in body.values]
            for body in search.survey.bodies
        }
    )
    misled = smallest(search.problem(), time_limit_seconds=10).decisions
    assert search.forecast.predicted(misled) > least
    assert search.forecast.predicted(search.needing_least().decisions) == least


def test_the_last_compile_for_the_least_may_be_left_to_another_form():
    search = searching(2**20)
    search.log = [None] * (MOST_COMPILES - 1)
    search.plan(least_last=False)
    assert not search.attempts
    search.plan()
    assert [a.decisions for a in search.attempts] == [search.needing_least().decisions]


@pytest.mark.slow
@pytest.mark.parametrize(("fits", "compiled"), [(True, 0), (False, 1)])
def test_a_compile_is_spared_once_something_fits(fits, compiled, monkeypatch):
    search = searching(4 * LAYERS * MATRIX)
    search.plan()
    earlier = search.best()
    assert search.fits(earlier)
    search.log = [None] * (MOST_COMPILES - 1)
    search.attempts = [earlier]
    # As if there were always something new and better to compile.
    monkeypatch.setattr(Search, "_known", lambda self, decisions: False)
    monkeypatch.setattr(Search, "_worth_it", lambda self, solution: True)
    monkeypatch.setattr(Search, "fits", lambda self, attempt: fits)
    search.plan(spare=1)
    assert len(search.attempts) == 1 + compiled
    search.plan()
    assert len(search.attempts) == 2  # of four programs in all


def test_what_programs_need_of_the_host_beyond_the_model_is_left_free():
    search = searching(4 * LAYERS * MATRIX)
    search.host_budget = 4 * LAYERS * MATRIX
    assert search.problem().host_bytes == search.host_budget
    search.attempts = [
        types.SimpleNamespace(
            evaluation=types.SimpleNamespace(host_bytes=LAYERS * MATRIX),
            measured=types.SimpleNamespace(host_bytes=(LAYERS + more) * MATRIX),
        )
        for more in (-1, 2, 1)
    ]
    assert search.problem().host_bytes == search.host_budget - 2 * MATRIX


def test_what_takes_too_much_of_the_host_is_not_proposed_again():
    search = searching((3 * LAYERS + 1) * MATRIX)
    first = search.settle()
    assert first.outcome == "optimal"
    search.host_budget = first.evaluation.host_bytes - 1
    # Nothing else has room on the device: what needs the least of it is all there is.
    assert search.settle().outcome == "infeasible"
