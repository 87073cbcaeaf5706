"""`stowax.jit` and the frameworks' own objects: NNX, Equinox, Linen."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import stowax

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH, ROWS = 3, 64, 1024
jit = functools.partial(stowax.jit, progress=False, compiles=4)


def batch(seed=1):
    draw = np.random.default_rng(seed).normal
    return jnp.asarray(draw(size=(ROWS, WIDTH)), jnp.float32)


def moved(plan):
    return {d.decision for d in plan.decisions}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(jnp.tanh(self.up(self.norm(x)))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def nnx_step(model, optimizer, metrics, x):
    def loss_fn(model):
        out = model(x)
        return jnp.mean(out**2), out

    (loss, out), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, size=jnp.abs(out).mean())
    optimizer.update(model, grads)
    return {"loss": loss, "name": "step"}


def nnx_state():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), size=nnx.metrics.Average("size")
    )
    return model, optimizer, metrics


@functools.cache
def nnx_plan():
    options = {"budget": "80%", "target": "h200", "progress": False, "compiles": 4}
    return stowax.plan(nnx_step, *nnx_state(), batch(), **options)


@pytest.mark.slow
def test_nnx_objects_are_updated_in_place():
    found = {}
    plain = lambda step: nnx.jit(lambda *args: step(*args)["loss"])
    ways = {
        "plain": plain(nnx_step),
        "planned": stowax.jit(nnx_step, plan=nnx_plan(), progress=False),
        "jitted": jit(nnx.jit(lambda *args: nnx_step(*args)["loss"])),
    }
    for name, step in ways.items():
        objects = nnx_state()
        results = [step(*objects, batch(seed)) for seed in range(3)]
        loss = [float(r["loss"] if isinstance(r, dict) else r) for r in results]
        state = jax.tree.leaves(nnx.state(objects[:2]))
        found[name] = loss, state, objects[2].compute()
        if name == "planned":
            assert results[0]["name"] == "step"
    plan = ways["planned"].plan
    assert plan.program.taken_apart
    assert moved(plan) & {"offload", "recompute"}
    losses, state, metrics = found.pop("plain")
    for other_losses, other, computed in found.values():
        np.testing.assert_allclose(other_losses, losses, rtol=1e-4)
        for a, b in zip(other, state, strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-4)
        np.testing.assert_allclose(computed["loss"], metrics["loss"], rtol=1e-4)


@pytest.mark.slow
def test_a_plan_of_objects_is_applied_placed_and_verified():
    objects, plan = nnx_state(), nnx_plan()
    assert plan.program.taken_apart
    model, optimizer, metrics = plan.place(*objects)
    assert model is objects[0]
    before = np.asarray(model.blocks[0].up.kernel[...])
    plan.apply(nnx_step)(model, optimizer, metrics, batch())
    assert not np.array_equal(before, model.blocks[0].up.kernel[...])
    found = stowax.verify(
        nnx_step, plan, *nnx_state(), batch(), progress=False, steps=2
    )
    assert found, str(found)
    names = {leaf.path for leaf in found.leaves}
    assert "args[0]['blocks'][0]['norm']['mean'].value" in names
    assert "out['loss']" in names


class Layer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    drop: eqx.nn.Dropout
    activation: object
    scale: float

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=one)
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=two)
        self.drop = eqx.nn.Dropout(0.1)
        self.activation, self.scale = jnp.tanh, 0.5

    def __call__(self, x, key):
        y = jax.vmap(self.down)(self.activation(jax.vmap(self.up)(x)))
        return x + self.scale * self.drop(y, key=key)


@pytest.mark.slow
def test_equinox_modules():
    optimizer = optax.adam(1e-3)

    def step(layers, state, x, key):
        def loss_fn(layers):
            y = x
            for layer, one in zip(layers, jax.random.split(key, LAYERS), strict=True):
                y = layer(y, one)
            return jnp.mean(y**2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(layers)
        arrays = eqx.filter(layers, eqx.is_array)
        updates, state = optimizer.update(grads, state, arrays)
        return eqx.apply_updates(layers, updates), state, loss

    found = []
    ways = (
        eqx.filter_jit(step),
        jit(step, budget="80%", target="h200"),
        jit(eqx.filter_jit(step)),
    )
    for way in ways:
        keys = jax.random.split(jax.random.key(0), LAYERS)
        layers = [Layer(key) for key in keys]
        state = optimizer.init(eqx.filter(layers, eqx.is_array))
        losses = []
        for seed in range(3):
            layers, state, loss = way(layers, state, batch(seed), jax.random.key(seed))
            losses.append(float(loss))
        assert layers[0].activation is jnp.tanh
        assert layers[0].scale == 0.5
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-4)
    assert moved(ways[1].plan) & {"offload", "recompute"}


def test_what_equinox_jits_is_inspected():
    def step(layer, x):
        loss_fn = lambda layer: jnp.mean(jax.vmap(layer)(x) ** 2)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(layer)
        return eqx.apply_updates(layer, grads), loss

    args = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)), batch()
    plain = stowax.inspect(eqx.filter_jit(step), *args, target="v5p-8")
    assert plain.memory.device.alias == 0
    whole = eqx.filter_jit(step, donate="all")
    with pytest.warns(UserWarning, match="donated buffers"):  # the batch is lost
        donating = stowax.inspect(whole, *args, target="v5p-8")
    assert donating.memory.device.alias >= WIDTH * WIDTH * 4


@pytest.mark.slow
def test_a_linen_train_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(LAYERS):
                x = x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x)))
            return x

    net = Net()

    def step(state, x):
        def loss_fn(params):
            return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    found = []
    for way in (jax.jit(step), jit(step, budget="80%", target="h200")):
        params = net.init(jax.random.key(0), batch())["params"]
        state = TrainState.create(
            apply_fn=net.apply, params=params, tx=optax.adam(1e-3)
        )
        losses = []
        for seed in range(3):
            state, loss = way(state, batch(seed))
            losses.append(float(loss))
        assert int(state.step) == 3
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


class Tuned(nnx.Module):
    """A frozen product and a low-rank one beside it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(1024, 1024, use_bias=False, rngs=rngs)
        self.down = nnx.LoRAParam(jax.random.normal(rngs.params(), (1024, 8)) * 0.1)
        self.up = nnx.LoRAParam(jnp.zeros((8, 1024)))

    def __call__(self, x):
        return x + jnp.tanh(self.base(x) + x @ self.down[...] @ self.up[...])


