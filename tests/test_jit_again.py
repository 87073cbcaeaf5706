"""What JAX would trace again is planned again: no call runs another call's program."""

import contextlib
import copy
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import stowax

pytestmark = pytest.mark.usefixtures("usual_promotion")

WEIGHTS = jnp.full((4, 32, 32), 0.1, jnp.bfloat16)
X = jnp.ones((2048, 32), jnp.bfloat16)
PIN = {"activation": "recompute"}


def loss_of(weights, x):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


@contextlib.contextmanager
def planned(way):
    """A `jit` that plans: ours, or JAX's own under `stowax.planning`."""
    if way == "jit":
        yield functools.partial(stowax.jit, pin=PIN, compiles=4, progress=False)
    else:
        with stowax.planning(pin=PIN, compiles=4, progress=False):
            yield jax.jit


def in_both_ways(test):
    return pytest.mark.parametrize("way", ["jit", "planning"])(test)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def by_mask(weights, batch, rate):
    """Another step for a batch that is put together in another way."""
    if isinstance(batch, dict):
        x, scale = batch["x"], 5.0 if "mask" in batch else 1.0
    else:
        x = next(a for a in batch if a is not None)
        scale = 5.0 if isinstance(batch, list) or batch[0] is None else 1.0
    loss, grads = jax.value_and_grad(lambda w: scale * loss_of(w, x))(weights)
    return weights - rate * grads, loss


AGAIN = {
    "names": [({"x": X, "more": X}, 0.1), ({"x": X, "mask": X}, 0.1)],
    "a list for a tuple": [((X, X), 0.1), ([X, X], 0.1)],
    "None elsewhere": [((X, None), 0.1), ((None, X), 0.1)],
    "an array for a number": [((X, X), 0.1), ((X, X), jnp.float32(0.1))],
    "a number for an array": [((X, X), np.float32(0.1)), ((X, X), 0.1)],
}


@pytest.mark.quick("jit-names")
@pytest.mark.parametrize(
    ("way", "again"),
    [
        ("jit", "names"),
        ("jit", "an array for a number"),
        *[slow("planning", k) for k in AGAIN if not k.startswith("an array")],
    ],
)
def test_arguments_of_another_form(way, again):
    calls = AGAIN[again]
    plain = jax.jit(by_mask)
    with planned(way) as make:
        step = make(by_mask)
        for call in (*calls, calls[0]):
            expected, got = plain(WEIGHTS, *call), step(WEIGHTS, *call)
            assert [a.dtype for a in got] == [a.dtype for a in expected]
            jax.tree.map(np.testing.assert_array_equal, got, expected)


STATIC = [
    (1, True, 1.0),
    (np.float32(2), 2),
    (enum.IntEnum("Kind", {"one": 1}).one, 1),
]


@pytest.mark.parametrize("kinds", [slow(kinds) for kinds in STATIC])
def test_static_arguments_that_are_equal_and_of_other_types(kinds):
    def step(weights, kind):
        scale = {bool: 5.0, int: 1.0, float: 2.0}.get(type(kind), 3.0)
        loss, grads = jax.value_and_grad(lambda w: scale * loss_of(w, X))(weights)
        return weights - 0.1 * grads, loss

    plain = jax.jit(step, static_argnums=1)
    planned = stowax.jit(step, static_argnums=1, pin=PIN, compiles=4, progress=False)
    for kind in kinds:
        assert float(planned(WEIGHTS, kind)[1]) == float(plain(WEIGHTS, kind)[1])
    jitted = stowax.plan(plain, WEIGHTS, kinds[0], pin=PIN, compiles=4)
    applied = jitted.apply(plain)
    for kind in kinds:
        got = applied(jnp.copy(WEIGHTS), kind)[1]
        assert float(got) == float(plain(WEIGHTS, kind)[1])


@pytest.mark.parametrize("way", ["jit", slow("planning")])
def test_a_call_by_name_is_traced_for_itself(way):
    rate = [0.1]

    def step(weights, x):
        return weights - rate[0] * jax.grad(loss_of)(weights, x)

    def run(make):
        rate[0], made = 0.1, make(lambda weights, x: step(weights, x))
        first = made(WEIGHTS, X)
        rate[0] = 10.0
        return first, made(WEIGHTS, x=X), made(WEIGHTS, X)

    with planned(way) as make:
        np.testing.assert_array_equal(run(make), run(jax.jit))


@pytest.mark.quick("jit")
@in_both_ways
def test_a_step_that_closes_over_what_is_traced(way):
    def step(weights, x):
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        return weights - 0.1 * grads, loss

    def run(make):
        loss = lambda scale: make(lambda w: step(w, X * scale))(WEIGHTS)[1]
        return jax.grad(loss)(2.0), jax.jit(loss)(2.0), jax.vmap(loss)(jnp.ones(2))

    expected = run(jax.jit)
    with planned(way) as make:
        for got, value in zip(run(make), expected, strict=True):
            np.testing.assert_allclose(got, value, rtol=2e-2)  # of bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "clear"),
    [
        ("planning", "clear_cache"),
        slow("jit", "clear_caches"),
    ],
)
def test_cleared_caches(way, clear):
    rate = [0.1]

    def step(weights, x):
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        return weights - rate[0] * grads, loss

    def run(make):
        rate[0], made = 0.1, make(lambda *args: step(*args))
        before = made(WEIGHTS, X)[0]
        rate[0] = 10.0
        np.testing.assert_array_equal(made(WEIGHTS, X)[0], before)
        made.clear_cache() if clear == "clear_cache" else jax.clear_caches()
        return before, made(WEIGHTS, X)[0]

    expected = run(jax.jit)
    assert not np.array_equal(*expected)
    with planned(way) as make:
        np.testing.assert_array_equal(run(make), expected)


@in_both_ways
def test_copies_of_an_object_that_has_a_step(way):
    class Trainer:
        def __init__(self, make):
            self.step = make(lambda w, x: w - 0.1 * jax.grad(loss_of)(w, x))

    with planned(way) as make:
        trainer = Trainer(make)
        expected = trainer.step(WEIGHTS, X)
        for copied in (copy.copy, copy.deepcopy):
            np.testing.assert_array_equal(copied(trainer).step(WEIGHTS, X), expected)


@in_both_ways
def test_a_failing_step_does_not_run_again(way):
    """Whatever its words: a callback's message may speak of deleted files."""
    calls = []

    def log(loss):
        calls.append(loss)
        if len(calls) == 2:
            raise RuntimeError("Array has been deleted, and the donated file, too")
        return loss

    def step(weights, x):
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        return weights - 0.1 * grads, io_callback(log, loss, loss)

    with planned(way) as make:
        made = make(step)
        made(WEIGHTS, X)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the donated file"):
            jax.block_until_ready(made(WEIGHTS, X))
    assert len(calls) == 2
