"""Objects that a step changes in place: what they hold after it is compared, too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stowax
from stowax._errors import StepError
from stowax._plan._plan import Plan
from verified_steps import arguments, loss_fn, plan_for, verify

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

WIDTH, LAYERS = 16, 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@stowax.stow
def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss, norm_of(grads)


@pytest.fixture(scope="module")
def planned():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        x = np.random.default_rng(0).normal(size=(8, WIDTH))
        args = model, optimizer, jnp.asarray(x, jnp.float32)
        return plan_for(*args, step=train_step), args


KERNEL = "args[0]['blocks'][2]['up']['kernel'].value"


def test_objects_that_are_changed_rightly_pass_and_the_users_stay(planned):
    plan, args = planned
    before = jax.tree.map(np.asarray, jax.tree.leaves(args))
    v = verify(plan, train_step, args)
    assert v, str(v)
    assert {KERNEL, "out[1]"} <= {x.path for x in v.leaves}
    kernel = next(leaf for leaf in v.leaves if leaf.path == KERNEL)
    assert kernel.role == "parameter"
    for mine, old in zip(jax.tree.leaves(args), before, strict=True):
        np.testing.assert_array_equal(mine, old)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.0, 1.001])
def test_objects_that_are_changed_wrongly_are_found(planned, monkeypatch, factor):
    """Left as they were, or off by a little in one element."""
    plan, args = planned

    def apply(plan, step):
        def off(*arrays):
            model, *others = step(*arrays)
            old = arrays[0]["blocks"][2]["up"]["kernel"]
            new = model["blocks"][2]["up"]["kernel"]
            wrong = new[...].at[3, 4].multiply(factor) if factor else old[...]
            model["blocks"][2]["up"]["kernel"] = new.replace(wrong)
            return model, *others

        return jax.jit(off)

    monkeypatch.setattr(Plan, "apply", apply)
    v = verify(plan, train_step, args, blame=False, steps=1)
    assert [leaf.path for leaf in v.failed] == [KERNEL]


def test_a_step_that_teaches_nothing_is_refused():
    def step(params, momentum, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return loss, norm_of(grads)

    plan = plan_for(*arguments(), step=step)
    with pytest.raises(StepError) as caught:
        verify(plan, step)
    assert str(caught.value).startswith(
        "step: neither what it returns nor the objects that it is given hold new "
        "parameters after it, so a loop over it learns nothing. Return the new "
    )


@pytest.mark.slow
def test_what_the_step_takes_by_name():
    def step(params, *, batch, kind="mse"):
        def loss(params):
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), batch, params)
            return jnp.mean(y**2 if kind == "mse" else jnp.abs(y))

        loss_, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, loss_

    step = jax.jit(step, static_argnames="kind")
    params = 0.1 * jax.random.normal(jax.random.key(0), (4, 64, 64))
    given = {"batch": jnp.ones((1024, 64)), "kind": "mae"}
    plan = stowax.plan(step, params, **given, budget="80%", progress=False)
    assert plan.outcome != "unneeded"
    assert stowax.verify(step, plan, params, **given, progress=False)
