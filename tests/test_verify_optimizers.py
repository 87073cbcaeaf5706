"""Right plans pass whatever the optimizer; a gradient that is a little off does not.

An optimizer's state holds more than what the gradients go into: counts, rates, flags.
All of it is donated, and has to come back at its place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from stowax._plan._plan import Plan
from stowax._verify._own import fed_back
from verified_steps import arguments, loss_fn, plan_for, verify

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

RATE = 1e-2


def both(up, down):
    """Two optimizers at once, one for each array of the parameters."""
    return optax.partition({"up": up, "down": down}, {"up": "up", "down": "down"})


OPTIMIZERS = {
    "lion, adan": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), both(optax.lion(RATE), optax.adan(RATE))
    ),
    "inject, muon": lambda: both(
        optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
        optax.contrib.muon(RATE),
    ),
    "steps, finite": lambda: optax.MultiSteps(
        optax.apply_if_finite(optax.adam(RATE), 5), 2
    ),
    "free": lambda: optax.contrib.schedule_free_sgd(RATE),
}


def step_with(optimizer, scale=1.0):
    """A step whose update gets gradients that are `scale` times what they should be."""

    def step(state, x):
        params, inner = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        if scale != 1.0:
            grads = jax.tree.map(lambda g: scaled(g, scale), grads)
        updates, inner = optimizer.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), loss

    return step


def scaled(x, scale):
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def state_of(optimizer, dtype=jnp.float32):
    params, _, x = jax.tree.map(lambda a: a.astype(dtype), arguments())
    return (params, optimizer.init(params)), x


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_right_plan_passes_and_consumes_nothing(name):
    optimizer = OPTIMIZERS[name]()
    args = state_of(optimizer)
    before = jax.tree.map(np.asarray, args)
    step = step_with(optimizer)
    plan = plan_for(*args, step=step, pin={"sin*": "recompute"})
    v = verify(plan, step, args, blame=False)
    assert v, str(v)
    jax.tree.map(np.testing.assert_array_equal, args, before)
    roles = {leaf.role for leaf in v.leaves}
    assert {"parameter", "optimizer state", "gradient"} <= roles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "scale"),
    [
        ("sgd", jnp.float32, 1.0001),
        ("sgd", jnp.float32, 1.0),
        ("adam", jnp.bfloat16, 1.01),
        ("adam", jnp.bfloat16, 1.0),
    ],
)
def test_gradients_that_are_a_little_off(name, dtype, scale, monkeypatch):
    optimizer = getattr(optax, name)(RATE)
    args = state_of(optimizer, dtype)
    step = step_with(optimizer)
    plan = plan_for(*args, step=step, pin={"sin*": "recompute"})
    right, wrong = Plan.apply, step_with(optimizer, scale)

    def apply(plan, function):
        return right(plan, wrong if function is step else function)

    monkeypatch.setattr(Plan, "apply", apply)
    v = verify(plan, step, args, blame=False, steps=3)
    assert bool(v) == (scale == 1.0), str(v)
    if not v:
        worst = max(v.failed, key=lambda leaf: leaf.bias)
        assert worst.role == ("parameter" if name == "sgd" else "optimizer state")
        assert scale - 1 <= 1.1 * worst.bias <= 2.3 * (scale - 1)


def test_what_lies_beside_updated_state_comes_back():
    def leaves(tree):
        return jax.tree.leaves_with_path(tree)

    array, count = np.zeros((3, 2), np.float32), np.int32(0)
    key = np.zeros(2, np.uint32)
    state = {"p": array, "rate": np.float32(1), "count": count}
    args = leaves((key, state, array))  # the last one is a batch
    names = [jax.tree_util.keystr(path) for path, _ in args]
    assert names == ["[0]", "[1]['count']", "[1]['p']", "[1]['rate']", "[2]"]
    batch = {0, 4}
    same = leaves((key, {"loss": np.float32(0), "new": state}, array))
    outs = [jax.tree_util.keystr(path) for path, _ in same]
    p = outs.index("[1]['new']['p']")
    assert fed_back(args, same, {2: p}, batch) == {
        0: 0,
        1: outs.index("[1]['new']['count']"),
        2: p,
        3: outs.index("[1]['new']['rate']"),
    }
    # With another type at the same place it is something else.
    other = leaves((key, {"new": state | {"rate": array}}, array))
    assert sorted(fed_back(args, other, {2: 2}, batch)) == [0, 1, 2]
