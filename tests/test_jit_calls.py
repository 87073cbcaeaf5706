"""`stowax.jit` and the ways in which a step is called and wrapped."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._errors import MisfitError
from test_jit import arguments, jit, losses, train_step


def twice(function):
    @functools.wraps(function)
    def doubled(*args):
        return jax.tree.map(lambda value: 2 * value, function(*args))

    return doubled


WRAPPERS = (jax.grad, jax.value_and_grad, jax.vmap, jax.checkpoint, twice)


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_what_wraps_a_jitted_function_is_another_function(wrap):
    """`functools.wraps`, and so `jax.grad`, copies the attributes of what it wraps."""

    def cubes(x):
        return jnp.sum(x**3)

    x = jnp.arange(6.0).reshape(2, 3)
    expected = wrap(cubes)(x)
    for inner in (jax.jit(cubes), jit(cubes, budget="1GiB"), jax.jit(jax.jit(cubes))):
        ways = (
            jit(wrap(inner), budget="1GiB"),
            jit(jax.jit(wrap(inner)), budget="1GiB"),
            jax.jit(wrap(jit(inner, budget="1GiB"))),
        )
        for way in ways:
            jax.tree.map(np.testing.assert_allclose, way(x), expected)


@pytest.mark.slow
def test_arguments_by_name_at_every_call():
    expected = losses(jax.jit(train_step))
    by_name = jit(train_step, budget="60%")
    named = lambda params, momentum, x: by_name(x=x, params=params, momentum=momentum)
    np.testing.assert_allclose(losses(named), expected, rtol=1e-5)
    # By position afterwards, and in between.
    np.testing.assert_allclose(losses(by_name), expected, rtol=1e-5)
    np.testing.assert_allclose(losses(named), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["jit", "planning"])
def test_arguments_that_only_have_names_are_donated(way):
    def step(*, state, x):
        params, momentum, loss = train_step(*state, x)
        return (params, momentum), loss

    def run(make):
        planned = make(step, donate_argnames="state")
        params, momentum, x = arguments()
        given = state = (params, momentum)
        found = []
        for _ in range(3):
            state, loss = planned(state=state, x=x)
            found.append(float(loss))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert not x.is_deleted()
        return found

    expected = run(jax.jit)
    if way == "jit":
        found = run(functools.partial(jit, budget="70%"))
    else:
        with stowax.planning(budget="70%", progress=False):
            found = run(jax.jit)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


LOWERED = {
    "by name": ({}, lambda args: (args[:2], {"x": args[2]}), {}),
    "static": ({"static_argnums": 3}, lambda args: (args, {}), {"scale": 2.0}),
    "static by name": (
        {"static_argnames": "scale"},
        lambda args: (args, {}),
        {"scale": 2.0},
    ),
}


@pytest.mark.quick("static")
@pytest.mark.parametrize("case", LOWERED.values(), ids=LOWERED)
def test_what_is_lowered_is_compiled_and_called_as_the_step(case):
    told, called, static = case

    def step(params, momentum, x, scale=1.0):
        return train_step(params, momentum, scale * x)

    def run(make):
        args, named = called(arguments())
        more = tuple(static.values()) if "static_argnums" in told else ()
        by_name = {} if more else static
        lowered = make(step, **told).lower(*args, *more, **named, **by_name)
        compiled = lowered.compile()
        assert compiled.memory_analysis().temp_size_in_bytes > 0
        assert "main" in lowered.as_text()
        return compiled(*args, **named)[-1]

    planned = functools.partial(jit, pin={"activation": "recompute"}, compiles=4)
    np.testing.assert_allclose(run(planned), run(jax.jit), rtol=1e-5)


@jax.tree_util.register_pytree_node_class
class Converts:
    """A node that makes arrays of whatever it is given, as `jax.jit` allows."""

    def __init__(self, params, momentum):
        self.params, self.momentum = (
            jax.tree.map(jnp.asarray, tree) for tree in (params, momentum)
        )

    def tree_flatten(self):
        return (self.params, self.momentum), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_node_that_takes_arrays_only_runs_as_it_is_written():
    def step(state, x):
        *state, loss = train_step(state.params, state.momentum, x)
        return Converts(*state), loss

    params, momentum, x = arguments()
    lines = []
    planned = stowax.jit(step, budget="60%", progress=lines.append)
    state, found = Converts(params, momentum), []
    for _ in range(3):
        state, loss = planned(state, x)
        found.append(float(loss))
    assert found == losses(jax.jit(train_step), 3)
    assert planned.plan is None
    (said,) = [line for line in lines if "runs as jax.jit would run it" in line]
    assert "args[0] has a pytree node that cannot be made of shapes" in said
    assert "Let tree_unflatten take whatever it is given" in said


@pytest.mark.slow
@pytest.mark.parametrize("given", ["again", "first"])
def test_what_is_no_number_is_found_though_the_arguments_were_donated(given):
    def wide(params, moments, x):
        def loss(params):
            layer = lambda x, w: (x + jnp.tanh(x @ w), None)
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return params - 0.1 * moments, moments, value

    pin = {"optimizer state": "offload"}
    step = jit(wide, budget="2MiB", target="h200", pin=pin)
    params, x = jnp.full((3, 64, 64), 0.01), jnp.ones((128, 64))
    momentum = jnp.zeros_like(params)
    if given == "again":
        params, momentum, _ = step(params, momentum, x)
    x = x.at[0, 0].set(jnp.nan)
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"\(nan\) encountered in wide"),
    ):
        step(params, momentum, x)


@pytest.mark.slow
def test_what_is_no_number_is_found_as_without_a_plan():
    step = jit(train_step, budget="85%", target="h200")
    params, momentum, x = arguments()
    step(params, momentum, x)
    x = x.at[0, 0].set(jnp.nan)
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match="invalid value"),
    ):
        step(params, momentum, x)


def test_the_smallest_budget_is_no_more_than_the_step_takes_as_it_is_written():
    def step(params, x):
        def loss(params):
            through = lambda x: x + jnp.tanh(x @ params[0]) @ params[1]
            slopes = jax.vmap(jax.grad(lambda row: jnp.sum(through(row))))(x)
            return jnp.mean(through(x) ** 2) + jnp.mean(slopes**2)

        loss, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    args = [jnp.full((64, 64), 0.1)] * 2, jnp.ones((128, 64))
    with pytest.raises(MisfitError, match="The smallest budget known to work") as error:
        jit(step, budget="20%", cache=False)(*args)
    amount, unit = re.search(r"to work is ([\d.]+) (\wiB)", str(error.value)).groups()
    again = jit(step, budget=f"{amount}{unit}", cache=False)
    again(*args)
    assert again.plan.fits


def test_an_argument_that_the_step_does_not_take_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'") as error:
        jit(train_step, budget="60%")(*arguments(), rate=0.1)
    assert isinstance(error.value, stowax.StowaxError)


def test_an_error_of_a_result_names_the_users_function():
    def named_step(params, momentum, x):
        return *train_step(params, momentum, x), "a string"

    with pytest.raises(TypeError) as expected:
        jax.jit(named_step)(*arguments())
    with pytest.raises(TypeError) as found:
        jit(named_step, budget="60%")(*arguments())
    assert "named_step" in str(expected.value)
    assert str(found.value) == str(expected.value)


def test_a_static_argument_that_cannot_be_compared_is_named():
    step = jit(lambda *args: train_step(*args[:3]), budget="60%", static_argnums=3)
    with pytest.raises(
        stowax.StowaxError, match=r"^args\[3\]: got list \[1\], neither"
    ):
        step(*arguments(), [1])
