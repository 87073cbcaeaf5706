"""Training steps as people write them: each is planned, and computes what it did."""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from planned_models import (
    RATE,
    arguments,
    descend,
    forward,
    layer,
    mean_square,
    numbers,
    plan,
    spec,
    step_of,
    target_or_skip,
    weights,
)
from stowax._errors import ArgumentError

WIDTH, ROWS = 32, 64
PARAMS, X = weights(width=WIDTH), spec(ROWS, WIDTH)


def accumulating(params, batches):
    """Gradients of several batches, added up in a scan."""

    def one(total, x):
        value, grads = jax.value_and_grad(mean_square)(params, x)
        return jax.tree.map(jnp.add, total, grads), value

    start = jax.tree.map(jnp.zeros_like, params)
    grads, values = jax.lax.scan(one, start, batches)
    return descend(params, grads), values


@stowax.stow
def total(params, x):
    return jnp.sum(forward(params, jnp.sin(x)))


def two_losses(first, second, x):
    one, g = jax.value_and_grad(mean_square)(first, x)
    two, h = jax.value_and_grad(total)(second, x)
    return descend(first, g), descend(second, h), one + two


def one_loss_twice(params, x):
    one, grads = jax.value_and_grad(mean_square)(params, x)
    params = descend(params, grads)
    two, grads = jax.value_and_grad(mean_square)(params, x)
    return descend(params, grads), one + two


def with_auxiliaries(params, x):
    @stowax.stow
    def loss(params, x):
        out = forward(params, x)
        return jnp.mean(out**2), {"largest": jnp.max(out), "count": 3}

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
    return descend(params, grads), value, aux["largest"]


@functools.partial(jax.jit, static_argnames="power")
@stowax.stow
def jitted_outside(params, x, power=2):
    # What a module-level jit has traced once, it would not trace again.
    return jnp.mean(forward(params, x) ** power)


@functools.partial(jax.jit, static_argnames="power")
def jitted_inside(params, x, power):
    return jnp.mean(forward(params, x) ** power)


def with_keywords(params, x):
    value, grads = jax.value_and_grad(lambda p: mean_square(p, x=x))(params)
    return descend(params, grads), value


def with_dropout(params, x, key):
    @stowax.stow
    def loss(params, x, key):
        def body(c, given):
            w, key = given
            kept = jax.random.bernoulli(key, 0.9, c.shape)
            return jnp.where(kept, layer(c, w), jnp.zeros_like(c)), None

        keys = jax.random.split(key, 4)
        return jnp.mean(jax.lax.scan(body, x, (params, keys))[0] ** 2)

    key, now = jax.random.split(key)
    value, grads = jax.value_and_grad(loss)(params, x, now)
    return descend(params, grads), value, key


CONSTANT = np.linspace(0, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


@stowax.stow
def with_a_constant(params, x):
    return jnp.mean((forward(params, x) - CONSTANT) ** 2)


@stowax.stow
def with_master_weights(params, x):
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return jnp.mean(forward(low, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


@stowax.stow
def rematerialised(params, x):
    body = jax.checkpoint(lambda c, w: (layer(c, w), None))
    return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)


@stowax.stow
def counting(params, x):
    def body(carry, w):
        count, c = carry
        return (count + 1, layer(c, w)), None

    return jnp.mean(jax.lax.scan(body, (jnp.int32(0), x), params)[0][1] ** 2)


class Named(NamedTuple):
    params: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    params: Any
    count: Any


def of_a_record(state, x, rate):
    value, grads = jax.value_and_grad(mean_square)(state.params, x)
    params = jax.tree.map(lambda p, g: p - rate * g, state.params, grads)
    return type(state)(params, state.count + 1), value


OPTIMISER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.cosine_decay_schedule(1e-3, 100)),
)


def optimised(state, x):
    params, inner = state
    value, grads = jax.value_and_grad(mean_square)(params, x)
    updates, inner = OPTIMISER.update(grads, inner, params)
    return (optax.apply_updates(params, updates), inner), value


def penalised(params, x):
    """A gradient by the input in the loss: a penalty, a physical law, forces."""

    def out(params, x):
        block = lambda y, w: (y + jnp.tanh(y @ w["up"]) @ w["down"], None)
        return jnp.sum(jax.lax.scan(block, x, params)[0] ** 2)

    return jnp.mean((jax.grad(out, argnums=1)(params, x) ** 2 - 1) ** 2)


def bfloat16():
    return jax.tree.map(lambda s: spec(*s.shape, dtype=jnp.bfloat16), (PARAMS, X))


