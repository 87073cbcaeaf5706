"""`Plan.init`: state that is made where a plan wants it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stowax
from planned_models import target_or_skip
from stowax._errors import ArgumentError
from stowax._plan._init import programs
from stowax._state._places import Kind

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH = 6, 256
OPTIMIZER = optax.sgd(1e-3, momentum=0.9)
BATCH = jnp.ones((512, WIDTH))


def init_state(key):
    def weights(key):
        return 0.1 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH))

    params = {k: weights(jax.random.fold_in(key, n)) for n, k in enumerate("ab")}
    return params, OPTIMIZER.init(params)


def loss_of(params, x):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w["a"]) @ w["b"]), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def train_step(params, state, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


@pytest.fixture(scope="module")
def plan():
    state = jax.eval_shape(init_state, jax.random.key(0))
    pin = {"optimizer state": "offload"}
    return stowax.plan(train_step, *state, BATCH, target="h200", pin=pin, budget="8MiB")


def kinds_of(tree):
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_state_is_made_where_it_belongs(plan):
    params, state = plan.init(init_state, jax.random.key(0))
    placed = plan.place(*init_state(jax.random.key(0)))
    assert kinds_of((params, state)) == kinds_of(placed)
    assert kinds_of(state).count("pinned_host") == 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        (params, state),
        placed,
    )
    plan.apply(train_step)(params, state, BATCH)


@pytest.mark.slow
def test_one_argument_alone(plan):
    params, _ = init_state(jax.random.key(0))
    state = plan.init(OPTIMIZER.init, params)
    assert kinds_of(state).count("pinned_host") == 2


@pytest.mark.slow
def test_what_is_none_of_the_planned_state(plan):
    with pytest.raises(ArgumentError, match=r"^init: got zeros, which returns none"):
        plan.init(zeros, 3)


def zeros(count):
    return jnp.zeros(3) + count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200", "v5p-8"])
def test_the_state_is_never_on_the_device_as_a_whole(name):
    """Each program has one array on the device, with what it is made from."""
    target = target_or_skip(name)
    host = target.sharding(memory_kind="pinned_host")
    key = jax.ShapeDtypeStruct((), jnp.int32)
    traced = jax.jit(lambda seed: init_state(jax.random.key(seed))).trace(key)
    count = len(jax.tree.leaves(traced.out_info))
    array = LAYERS * WIDTH * WIDTH * 4
    made = []
    kinds = [Kind(memory="pinned_host")] * count
    for numbers, program in programs(traced.jaxpr, kinds, [host] * count):
        memory = target.compile(program, key).memory_analysis()
        assert memory.host_output_size_in_bytes >= array * len(numbers)
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2.5 * array
        made += numbers
    assert made == list(range(count))


class Model(nnx.Module):
    def __init__(self, rngs):
        layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)]
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def make(key):
    model = Model(nnx.Rngs(key))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def step_of_objects(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.slow
def test_objects():
    pin = {"optimizer state": "offload"}
    own = {"target": "h200", "budget": "70%", "pin": pin}
    plan = stowax.plan(step_of_objects, *make(jax.random.key(0)), BATCH, **own)
    model, optimizer = plan.init(make, jax.random.key(0))
    hosted = {a.path for a in plan.program.arguments if a.memory_kind != "device"}
    assert kinds_of(nnx.state(optimizer)).count("pinned_host") == len(hosted) > 0
    losses = [float(plan.apply(step_of_objects)(model, optimizer, BATCH))]
    expected = make(jax.random.key(0))
    assert losses == pytest.approx([float(step_of_objects(*expected, BATCH))], rel=1e-5)
