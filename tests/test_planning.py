"""Unchanged scripts under a budget: `stowax.planning`."""

import functools
import re
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stowax
from stowax._errors import ArgumentError, MisfitError

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH, ROWS = 6, 256, 512
planning = functools.partial(stowax.planning, target="h200", progress=False)


def weights():
    draw = np.random.default_rng(0).normal
    return jnp.asarray(0.05 * draw(size=(LAYERS, WIDTH, WIDTH)), jnp.float32)


def batch(seed=1):
    draw = np.random.default_rng(seed).normal
    return jnp.asarray(draw(size=(ROWS, WIDTH)), jnp.float32)


def loss_of(params, x):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


TX = optax.adam(1e-3)


def script(steps=4):
    """A training script: steps, an evaluation between them, and what it printed."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = TX.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def evaluate(params, state, x):
        norms = jax.tree.map(lambda a: jnp.sum(jnp.abs(a)), state)
        return loss_of(params, x), norms

    params, found = weights(), []
    state = TX.init(params)
    for seed in range(steps):
        params, state, loss = train_step(params, state, batch(seed))
        found += [
            float(loss),
            *map(float, jax.tree.leaves(evaluate(params, state, batch(9)))),
        ]
    return found


@pytest.mark.slow
def test_a_script_is_planned_and_computes_the_same():
    expected, real = script(), jax.jit
    pin = {"optimizer state": "offload"}
    with planning(budget="60%", pin=pin) as session:
        assert jax.jit is not real
        found = script()
    assert jax.jit is real
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert list(session.plans) == ["train_step"]
    plan = session.plans["train_step"]
    assert plan.fits
    assert plan.program.donate_argnums == (0, 1)
    # What lies in host memory is brought to the device for `evaluate`.
    assert any(a.memory_kind == "pinned_host" for a in plan.program.arguments)
    assert session.notes == []


@pytest.mark.slow
def test_a_frameworks_own_jit():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def train():
        @nnx.jit
        def train_step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
            optimizer.update(model, grads)
            return loss

        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return [float(train_step(model, optimizer, batch(seed))) for seed in range(3)]

    expected = train()
    with planning(budget="70%") as session:
        found = train()
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert list(session.plans) == ["train_step"]
    assert {d.decision for d in session.plans["train_step"].decisions} != {"keep"}


def test_a_step_that_cannot_be_planned_runs_as_it_is_written():
    def train():
        @jax.jit
        def sensitivity(params, x):
            grads = jax.grad(loss_of)(params, x)
            return jax.lax.stop_gradient(x).sum(), jnp.zeros_like(grads)

        return float(sensitivity(weights(), batch())[0])

    expected = train()
    with planning() as session:
        assert train() == expected
    (note,) = session.notes
    assert note.startswith("sensitivity runs as it is written: step: its gradients")


@pytest.mark.quick("learns0")
@pytest.mark.parametrize("learns", [(True, False, True), (False, True, False)])
def test_what_one_kind_of_call_cannot_have_another_one_may(learns):
    """A flag turns learning off: those calls run as they are written, others do not."""

    def train():
        @functools.partial(jax.jit, static_argnames="learn")
        def step(params, x, learn):
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            return (params - 0.1 * grads if learn else jnp.zeros_like(grads)), loss

        params, found = weights(), []
        for learn in learns:
            params, loss = step(params, batch(), learn=learn)
            found.append(float(loss))
        return found

    expected = train()
    with planning() as session:
        np.testing.assert_allclose(train(), expected, rtol=1e-5)
    (note,) = session.notes
    assert note.startswith("step runs as it is written: step: its gradients")
    assert list(session.plans) == ["step"]


def test_steps_of_one_name_have_a_plan_each_and_one_that_is_made_again_has_one():
    def train(rows):
        @jax.jit
        def step(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

        step(jnp.ones((8, 8)), jnp.ones((rows, 8)))

    with planning() as session:
        [train(rows) for rows in (2, 4, 2)]
    assert list(session.plans) == ["step", "step 2"]


def test_jit_in_a_block_is_jit():
    with planning() as session:
        double = jax.jit(lambda x: 2 * x)
        assert float(double(2.0)) == 4.0
        assert jax.eval_shape(double, jnp.ones(3)).shape == (3,)
        assert float(jax.jit(lambda x: double(x) + 1)(2.0)) == 5.0
        assert float(jax.grad(lambda x: double(x) ** 2)(1.0)) == 8.0
        assert "module" in double.lower(1.0).as_text()
        assert jnp.arange(3).sum() == 3
    assert session.plans == {}


def test_what_wraps_a_jitted_function_is_another_function():
    def twice(function):
        @functools.wraps(function)
        def doubled(x):
            return 2 * function(x)

        return doubled

    x = jnp.arange(3.0)
    with stowax.planning(budget="1GiB", progress=False):
        cubes = jax.jit(lambda x: jnp.sum(x**3))
        np.testing.assert_allclose(jax.jit(jax.grad(cubes))(x), 3 * x**2)
        np.testing.assert_allclose(jax.jit(twice(cubes))(x), 18.0)
        value, gradient = jax.jit(jax.value_and_grad(twice(cubes)))(x)
        np.testing.assert_allclose(value, 18.0)
        np.testing.assert_allclose(gradient, 6 * x**2)


@pytest.mark.slow
def test_a_step_that_is_first_called_to_evaluate():
    """It differentiates only under another static value, and is planned then."""
    calls = []

    def run():
        @functools.partial(jax.jit, static_argnames="train")
        def step(params, x, train):
            calls.append(train)
            if not train:
                return params, loss_of(params, x)
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        params, found = weights(), []
        jax.eval_shape(functools.partial(step, train=True), params, batch())
        for train in (False, True, True, False):
            params, loss = step(params, batch(), train=train)
            found.append(float(loss))
        assert "module" in step.lower(params, batch(), train=True).as_text()
        return found

    expected = run()
    with planning(budget="70%", progress=False) as session:
        found = run()
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert list(session.plans) == ["step"]
    assert session.plans["step"].fits


def test_jit_by_another_name_is_replaced_and_given_back():
    module = types.ModuleType("a_users_module")
    module.jit, real = jax.jit, jax.jit
    sys.modules["a_users_module"] = module
    try:
        with planning():
            assert module.jit is jax.jit is not real
        assert module.jit is jax.jit is real
    finally:
        del sys.modules["a_users_module"]


def filtered(params, x):
    loss, grads = eqx.filter_value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.slow
def test_equinox_forgets_what_it_jitted_outside():
    def run():
        params = weights()
        params, first = eqx.filter_jit(filtered)(params, batch())
        return float(first), float(eqx.filter_jit(filtered)(params, batch())[1])

    expected = run()
    for _ in range(2):
        with planning(budget="80%", progress=False) as session:
            assert run() == pytest.approx(expected, rel=1e-4)
        assert list(session.plans) == ["filtered"]
    assert run() == expected


@pytest.mark.slow
def test_what_is_refused():
    real = jax.jit
    within = pytest.raises(ArgumentError, match=r"^planning: got a block within")
    with planning(), within, planning():
        pass
    named = pytest.raises(
        ArgumentError, match=r"^bugdet: got '1GiB'. Did you mean budget=\? Write one of"
    )
    with named, planning(bugdet="1GiB"):
        pass
    with planning(budget="64KiB"), pytest.raises(MisfitError):
        script()
    assert jax.jit is real


def test_a_step_of_scalars_does_not_stop_a_script():
    """Its share is less than any device has, and nothing can be saved of it."""

    def run():
        @jax.jit
        def inner_step(rate):
            return rate - 0.1 * jax.grad(lambda r: jnp.cos(r) * r)(rate)

        return [float(inner_step(jnp.float32(number))) for number in range(3)]

    expected = run()
    with planning(budget="30%") as session:
        assert run() == pytest.approx(expected, rel=1e-6)
    (note,) = session.notes
    assert re.fullmatch(
        r"inner_step runs as it is written: no plan keeps it within 30% of what it "
        r"takes, [\d.]+ K?i?B, but every device has that",
        note,
    )
    assert not session.refused
    step = stowax.jit(jax.grad(jnp.cos), budget="30%", target="h200", progress=False)
    with pytest.raises(MisfitError, match="budget") as caught:
        step(jnp.float32(1.0))
    assert not caught.value.plan.fits


def test_what_pmap_spreads_is_said_to_run_as_it_is_written():
    def spread_step(params, x):
        return params - 0.1 * jax.grad(loss_of)(params, x)

    expected = jax.pmap(spread_step)(weights()[None], batch()[None])
    with planning(budget="90%") as session:
        found = jax.pmap(spread_step)(weights()[None], batch()[None])
        jax.pmap(fun=functools.partial(spread_step))
        # Equinox asks for the type of what `jax.pmap` returns, when it is imported.
        importing = {"__name__": "equinox._module._module", "jax": jax}
        exec("type(jax.pmap(lambda x: x))", importing)
    np.testing.assert_array_equal(found, expected)
    (note,) = session.notes
    assert note.startswith("spread_step runs as it is written. It is a function of")
    assert jax.pmap.__code__.co_filename.startswith(jax.__path__[0])  # given back


@pytest.mark.slow
def test_a_plan_of_a_partial_function_is_called_what_the_function_is():
    def train_step(rate, params, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return params - rate * grads, loss

    with planning(budget="90%") as session:
        jax.jit(functools.partial(train_step, 0.1))(weights(), batch())
    assert list(session.plans) == ["train_step"]
    assert session.plans["train_step"].program.step.endswith("train_step")


def momentum_step(state, x):
    loss, grads = jax.value_and_grad(loss_of)(state["w"], x)
    moment = 0.9 * state["m"] + grads
    return {"w": state["w"] - 0.1 * moment, "m": moment}, loss


@pytest.mark.slow
def test_what_a_step_returned_is_overwritten_where_nothing_else_fits():
    params, x = weights(), batch()
    first = {"w": params, "m": jnp.zeros_like(params)}

    def script():
        with planning(budget="40%"):
            step = jax.jit(momentum_step)
            best, _ = step(first, x)
            step(best, x)
            jax.block_until_ready(best["w"] + 1)

    with pytest.raises(RuntimeError, match="deleted") as gone:
        script()
    # A script keeps what it began with, and the step's results are the step's.
    assert not any(a.is_deleted() for a in jax.tree.leaves(first))
    (note,) = [n for n in gone.value.__notes__ if n.startswith("stowax: ")]
    assert note.startswith("stowax: momentum_step does not fit unless what it returned")
    assert "write jax.jit(..., donate_argnums=()): then nothing is overwritten" in note


@pytest.mark.slow
def test_nothing_is_donated_where_a_script_says_so():
    params, x = weights(), batch()
    first = {"w": params, "m": jnp.zeros_like(params)}
    with planning(budget="40%") as session:
        step = jax.jit(momentum_step, donate_argnums=())
        with pytest.raises(MisfitError, match="smallest budget"):
            step(first, x)
    assert session.refused
    assert not any(a.is_deleted() for a in jax.tree.leaves(first))


def test_that_a_key_may_be_overwritten_is_no_reason_to_search_again():
    """It frees nothing: state that is made inside is no argument."""
    lines: list[str] = []

    def train(key):
        key, own = jax.random.split(key)
        weights = 0.1 * jax.random.normal(own, (6, 64, 64))
        loss, gradients = jax.value_and_grad(loss_of)(weights, jnp.ones((256, 64)))
        return key, weights - 0.1 * gradients, loss

    step = stowax.jit(train, budget="20%", progress=lines.append)
    with pytest.raises(MisfitError):
        step(jax.random.PRNGKey(0))
    surveys = [line for line in lines if line.startswith("surveying")]
    assert len(surveys) == len(set(surveys))  # no second search
