"""`stowax.jit` with arrays from anywhere: no device, another one, a mesh, the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stowax
from stowax._jit import _lent, _placing, _ready
from test_jit import batch, loss_of, train_step, weights

P = PartitionSpec
DEVICES = 4
jit = functools.partial(stowax.jit, compiles=4, progress=False)


def mesh_of(count, kind):
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("d",), axis_types=(kind,), devices=devices)


AUTO = mesh_of(DEVICES, AxisType.Auto)
WHOLE, SPREAD = NamedSharding(AUTO, P()), NamedSharding(AUTO, P("d"))
SECOND = jax.devices()[1]
ONE = NamedSharding(mesh_of(1, AxisType.Explicit), P())
TYPED = NamedSharding(mesh_of(DEVICES, AxisType.Explicit), P())


def fresh(to=None, width=64):
    params = weights(width=width)
    state = params, jax.tree.map(jnp.zeros_like, params)
    return jax.device_put(state, to)


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


SHARDINGS = {
    "in_shardings": (WHOLE, WHOLE, SPREAD),
    "out_shardings": (WHOLE, WHOLE, None),
}
CASES = {
    "the state on another device, a NumPy batch": (SECOND, as_numpy, {}),
    "the batch on another device": (None, lambda x: jax.device_put(x, SECOND), {}),
    "told, and nothing is placed": (None, lambda x: x, SHARDINGS),
    "told, a NumPy batch": (WHOLE, as_numpy, SHARDINGS),
    "told, the state on one device": (SECOND, lambda x: x, SHARDINGS),
    "results told alone": (None, as_numpy, {"out_shardings": WHOLE}),
    "the state on a mesh of one device": (ONE, lambda x: x, {}),
    "the batch on a mesh of one device": (None, lambda x: jax.device_put(x, ONE), {}),
    "the state on a mesh of types": (TYPED, lambda x: x, {}),
}


def run(step, state, place):
    (params, momentum), x = fresh(state), place(batch())
    found = []
    for _ in range(3):
        params, momentum, loss = step(params, momentum, x)
        found.append(float(loss))
    return found, params


@pytest.mark.quick("the state on a mesh of one device")
@pytest.mark.parametrize("case", CASES)
def test_first_calls_with_arrays_from_anywhere(case, usual_promotion):
    state, place, told = CASES[case]
    expected, params = run(jax.jit(train_step, **told), state, place)
    step = jit(train_step, budget="70%", **told)
    losses, got = run(step, state, place)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert any(d.decision == "recompute" for d in step.plan.decisions)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        assert a.sharding.device_set == b.sharding.device_set


@pytest.mark.slow
def test_a_step_that_is_told_the_devices_of_a_target_that_is_not_there():
    target = stowax.target("v5p-8")
    devices = np.array(target.devices[:DEVICES], dtype=object)
    mesh = jax.sharding.Mesh(devices, ("d",))
    whole, spread = (NamedSharding(mesh, spec) for spec in (P(), P("d")))
    step = jax.jit(train_step, in_shardings=(whole, whole, spread))
    wishes = {"target": target, "pin": {"activation": "recompute"}, "compiles": 4}
    found = [
        stowax.plan(step, *args, **wishes, progress=False).device_bytes
        for args in ((*fresh(), batch()), (*as_numpy(fresh()), as_numpy(batch())))
    ]
    shapes = jax.eval_shape(lambda: (*fresh(), batch()))
    specs = stowax.plan(step, *shapes, **wishes, progress=False)
    assert found == [specs.device_bytes] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("Auto",), ("Explicit",), ("Explicit", "Auto")])
def test_partition_specs_over_the_mesh_that_is_set(kinds, usual_promotion):
    types, names = [getattr(AxisType, kind) for kind in kinds], ("d", "m")[: len(kinds)]
    mesh = jax.make_mesh((2,) * len(kinds), names, axis_types=tuple(types))
    params = {"up": P(None, None, names[-1]), "down": P(None, names[0])}
    told = {"in_shardings": (P(), P(), P("d")), "out_shardings": (params, P(), P())}
    args = (*fresh(), np.asarray(batch()))
    with jax.set_mesh(mesh):
        expected = jax.jit(train_step, **told)(*args)
        step = jit(jax.jit(train_step, **told), pin={"activation": "recompute"})
        got = step(*args)
    assert step.plan.decisions
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.slow
def test_numpy_arrays_under_a_mesh_that_is_set(usual_promotion):
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh_of(DEVICES, kind)):
            args = as_numpy((*fresh(), batch()))
            expected, step = jax.jit(train_step)(*args), jit(train_step, budget="70%")
            np.testing.assert_allclose(step(*args)[-1], expected[-1], rtol=1e-5)
            assert step.plan.fits


@pytest.mark.slow
def test_now_on_a_mesh_of_one_device_and_now_on_none(usual_promotion):
    step, args = jit(train_step, budget="70%"), (*fresh(), batch())
    expected = jax.jit(train_step)(*args)[-1]
    for to in (None, ONE, None):
        there = jax.device_put(args, to) if to else args
        np.testing.assert_allclose(step(*there)[-1], expected, rtol=1e-5)


PIN = {"parameter": "offload", "optimizer state": "offload"}
WIDE = 128
X = batch(width=WIDE)


@pytest.fixture(scope="module")
def hosted():
    """A step whose state is in host memory, the state after one step, and a loss."""
    step = jit(train_step, budget="90%", target="h200", pin=PIN, donate_argnums=(0, 1))
    params, momentum, _ = step(*fresh(width=WIDE), X)
    assert params["up"].sharding.memory_kind == "pinned_host"
    return step, params, momentum


@pytest.mark.slow
def test_a_line_says_what_waits_in_host_memory(capsys, usual_promotion):
    wishes = {"budget": "90%", "target": "h200", "pin": PIN}
    step = stowax.jit(train_step, donate_argnums=(0, 1), **wishes)
    params, *_ = step(*fresh(width=WIDE), X)
    assert capsys.readouterr().err.endswith(
        "train_step: in host memory from now on: parameters, optimizer state\n"
    )
    assert np.isfinite(jax.jit(loss_of)(params, X))


@pytest.mark.slow
def test_it_is_lowered_for_where_the_arrays_are(hosted):
    """Not for the machine that the plan was made for, which is not there."""
    step, *_ = hosted
    expected = step(*fresh(width=WIDE), X)
    compiled = step.lower(*fresh(width=WIDE), X).compile()
    state = fresh(width=WIDE)
    for _ in range(2):
        *state, loss = compiled(*state, X)
    *state, _ = expected
    np.testing.assert_allclose(loss, step(*state, X)[-1], rtol=1e-5)
    assert loss.devices() == {jax.devices()[0]}


@pytest.mark.slow
def test_another_planned_step_is_given_what_the_first_has_on_the_host(hosted):
    _, params, _ = hosted
    on_device = jax.device_put(params, jax.memory.Space.Device)
    expected = jax.jit(jax.value_and_grad(loss_of))(on_device, X)
    other = jit(jax.value_and_grad(loss_of), budget="1GiB")
    for given in (on_device, params, on_device):
        loss, grads = other(given, X)
        np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
        np.testing.assert_allclose(grads["up"], expected[1]["up"], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_state_on_the_host_where_the_step_is_a_part_of_something_else(hosted):
    step, params, momentum = hosted
    on_device = jax.device_put((params, momentum), jax.memory.Space.Device)
    plain = lambda x: train_step(*on_device, x)[-1]
    mine = lambda x: step(params, momentum, x)[-1]
    several = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(jax.vmap(mine)(several), jax.vmap(plain)(several), 1e-5)
    np.testing.assert_allclose(jax.grad(mine)(X), jax.grad(plain)(X), 1e-4)
    with jax.disable_jit():
        np.testing.assert_allclose(mine(X), plain(X), 1e-5)
    shapes = step.eval_shape(params, momentum, X)
    assert shapes[-1].shape == ()


@pytest.mark.slow
def test_the_same_arrays_twice_later_on(usual_promotion):
    """A target network is made the online one again in the middle of training."""

    def run(make):
        params, other = fresh(width=WIDE)
        step, found = make(train_step), []
        for k in range(4):
            if k == 2:
                other = params
            params, other, loss = step(params, other, X)
            found.append(float(loss))
        return found

    # State that the step donates unasked, as nothing fits otherwise.
    step = functools.partial(jit, target="h200", budget="90%", pin=PIN)
    np.testing.assert_allclose(run(step), run(jax.jit), rtol=1e-5)


@pytest.mark.slow
def test_positions_from_the_end_of_any_number_of_arguments(usual_promotion):
    def step(*args):
        params, (momentum, extra), x = args
        params, momentum, loss = train_step(params, momentum, x)
        return (params, loss), (momentum, extra + 1)

    def given(make, position):
        params, momentum = fresh()
        args = params, (momentum, jnp.ones(8)), batch()
        make(step, donate_argnums=position)(*args)
        return [any(a.is_deleted() for a in jax.tree.leaves(arg)) for arg in args]

    for position in (-2, 1):  # of which JAX takes the second alone
        planned = given(functools.partial(jit, budget="70%"), position)
        assert planned == given(jax.jit, position)
    with pytest.raises(ValueError, match="static_argnums"):
        jit(train_step, static_argnums=7)
    with pytest.raises(ValueError, match="zz"):
        jit(train_step, static_argnames="zz")


@pytest.mark.slow
def test_an_array_that_is_also_kept_is_not_overwritten(usual_promotion):
    """A reference model starts as the policy, and stays while the policy is trained."""

    def step(policy, momentum, reference, x):
        def loss_fn(p):
            layer = lambda h, w: (h + jnp.tanh(h @ w), None)
            mine, theirs = (jax.lax.scan(layer, x, w)[0] for w in (p, reference))
            return jnp.mean((mine - theirs) ** 2) + jnp.mean(mine**2)

        loss, grads = jax.value_and_grad(loss_fn)(policy)
        momentum = 0.9 * momentum + grads
        return policy - 0.1 * momentum, momentum, loss

    policy = reference = 0.2 * jax.random.normal(jax.random.key(0), (4, 48, 48))
    momentum, x = jnp.zeros_like(policy), jnp.ones((16, 48))
    before = np.asarray(reference).copy()
    planned = stowax.jit(
        step,
        target="h200",
        budget="150%",
        pin={"optimizer state": "offload"},
        progress=False,
    )
    for _ in range(3):
        policy, momentum, _ = planned(policy, momentum, reference, x)
    assert 0 in planned.plan.program.donate_argnums
    np.testing.assert_array_equal(reference, before)


@pytest.mark.slow
def test_what_a_step_returned_is_its_own_whatever_the_batch(monkeypatch):
    """Nothing is copied for a last, smaller batch; nor where there is no room."""

    def step(params, momentum, x):
        def loss_fn(p):
            layer = lambda h, w: (h + jnp.tanh(h @ w), None)
            return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        momentum = 0.9 * momentum + grads
        return params - 0.1 * momentum, momentum, loss

    params = 0.2 * jax.random.normal(jax.random.key(0), (4, 48, 48))
    given = params, jnp.zeros_like(params)
    copies, lines = [], []
    for module in (_placing, _ready):
        monkeypatch.setattr(module, "copied", lambda a: copies.append(a) or a + 0)
    planned = stowax.jit(step, target="h200", budget="75%", progress=lines.append)
    *state, _ = planned(*given, jnp.ones((16, 48)))
    assert planned.plan.program.donate_argnums == (0, 1)
    assert not any(array.is_deleted() for array in given)
    first = len(copies)
    assert first
    for rows in (8, 16, 8):
        *state, _ = planned(*state, jnp.ones((rows, 48)))
    monkeypatch.setattr(_lent, "_room", lambda device: 0)
    for _ in range(2):
        planned(*map(jnp.copy, given), jnp.ones((16, 48)))
    assert len(copies) == first
    said = [line for line in lines if "no room for copies" in line]
    assert len(said) == 1
