"""Steps written with Flax NNX, Flax Linen and Equinox, under any decisions.

Objects that a marked function changes (statistics, counts of random numbers) must be
changed as they are without a plan, and the repeated layers must still be found.
"""

import pathlib
import subprocess
import sys
import textwrap

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from planned_steps import check
from stowax._mark import stow
from stowax._verify._gradients import gradients_of, tapped

SOURCE = pathlib.Path(__file__).parents[1] / "src"
WIDTH, ROWS, LAYERS = 4, 6, 3

pytestmark = pytest.mark.usefixtures("usual_promotion")


def batch():
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
    return jnp.asarray(x, jnp.float32)


# --- Flax NNX -----------------------------------------------------------------------


class Calls(nnx.Variable):
    """How often a layer ran."""


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = Calls(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def nnx_step(loss, differentiate):
    definition, state = nnx.split(Model(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(definition, state)
        result = differentiate(loss)(model, x)
        return nnx.state(model), result

    return step, (state, batch())


@pytest.mark.slow
def test_nnx_statistics_and_counts_change_in_the_call():
    @stow
    def loss(model, x):
        return jnp.mean(jnp.square(model(x)))

    step, args = nnx_step(loss, nnx.value_and_grad)
    check(step, args, [LAYERS], seeds=(0, 1))
    after, _ = jax.jit(step)(*args)
    counted = [layer["calls"][...] for layer in after["layers"].values()]
    assert counted == [1] * LAYERS


@pytest.mark.slow
def test_nnx_module_among_the_outputs_is_the_caller_s_own():
    @stow
    def loss(model, x):
        made = nnx.Variable(jnp.sum(x))
        return jnp.mean(model(x)), (model.layers[0], made, None, 3)

    def differentiate(loss):
        def run(model, x):
            value, (layer, made, nothing, three) = loss(model, x)
            assert (nothing, three) == (None, 3)
            assert layer is model.layers[0]
            return value, made[...]

        def total(model, x):
            value, made = run(model, x)
            return value + made * 0.0

        return nnx.value_and_grad(total)

    step, args = nnx_step(loss, differentiate)
    check(step, args, [LAYERS])


@pytest.mark.slow
def test_nnx_method_is_marked():
    class Marked(Model):
        @stow
        def __call__(self, x):
            return super().__call__(x)

    definition, state = nnx.split(Marked(nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(definition, state)
        result = nnx.value_and_grad(lambda model, x: jnp.mean(model(x)))(model, x)
        return nnx.state(model), result

    check(step, (state, batch()), [LAYERS])


def test_gradients_are_called_by_the_caller_s_paths():
    definition, state = nnx.split(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))

    @stow
    def loss(scales, model, state, x):
        out = model(x * scales["in"][0]) + nnx.merge(definition, state)(x)
        return jnp.mean(jnp.square(out))

    def step(scales, state, x):
        model = nnx.merge(definition, state)
        return nnx.grad(loss, argnums=(0, 1, 2))(scales, model, state, x)

    args = ({"in": [jnp.ones(())]}, state, batch())
    named = jax.eval_shape(gradients_of(tapped(step), args), *args)
    assert set(named) == {
        "loss: args[0]['in'][0]",
        "loss: args[1].bias.value",
        "loss: args[1].kernel.value",
        "loss: args[2]['bias'].value",
        "loss: args[2]['kernel'].value",
    }
    # No object among the arguments; the batch is an argument by keyword.
    plain = jax.grad(stow(lambda w, *, x: jnp.mean(w["w"] * x)))
    args = ({"w": jnp.ones(())}, batch())
    named = jax.eval_shape(
        gradients_of(tapped(lambda w, x: plain(w, x=x)), args), *args
    )
    assert {name.split(": ")[1] for name in named} == {"args[0]['w']"}


@pytest.mark.slow
def test_nnx_functional_loss_of_a_state():
    definition, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    @stow
    def loss(params, rest, x):
        model = nnx.merge(definition, params, rest, copy=True)
        y = model(x)
        return jnp.mean(y), nnx.state(model, nnx.Not(nnx.Param))

    def step(params, rest, x):
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, x)
        return value, rest, grads

    check(step, (params, rest, batch()), [LAYERS])


def test_nothing_of_flax_is_imported():
    code = """
        import sys
        import jax, jax.numpy as jnp
        from stowax._mark import stow
        from stowax._records._stages import Options
        from stowax._step._trace import trace_step
        loss = stow(lambda w: jax.lax.scan(lambda x, w: (x * w, None), 1.0, w)[0])
        traced = trace_step(jax.grad(loss), (jnp.ones(3),), Options())
        assert len(traced.stacks) == 1
        assert not any(m.split(".")[0] == "flax" for m in sys.modules)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        env={"PYTHONPATH": str(SOURCE), "JAX_PLATFORMS": "cpu"},
    )


# --- Flax Linen ---------------------------------------------------------------------


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        norm = nn.BatchNorm(use_running_average=False)
        y = nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(WIDTH)(norm(x))))
        return x + y, jnp.mean(y)


class LinenModel(nn.Module):
    unrolled: bool = False

    @nn.compact
    def __call__(self, x):
        if self.unrolled:
            for _ in range(LAYERS):
                x, _ = LinenLayer()(x, None)
            return x
        layers = nn.scan(
            LinenLayer,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        return layers()(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True], ids=["scan", "loop"])
def test_linen_statistics_and_dropout(unrolled):
    model = LinenModel(unrolled=unrolled)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(keys, batch())

    @stow
    def loss(params, statistics, x, key):
        y, changed = model.apply(
            {"params": params, "batch_stats": statistics},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return jnp.mean(jnp.square(y)), changed

    def step(*args):
        return jax.value_and_grad(loss, has_aux=True)(*args)

    args = (variables["params"], variables["batch_stats"], batch(), jax.random.key(2))
    # Under disable_jit nn.scan draws other random numbers, with or without a plan.
    check(step, args, [LAYERS], exact=True if unrolled else None)


# --- Equinox ------------------------------------------------------------------------


class EquinoxLayer(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    activation: object

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.activation = jnp.tanh

    def __call__(self, x, state, key):
        y, state = self.norm(self.linear(x), state)
        return x + self.dropout(self.activation(y), key=key), state


class EquinoxModel(eqx.Module):
    layers: list

    def __init__(self, key):
        self.layers = [EquinoxLayer(k) for k in jax.random.split(key, LAYERS)]

    def __call__(self, x, state, key):
        keys = jax.random.split(key, LAYERS)
        for layer, mine in zip(self.layers, keys, strict=True):
            x, state = layer(x, state, mine)
        return x, state


@pytest.mark.slow
def test_equinox_state_dropout_and_functions_in_the_tree():
    model, state = eqx.nn.make_with_state(EquinoxModel)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @stow
    def loss(model, state, x, key):
        keys = jax.random.split(key, ROWS)
        y, state = jax.vmap(
            model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None)
        )(x, state, keys)
        return jnp.mean(jnp.square(y)), state

    def step(params, state, x, key):
        model = eqx.combine(params, static)
        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(
            model, state, x, key
        )
        return value, state, grads

    check(step, (params, state, batch(), jax.random.key(1)), [LAYERS])
