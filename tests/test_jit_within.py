"""A planned step as a part of something else: of another trace, of no program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stowax
from test_jit import arguments, train_step

pytestmark = pytest.mark.usefixtures("usual_promotion")
jit = functools.partial(stowax.jit, progress=False)


class Net(nnx.Module):
    def __init__(self):
        self.weights = nnx.Param(jnp.full((4, 16, 16), 0.1))

    def __call__(self, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        return jax.lax.scan(layer, x, self.weights[...])[0]


def update(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def trained(step, around):
    """What a model's weights are, and how many steps its optimizer counts."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    around(step)(model, optimizer, jnp.ones((8, 16)))
    return np.asarray(model.weights[...]), int(optimizer.step[...])


def nested(step):
    return nnx.jit(lambda *args: step(*args))


def twice(step):
    return nnx.jit(lambda *args: (step(*args), step(*args)))


def undone(step):
    def run(*args):
        with jax.disable_jit():
            return step(*args)

    return run


@pytest.mark.parametrize("around", [nested, twice, undone])
def test_objects_are_updated_where_the_step_is_traced_with_others(around):
    expected = trained(nnx.jit(update), around)
    assert expected[1] == (2 if around is twice else 1)
    for step in (jit(update), jit(nnx.jit(update))):
        got = trained(step, around)
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
        assert got[1] == expected[1]


def test_numpy_arrays_and_numbers_are_traced_there():
    """And not computed with, or written to, as they are outside."""

    def step(params, momentum, x, rate):
        x += 1.0
        params, momentum, loss = train_step(params, momentum, x)
        return rate.astype(jnp.float32) * loss

    params, momentum, x = arguments()
    given = np.array(x)

    def run(make):
        made = make(step)
        around = jax.jit(lambda params: made(params, momentum, given, 0.5))
        return [float(around(params)) for _ in range(3)]

    np.testing.assert_allclose(run(jit), run(jax.jit), rtol=1e-5)
    np.testing.assert_array_equal(given, x)


def test_shapes_with_what_is_static():
    def step(params, momentum, x, scale):
        return train_step(params, momentum, float(scale) * x)

    args = (*arguments(), "2")
    expected = jax.jit(step, static_argnums=3).eval_shape(*args)
    assert jit(step, static_argnums=3).eval_shape(*args) == expected
    traced = jit(step, static_argnums=3, budget="1GiB").trace(*args)
    loss = traced.lower().compile()(*arguments())[-1]
    np.testing.assert_allclose(loss, step(*args)[-1], rtol=1e-5)


def test_a_function_of_pmap_runs_as_it_is_written():
    """It spreads its arguments itself: inside of a program JAX would refuse it."""

    @functools.partial(jax.pmap, axis_name="i")
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p) ** 2))(params)
        return params - 0.1 * jax.lax.pmean(grads, "i"), loss

    args = jnp.ones((4, 16, 16)), jnp.ones((4, 8, 16))
    lines = []
    planned = stowax.jit(step, budget="60%", progress=lines.append)
    for _ in range(2):
        ours, theirs = planned(*args), step(*args)
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
    assert planned.plan is None
    assert planned.lower(*args).as_text() == step.lower(*args).as_text()
    (said,) = [line for line in lines if "runs as it is written" in line]
    assert "It is a function of jax.pmap" in said
    assert "jax.make_mesh" in said
    with pytest.raises(stowax.StowaxError, match=r"It is a function of jax\.pmap"):
        stowax.plan(step, *args, progress=False)