@pytest.mark.slow
def test_the_frozen_part_of_an_nnx_model_leaves_the_device():
    model = nnx.List([Tuned(nnx.Rngs(k)) for k in range(8)])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)

    def step(model, optimizer, x):
        def loss_fn(model):
            return jnp.mean(functools.reduce(lambda x, block: block(x), model, x) ** 2)

        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model)
        optimizer.update(model, grads)
        return loss

    x, pin = jax.ShapeDtypeStruct((256, 1024), jnp.float32), {"*base*": "offload"}
    args, target = (model, optimizer, x), "v5p-8"
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    plain = stowax.inspect(jitted, *args, target=target).memory.device.total
    plan = stowax.plan(step, *args, target=target, pin=pin, progress=False)
    base = 8 * 1024 * 1024 * 4
    assert plan.host_bytes == base
    assert plan.device_bytes <= plain - base / 2  # what is in flight stays


@pytest.mark.slow
def test_an_error_of_equinox_is_equinoxs_own():
    @eqx.filter_jit
    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            y = eqx.error_if(y, jnp.any(jnp.isnan(x)), "the batch has a NaN")
            return jnp.mean(y**2)

        value, grads = eqx.filter_value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    planned = jit(step, pin={"activation": "recompute"}, target="h200", budget="100%")
    weights = [jnp.eye(WIDTH)] * 4
    for _ in range(2):
        weights, value = planned(weights, batch())
    assert moved(planned.plan)
    assert jnp.isfinite(value)
    with pytest.raises(eqx.EquinoxRuntimeError, match="the batch has a NaN"):
        planned(weights, batch() * jnp.nan)
