"""Arrays in host memory are computed with as others: logged, averaged, evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stowax._jax_host_memory import compute_on_copies, takes_host_memory

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@pytest.fixture(autouse=True, scope="module")
def copies():
    """As after a plan that has put something into host memory."""
    compute_on_copies()
    compute_on_copies()  # once is enough, and twice is the same


@pytest.fixture
def pair():
    """The same matrix in host memory and on the device."""
    there = jax.random.normal(jax.random.key(0), (8, 8))
    return jax.device_put(there, HOST), there


def where(tree):
    """The kinds of memory that arrays lie in."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@jax.jit
def product(x, y):
    """Jitted before anything was in host memory."""
    return x @ y + 1


COMPUTED = {
    "sum": lambda x, _: jnp.sum(x),
    "operators": lambda x, y: 0.9 * x + 0.1 * y - x[0],
    "norm of a tree": lambda x, y: optax.tree.norm({"a": x, "b": y}),
    "where": lambda x, _: jnp.where(x > 0, x, 0),
    "zeros of its kind": lambda x, y: jnp.zeros_like(x) + y,
    "histogram": lambda x, _: jnp.histogram(x)[0],
    "primitive": lambda x, y: jax.lax.add(x, y),
    "set": lambda x, y: x.at[0].set(y[1]),
    "jitted": product,
    "jitted, a tree": lambda x, y: jax.jit(lambda t: t["x"] @ t["y"])({"x": x, "y": y}),
    "jitted, by name": lambda x, y: jax.jit(lambda *, a, b: a @ b)(a=x, b=y),
    "static beside": lambda x, y: jax.jit(
        lambda how, x, y: x + y if how == "add" else x, static_argnums=0
    )("add", x, y),
    "closed over": lambda x, y: jax.jit(lambda y: y @ x + jnp.sum(x))(y),
    "gradient": lambda x, y: jax.grad(lambda x, y: jnp.sum(x @ y) ** 2)(x, y),
    "optimizer": lambda x, y: optax.adam(0.1).update(
        {"w": y}, optax.adam(0.1).init({"w": x}), {"w": x}
    )[0],
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_computes_with_host_memory_is_given_a_copy(pair, name, usual_promotion):
    there, here = pair
    expected = COMPUTED[name](here, here)
    for _ in range(2):  # what JAX keeps of the first call fits the second
        found = COMPUTED[name](there, here)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert where(found) == {"device"}
        again = COMPUTED[name](here, here)
        jax.tree.map(np.testing.assert_array_equal, again, expected)
    assert where(there) == {"pinned_host"}


def test_what_minds_host_memory_itself_is_left_alone(pair):
    there, here = pair
    kept = there.sharding
    seen = []

    def doubled(x):
        seen.append(jax.typeof(x).memory_space)
        return jax.device_put(2 * jax.device_put(x, DEVICE), HOST)

    constrained = lambda x: jax.lax.with_sharding_constraint(x, kept)
    told = jax.jit(lambda x: x, in_shardings=kept, out_shardings=kept)
    program = jax.jit(takes_host_memory(lambda x: x))
    for mindful in (jax.jit(doubled), told, program, jax.jit(constrained)):
        assert where(mindful(there)) == {"pinned_host"}
    assert seen[-1] == HOST
    np.testing.assert_array_equal(jax.jit(doubled)(there), 2 * here)


def test_what_is_only_lowered_is_lowered_for_what_it_is_given(pair):
    there, here = pair
    compiled = jax.jit(lambda x: 2 * x).lower(there).compile()
    np.testing.assert_array_equal(compiled(there), 2 * here)


def test_an_error_of_the_users_stays_theirs(pair):
    there, here = pair
    for given in (here, there):
        with pytest.raises(TypeError, match="dot_general requires contracting"):
            product(given, jnp.ones((3, 3)))
