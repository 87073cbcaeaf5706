"""Arrays in host memory are computed with as others: logged, averaged, evaluated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

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


def scanned(x, y):
    """Rows of the one through the other, by operations of `jax.lax`."""
    layer = lambda row, other: (jax.lax.mul(row, other) + other[0], None)
    return jax.lax.scan(layer, y[0], x)[0]


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
    "closed over, scanned": lambda x, y: jax.jit(lambda y: scanned(x, y))(y),
    "closed over, sliced": lambda x, y: jax.jit(lambda y: y @ x[1:3].T.reshape(8, 2))(
        y
    ),
    "closed over, differentiated": lambda x, y: jax.jit(
        jax.grad(lambda y: jnp.sum(scanned(x, y)))
    )(y),
    "gradient beside": lambda x, y: jax.grad(
        lambda x, y: jnp.sum(scanned(x, y)), argnums=1
    )(x, y),
    "gradient around": lambda x, y: jax.grad(lambda y: jnp.sum(scanned(x, y)))(y),
    "pulled back": lambda x, y: jax.vjp(lambda x: x @ y, x)[1](y)[0],
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


def test_what_writes_into_host_memory_in_a_loop_is_left_alone(pair):
    """State that is streamed by hand, a block at a time."""
    there, here = pair

    def streamed(x):
        def body(i, x):
            block = jax.lax.dynamic_slice_in_dim(x, i, 1)
            block = jax.device_put(2 * jax.device_put(block, DEVICE), HOST)
            return jax.lax.dynamic_update_slice_in_dim(x, block, i, 0)

        return jax.lax.fori_loop(0, len(x), body, x)

    found = jax.jit(streamed)(there)
    np.testing.assert_array_equal(np.asarray(found), 2 * np.asarray(here))


def test_jitted_functions_in_others_say_it_for_them(pair):
    there, _ = pair
    inner = jax.jit(lambda x: 2 * x, out_shardings=there.sharding)
    assert where(jax.jit(lambda x: inner(x))(there)) == {"pinned_host"}


def test_what_minds_other_arrays_gets_copies_of_these(pair):
    """A policy that offloads says so in its program, and wants its weights here."""
    there, here = pair
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(w, x):
        hidden = checkpoint_name(jnp.sin(x @ w), "h")
        return jnp.sum(jnp.sin(hidden @ w))

    step = jax.jit(jax.value_and_grad(loss))
    expected = step(here, here)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, step(there, here), expected)


def test_keys_and_what_is_mapped_over_a_mesh(pair):
    there, here = pair
    key = jax.device_put(jax.random.key(3), there.sharding)
    noisy = jax.jit(lambda key, x: jax.random.normal(key, x.shape) + x)
    expected = noisy(jax.random.key(3), here)
    np.testing.assert_array_equal(noisy(key, there), expected)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    shared = jax.device_put(here[:1], NamedSharding(mesh, PartitionSpec()))
    held = jax.device_put(shared, shared.sharding.with_memory_kind("pinned_host"))
    spec = PartitionSpec("x")
    scaled = lambda b: jax.jit(
        jax.shard_map(lambda a: a * b, mesh=mesh, in_specs=spec, out_specs=spec)
    )(jax.device_put(here, rows))
    np.testing.assert_array_equal(scaled(held), scaled(shared))


def test_a_function_is_traced_once_and_its_error_comes_once(pair):
    there, here = pair
    traces = []

    def broken(x):
        traces.append(x)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        jax.jit(broken)(there)
    assert len(traces) == 1

    def fine(x, y):
        traces.append(x)
        return (x + y) * there - there  # closed over twice, and copied once

    jitted = jax.jit(fine)
    for _ in range(3):
        jitted(there, here)
    assert len(traces) == 2


def test_a_donated_copy_is_nobody_elses(pair):
    """Another function's program may have closed over one of the same array."""
    there, here = pair
    closed = jax.jit(lambda x: x @ there)
    expected = closed(here)
    giving = jax.jit(lambda x: 2 * x, donate_argnums=0)
    for _ in range(2):
        np.testing.assert_array_equal(giving(there), 2 * here)
        np.testing.assert_array_equal(closed(here), expected)
    assert not there.is_deleted()


def test_what_is_only_lowered_is_lowered_for_what_it_is_given(pair):
    there, here = pair
    compiled = jax.jit(lambda x: 2 * x).lower(there).compile()
    np.testing.assert_array_equal(compiled(there), 2 * here)


def test_an_error_of_the_users_stays_theirs(pair):
    there, here = pair
    for given in (here, there):
        with pytest.raises(TypeError, match="dot_general requires contracting"):
            product(given, jnp.ones((3, 3)))


def test_shapes_are_found_of_what_is_closed_over_or_given(pair):
    there, here = pair
    assert jax.eval_shape(scanned, there, here).shape == (8,)
    assert jax.eval_shape(lambda y: scanned(there, y), here).shape == (8,)


def test_what_is_lowered_over_a_retry_is_all_on_the_device(pair):
    there, here = pair
    text = jax.jit(jax.lax.mul).lower(there, here).as_text()
    assert "pinned_host" not in text


def test_a_users_error_that_sounds_like_it_comes_once_and_with_its_cause(pair):
    calls = []

    def fails(y):
        calls.append(y)
        raise ValueError("no memory_space, no <host>") from KeyError("cause")

    with pytest.raises(ValueError, match="no memory_space") as caught:
        jax.jit(fails)(pair[1])
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(calls) == 1


def test_a_users_error_after_what_is_tried_again_is_theirs(pair):
    there, here = pair

    def fails(y):
        scanned(there, y)
        raise ValueError("a check of mine")

    with pytest.raises(ValueError, match="a check of mine"):
        jax.jit(fails)(here)


def test_memories_that_do_not_agree_otherwise_are_still_an_error(pair):
    there, here = pair
    odd = lambda y: jax.lax.add(y, jax.device_put(y, HOST))
    with pytest.raises(ValueError, match="memory_space of all inputs"):
        jax.jit(odd)(here)
    with pytest.raises(ValueError, match="memory_space of all inputs"):
        jax.jit(lambda y: odd(y) + jnp.sum(there))(here)


def test_a_device_is_a_place_to_put_it(pair):
    """JAX by itself refuses: it would move nothing, and the memory is another one."""
    there, here = pair
    (device,) = here.devices()
    found = jax.device_put({"there": there, "here": here, "one": 1.0}, device)
    assert where(found) == {"device"}
    np.testing.assert_array_equal(found["there"], np.asarray(there))
