"""What a step is given: whose fault an error is."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from stowax._errors import ArgumentError


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_step_that_fails_for_itself_blames_no_function_that_it_is_given():
    """An optimizer among the arguments; the state is of other parameters."""

    def step(params, update, state):
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
        return update(grads, state)

    def update(grads, state):
        return jax.tree.map(jnp.add, grads, state)

    one, two = ({n: spec(4, 4) for n in names} for names in ("w", "wb"))
    with pytest.raises(ValueError, match="numbers of pytree children"):
        stowax.plan(step, one, update, two, budget="60%", target="h200")


def test_what_is_no_array_is_named_where_the_step_fails_for_it():
    def step(params, scale):
        return jax.grad(lambda p: jnp.sum(p * scale))(params)

    with pytest.raises(ArgumentError, match=r"^args\[1\]: got Scale <.*, which is "):
        stowax.plan(step, spec(4, 4), type("Scale", (), {})(), target="cpu")
