"""`stowax.jit` and the ways in which a step is called and wrapped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
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


def test_arguments_by_name_at_every_call():
    expected = losses(jax.jit(train_step))
    by_name = jit(train_step, budget="60%")
    named = lambda params, momentum, x: by_name(x=x, params=params, momentum=momentum)
    np.testing.assert_allclose(losses(named), expected, rtol=1e-5)
    # By position afterwards, and in between.
    np.testing.assert_allclose(losses(by_name), expected, rtol=1e-5)
    np.testing.assert_allclose(losses(named), expected, rtol=1e-5)


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
