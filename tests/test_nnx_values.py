"""NNX's variables where they are values: under a `jax.jit` of the script's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stowax
from stowax._errors import StepError
from stowax._step._recording import _name

pytestmark = pytest.mark.usefixtures("usual_promotion")

WIDTH = 64
jit = functools.partial(stowax.jit, progress=False, budget="100%")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(self.layer(x))


def batch():
    return jnp.asarray(np.random.default_rng(0).normal(size=(128, WIDTH)), jnp.float32)


def in_place(model, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
    nnx.update(model, new)
    return loss


def functional():
    definition, state = nnx.split(Model(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(definition, state)
        loss = in_place(model, x)
        return nnx.state(model), loss

    return step, state


def test_state_that_is_returned_is_returned_once():
    step, state = functional()
    plain = jax.jit(step, donate_argnums=0)
    planned = jit(plain)
    given = jax.tree.map(jnp.copy, state)
    _, loss = planned(given, batch())
    results = jax.tree.leaves(planned.lower(state, batch()).out_info)
    assert len(results) == len(jax.tree.leaves(plain.eval_shape(state, batch())))
    np.testing.assert_allclose(loss, plain(state, batch())[1], rtol=1e-6)


@pytest.mark.parametrize("jitted", [jax.jit, nnx.jit])
def test_a_state_that_was_given_is_what_its_own_jit_leaves(jitted):
    """`nnx.jit` writes into the variables of a state, `jax.jit` does not."""

    def step(state, x):
        loss, grads = jax.value_and_grad(
            lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2)
        )(state["layer"]["kernel"][...])
        state["calls"][...] += 1
        return grads, loss

    _, expected = functional()
    _, state = functional()
    for _ in range(2):
        jitted(step)(expected, batch())
        jit(jitted(step))(state, batch())
    assert float(state["calls"][...]) == float(expected["calls"][...])
    assert float(expected["calls"][...]) == (2 if jitted is nnx.jit else 0)


def test_jax_jit_changes_no_module_of_the_callers():
    model = Model(nnx.Rngs(0))

    def step(model, x):
        loss, grads = jax.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        model.calls[...] += 1
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), loss

    expected, _ = jax.jit(step)(model, batch())
    new, _ = jit(jax.jit(step))(model, batch())
    assert float(model.calls[...]) == 0
    jax.tree.map(np.testing.assert_allclose, new, expected)


def test_a_module_whose_training_jax_jit_would_lose_is_refused():
    with pytest.raises(
        StepError, match=r"under jax\.jit such a change is lost"
    ) as lost:
        jit(jax.jit(in_place))(Model(nnx.Rngs(0)), batch())
    assert "comes back from nnx.jit, and from stowax.jit without" in str(lost.value)
    for trains in (jit(nnx.jit(in_place)), jit(in_place)):  # as the message says
        model = Model(nnx.Rngs(0))
        first = trains(model, batch())
        assert float(trains(model, batch())) < float(first)


def test_a_recording_is_called_what_the_user_wrote():
    """Also where `nnx.jit` wraps a partial."""

    def train_step(w, x, scale):
        return jnp.sum(w @ x) * scale

    inner = nnx.jit(functools.partial(train_step, scale=2.0)).jitted_fn.__wrapped__
    assert not hasattr(inner, "__qualname__")

    assert _name(inner).rpartition(".")[2] == "train_step"


@pytest.mark.parametrize(
    "parts", ["dropout", pytest.param("dropout norm", marks=pytest.mark.slow)]
)
def test_a_model_that_nnx_jit_hands_back_is_given_away(parts):
    """Its counters and statistics come back in a group of results, too."""

    class Parts(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.back = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if "norm" in parts else None
            self.drop = nnx.Dropout(0.1, rngs=rngs) if "dropout" in parts else None

        def __call__(self, x):
            x = self.back(jnp.tanh(self.layer(x)))
            x = self.norm(x) if self.norm else x
            return self.drop(x) if self.drop else x

    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    model = Parts(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with stowax.planning(target="h200", budget="75%", progress=False) as session:
        # `nnx.jit` calls `jax.jit`'s function with the states of its arguments.
        nnx.jit(train_step)(model, optimizer, batch()[:8])
    assert session.plans["train_step"].program.donate_argnums == (0, 1)


@pytest.mark.slow
def test_specs_of_objects_have_the_planned_memory():
    """And the objects keep their arrays: specs are others, of the same kind."""

    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def made():
        model = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    objects = nnx.eval_shape(made)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    plan = stowax.plan(
        nnx.jit(step),
        *objects,
        x,
        target="h200",
        budget="1GiB",
        pin={"optimizer state": "offload"},
        progress=False,
    )
    specs = plan.specs(*objects, x)
    moments = specs[1].opt_state[0].mu["kernel"].get_value()
    assert moments.sharding.memory_kind == "pinned_host"
    assert specs[0].kernel.get_value().sharding.memory_kind == "device"
    assert objects[1].opt_state[0].mu["kernel"].get_value().sharding is None
    compiled = stowax.target("h200").compile(plan.apply(nnx.jit(step)), *specs)
    assert stowax.inspect(compiled).memory.host.total >= 2 * 4 * 1024**2
