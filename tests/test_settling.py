"""Decisions fill the budget: what there is room for stays on the device."""

import jax
import jax.numpy as jnp
import optax
import pytest

import stowax
from planner_problems import chain, operation, value
from stand_in_search import Predicted, searching
from stowax._planner import solve
from stowax._records._stages import Point
from stowax._search import _loop

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


@pytest.mark.slow
def test_parameters_stay_where_there_is_room_for_them():
    pytest.importorskip("jax_plugins")
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = [matrix] * LAYERS
    # Parameters, their gradients once as they come and once with the decay, the batch;
    # and a layer's input for each layer, or an array less.
    budget = (3 * LAYERS + 1 + LAYERS) * MATRIX
    found = stowax.plan(
        train_step,
        params,
        jax.eval_shape(optimizer.init, params),
        matrix,
        target="h200",
        budget=budget,
        pin={"optimizer state": "offload"},
        compiles=4,
        progress=False,
    )
    assert found.fits
    kept = {d.role for d in found.decisions if d.decision == "keep"}
    moved = {d.role for d in found.decisions if d.decision == "offload"}
    assert "parameter" in kept
    assert "parameter" not in moved
    assert len(found.search.trials) <= 4


# --- how often a program is lowered for it --------------------------------------------


def long_chain(count=24):
    """Values of many sizes, each made from the one before: a budget can be filled."""
    sizes = [8 + (7 * i * i) % 23 for i in range(count)]
    seconds = [0.5 + (5 * i * i) % 13 / 10 for i in range(count)]
    values = [value(0, needed=True)]
    values += [
        value(i + 1, bytes=size, operation=i, needed=True)
        for i, size in enumerate(sizes)
    ]
    return chain(
        values=tuple(values),
        operations=tuple(
            operation(i, (i,), (i + 1,), s) for i, s in enumerate(seconds)
        ),
        points=(Point(reserved_bytes=0, live=tuple(range(count + 1))),),
    )


@pytest.fixture
def settling(monkeypatch):
    """What settles for a budget where programs need `more` than the model says."""

    def settled(budget, more, **known):
        class Off(Predicted):
            def predicted(self, decisions):
                return super().predicted(decisions) + more

        search, _ = searching(monkeypatch, long_chain(), budget)
        space = search.rolled
        space.memory = Off(survey=space.survey, scale=budget)
        return search.propose.settled(space, 0.0, **known), space

    return settled


@pytest.mark.quick("0-1-1000", "0-1-1500", "0-1-2500", "300-4-1500")
@pytest.mark.parametrize("budget", [1000, 1500, 2500])
@pytest.mark.parametrize(("more", "most"), [(0, 1), (300, 4)])
def test_few_programs_are_lowered_and_little_is_left(settling, budget, more, most):
    proposal, space = settling(budget, more)
    assert proposal.bytes <= budget
    assert len(space.proposed) <= most
    best = solve(space.survey.problem(budget - more, 10**12)).evaluation.seconds
    assert proposal.seconds <= 1.02 * best


def test_a_model_that_believes_nothing_fits_is_not_the_last_word(settling):
    """Programs need less than it says: there is room for more than the least."""
    proposal, space = settling(45, -30)
    assert any(s.outcome == "infeasible" for s in space.proposed.values())
    least = min(s.evaluation.device_bytes for s in space.proposed.values())
    assert least - 30 < proposal.bytes <= 45


@pytest.mark.slow
def test_a_variant_that_another_beats_costs_one_prediction(settling):
    free, space = settling(1000, 300)
    assert len(space.proposed) > 1
    _, space = settling(1000, 300, beaten=free.seconds / 2)
    assert len(space.proposed) == 1
    again, space = settling(1000, 300, beaten=2 * free.seconds)
    assert again.decisions == free.decisions


def test_what_fits_by_its_prediction_is_compiled_whatever_others_needed(monkeypatch):
    """None is expected to fit: those that were too big say it of all. One does."""
    budget = 1000
    monkeypatch.setattr(_loop.Search, "_fastest", lambda search, spaces, caution: None)
    search, compiler = searching(monkeypatch, long_chain(), budget)
    space = search.rolled
    least = search.propose.least(space).bytes
    known = [solve(space.problem(room)) for room in (budget, least + 20)]
    space.proposed.update({solution.decisions: solution for solution in known})
    _, good = (solution.decisions for solution in known)

    def compiled(survey, what, decisions, options, **told):
        found = compiler(survey, what, decisions, options, **told)
        if decisions != good:
            found.trial.compiled_bytes = 3 * budget
        return found

    monkeypatch.setattr(_loop, "compile_and_read", compiled)
    best = search.run()
    assert best.decisions == good
    assert search.fits(best)