STEPS = {
    "accumulating": (accumulating, PARAMS, spec(3, ROWS, WIDTH)),
    "two losses": (two_losses, PARAMS, weights(6, WIDTH), X),
    "one loss twice": (one_loss_twice, PARAMS, X),
    "auxiliaries": (with_auxiliaries, PARAMS, X),
    "jit outside": (step_of(jitted_outside), PARAMS, X),
    "jit inside": (
        step_of(stowax.stow(functools.partial(jitted_inside, power=2))),
        PARAMS,
        X,
    ),
    "jit of the gradient": (
        lambda p, x: jax.jit(jax.value_and_grad(mean_square))(p, x),
        PARAMS,
        X,
    ),
    "keywords": (with_keywords, PARAMS, X),
    "dropout": (with_dropout, PARAMS, X, spec(2, dtype=jnp.uint32)),
    "constant": (step_of(with_a_constant), PARAMS, X),
    "master weights": (step_of(with_master_weights), PARAMS, X),
    "rematerialised": (step_of(rematerialised), PARAMS, X),
    "counting": (step_of(counting), PARAMS, X),
    "named tuple": (of_a_record, Named(PARAMS, spec(dtype=jnp.int32)), X, spec()),
    "dataclass": (of_a_record, Record(PARAMS, spec(dtype=jnp.int32)), X, spec()),
    "optax": (optimised, (PARAMS, jax.eval_shape(OPTIMISER.init, PARAMS)), X),
    "gradient by the input": (step_of(penalised), PARAMS, X),
    "bfloat16": (step_of(mean_square), *bfloat16()),
    "partial": (functools.partial(lambda c, p, x: optimised_by(c, p, x), 3), PARAMS, X),
    "two unrolled layers": (step_of(mean_square), weights(2, WIDTH, True), X),
}


def optimised_by(count, params, x):
    for _ in range(count):
        value, grads = jax.value_and_grad(mean_square)(params, x)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params, value


def drawn(args):
    arrays = numbers(args)
    return jax.tree.map(
        # An optimiser's second moments are not below zero.
        lambda a: (
            jnp.abs(a) if jnp.issubdtype(a.dtype, jnp.floating) else jnp.ones_like(a)
        ),
        arrays,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_planned_step_computes_the_same(name, usual_promotion):
    step, *args = STEPS[name]
    found = plan(step, *args, target="cpu", pin=PIN)
    expected = jax.jit(step)(*drawn(args))
    got = found.apply(step)(*drawn(args))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # Sums over the rows in another order, in the coarsest type of the step.
        coarse = "bfloat16" if name in ("bfloat16", "master weights") else "float32"
        rounding = float(jnp.finfo(coarse).eps) * (8 if coarse == "bfloat16" else ROWS)
        scale = max(float(np.max(np.abs(b), initial=0.0)), 1e-6)
        np.testing.assert_allclose(a, b, rtol=0, atol=rounding * scale)
    assert {d.decision for d in found.decisions} >= {"recompute"}


PIN = {"*": "recompute"}


def test_gradients_that_are_pulled_back_under_vmap_run_as_they_are_written():
    def mapped(p, x):
        rows = lambda p: jnp.mean(forward(p, x), axis=0)
        return jax.jacrev(rows)(p)

    found = plan(mapped, PARAMS, X, target="cpu")
    why = (
        "what is differentiated runs as written: its gradient is taken once, and pulled"
    )
    assert found.proof.notes[0].startswith(why)
    assert not found.program.stacks
    args = drawn((PARAMS, X))
    got, expected = found.apply(mapped)(*args), jax.jit(mapped)(*args)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    with pytest.raises(ArgumentError, match=re.escape(why)):
        plan(mapped, PARAMS, X, target="cpu", pin=PIN)


@pytest.mark.slow
def test_python_numbers_stay_weak():
    """A Python number as an argument does not promote what it is multiplied with."""

    def step(params, x, rate):
        value, grads = jax.value_and_grad(mean_square)(params, x)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    args = (*bfloat16(), 0.1)
    found = plan(step, *args, target="cpu", pin=PIN)
    params, _ = found.apply(step)(*drawn(args[:2]), 0.1)
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert found.program.arguments[-1].shape == ()


@pytest.mark.slow
def test_numpy_arrays_and_arrays_as_arguments():
    params, x = numbers((PARAMS, X))
    as_numpy = jax.tree.map(np.asarray, (params, x))
    specs = plan(step_of(mean_square), PARAMS, X, target="cpu", pin=PIN)
    for args in ((params, x), as_numpy):
        found = plan(step_of(mean_square), *args, target="cpu", pin=PIN)
        assert found.device_bytes == specs.device_bytes
        assert found.program.arguments == specs.program.arguments


@pytest.mark.slow
def test_the_same_step_is_planned_the_same_again():
    step, args = step_of(jitted_outside), arguments(width=WIDTH, rows=ROWS)
    one = plan(step, *args, target="cpu", pin=PIN)
    two = plan(step, *args, target="cpu", pin=PIN)
    assert one.decisions == two.decisions
    assert one.device_bytes == two.device_bytes


@pytest.mark.slow
def test_where_arguments_lie_now_does_not_matter():
    """A plan for what another plan put in host memory: it says anew what lies where."""
    target = target_or_skip("h200")

    def lying(kind):
        return jax.tree.map(
            lambda s: s.update(sharding=target.sharding(memory_kind=kind)), PARAMS
        )

    here, there = (
        plan(step_of(mean_square), lying(kind), X, budget="1GiB", donate=True)
        for kind in ("device", "pinned_host")
    )
    assert there.fits
    assert there.device_bytes == here.device_bytes
    assert there.host_bytes == here.host_bytes == 0
