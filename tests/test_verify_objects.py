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
from stowax._verify._own import OwnArguments
from verified_steps import arguments, loss_fn, plan_for, verify

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("usual_promotion")]

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


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """`stowax.plan` refuses such a step; what verify says of it is for the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stowax._step._trace.check_traced", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def planned(unchecked):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        x = np.random.default_rng(0).normal(size=(8, WIDTH))
        args = model, optimizer, jnp.asarray(x, jnp.float32)
        return plan_for(*args, step=train_step), args


def applied_as(jit, monkeypatch):
    monkeypatch.setattr(Plan, "apply", lambda plan, step: jit(step))


def test_objects_that_are_left_as_they_were_are_found(planned, monkeypatch):
    plan, args = planned
    applied_as(jax.jit, monkeypatch)  # it works on copies of the objects
    v = verify(plan, train_step, args)
    assert not v
    wrong = {leaf.path: leaf for leaf in v.failed}
    kernel = wrong["args[0].blocks[1].up.kernel.value"]
    assert kernel.role == "parameter"
    assert kernel.problem.startswith("the step as it is written changes it in place")
    assert "args[1].opt_state[0].count.value" in wrong
    assert v.blamed == ()
    assert v.why.startswith("No decision is to blame: the planned step writes nothing")


def test_objects_that_are_changed_rightly_pass_and_the_users_stay(planned, monkeypatch):
    plan, args = planned
    before = jax.tree.map(np.asarray, jax.tree.leaves(args))
    applied_as(nnx.jit, monkeypatch)
    v = verify(plan, train_step, args)
    assert v, str(v)
    assert {"args[0].blocks[3].down.bias.value", "out[1]"} <= {x.path for x in v.leaves}
    for mine, old in zip(jax.tree.leaves(args), before, strict=True):
        np.testing.assert_array_equal(mine, old)


def test_objects_that_are_changed_wrongly_are_found(planned, monkeypatch):
    plan, args = planned

    def jit(step):
        def off(model, optimizer, x):
            out = step(model, optimizer, x)
            kernel = model.blocks[2].up.kernel
            kernel[...] = kernel[...].at[3, 4].multiply(1.001)
            return out

        return nnx.jit(off)

    applied_as(jit, monkeypatch)
    v = verify(plan, train_step, args, blame=False, steps=1)
    assert [leaf.path for leaf in v.failed] == ["args[0].blocks[2].up.kernel.value"]


def test_a_runs_copies_share_what_the_users_objects_share():
    block = Block(nnx.Rngs(0))
    args = ({"a": block, "b": block.up.kernel}, nnx.state(block), jnp.ones(3))
    flat = jax.tree.leaves(args)
    own = OwnArguments(args, lambda i: flat[i] + 0)
    first, state, _ = own.args()
    assert first["a"] is not block
    assert first["a"].up.kernel is first["b"]
    assert isinstance(state, nnx.State)
    first["b"][...] = first["b"][...] + 1
    held = own.held(())
    # The variables of an `nnx.State` are values, and are not among them.
    assert len(held) == len(jax.tree.leaves(args[0]))
    for name in ("args[0]['a'].up.kernel.value", "args[0]['b'].value"):
        np.testing.assert_array_equal(held[name], block.up.kernel[...] + 1)
    # What is donated and does not come back is copied again.
    own.args()[2].delete()
    own.take((jnp.zeros(3),), {})
    np.testing.assert_array_equal(own.args()[2], 1.0)


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
