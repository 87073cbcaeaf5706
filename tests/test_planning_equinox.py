"""`eqx.filter_jit` in unchanged scripts: its arguments are planned one by one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH, ROWS = 4, 128, 64
TX = optax.adam(1e-3)
STATE = {"optimizer state": "offload"}


class Model(eqx.Module):
    layers: eqx.nn.Linear  # stacked
    activation: str = eqx.field(static=True)

    def __init__(self, key):
        make = lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.layers = eqx.filter_vmap(make)(jax.random.split(key, LAYERS))
        self.activation = "gelu"

    def __call__(self, x):
        layer = lambda x, one: (getattr(jax.nn, self.activation)(one(x)) + x, None)
        return jax.lax.scan(layer, x, self.layers)[0]


def batch():
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def train_step(model, state, x, scale=1.0, *, kind="mean"):
    def loss_of(model, x):
        return scale * getattr(jnp, kind)(jax.vmap(model)(x) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x)
    updates, state = TX.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def script(donate="none", **named):
    """Losses of a script as Equinox's documentation writes it."""
    step = eqx.filter_jit(train_step, donate=donate)
    evaluate = eqx.filter_jit(lambda model, x: jnp.max(jax.vmap(model)(x)))
    model, found = Model(jax.random.key(0)), []
    state = TX.init(eqx.filter(model, eqx.is_array))
    for _ in range(3):
        if donate == "all":
            model, state, loss = step(model, state, batch(), **named)
        else:
            model, state, loss = step(model, state, BATCH, **named)
        found += [float(loss), float(evaluate(model, BATCH))]
    return found


BATCH = batch()
CALLS = {
    "as it is": {},
    "all donated": {"donate": "all"},
    "by name": {"scale": 0.5, "kind": "sum"},
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_optimizers_state_leaves(call):
    """Which is given away, and the batch is not: it is used again."""
    expected = script(**call)
    wishes = {"target": "h200", "budget": "95%", "pin": STATE, "progress": False}
    with stowax.planning(**wishes) as session:
        got = script(**call)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    plan = session.plans["train_step"]
    hosted = {a.path for a in plan.program.arguments if a.memory_kind != "device"}
    assert hosted == {f"args[1][0].{m}.layers.weight" for m in ("mu", "nu")}
    assert plan.program.donate_argnums == (0, 1)  # the others are nothing's next value
    assert not session.notes


@jax.tree_util.register_pytree_with_keys_class
class Rows:
    """A batch that leaves out what it has not, and may be taken for its rows."""

    def __init__(self, x, name):
        self.x, self.name = x, name

    def __iter__(self):
        return iter(self.x)

    def tree_flatten_with_keys(self):
        found = {"x": self.x, "name": self.name}
        present = {k: v for k, v in found.items() if v is not None}
        keyed = [(jax.tree_util.GetAttrKey(k), v) for k, v in present.items()]
        return keyed, tuple(present)

    @classmethod
    def tree_unflatten(cls, names, children):
        found = dict(zip(names, children, strict=True))
        return cls(found.get("x"), found.get("name"))


def test_nodes_that_look_at_what_they_are_made_of():
    def step(model, state, rows):
        return train_step(model, state, rows.x)

    def run():
        made, model = eqx.filter_jit(step), Model(jax.random.key(0))
        state = TX.init(eqx.filter(model, eqx.is_array))
        return [made(model, state, Rows(BATCH, "rows"))[-1] for _ in range(2)]

    expected = run()
    with stowax.planning(budget="1GiB", progress=False):
        np.testing.assert_allclose(run(), expected, rtol=1e-5)


def test_what_equinox_lowers_is_the_step_as_it_is_written():
    with stowax.planning(target="h200", budget="90%", progress=False) as session:
        model = Model(jax.random.key(0))
        state = TX.init(eqx.filter(model, eqx.is_array))
        lowered = eqx.filter_jit(train_step).lower(model, state, BATCH)
        got = lowered.compile()(model, state, BATCH)
    expected = train_step(model, state, BATCH)
    np.testing.assert_allclose(got[-1], expected[-1], rtol=1e-5)
    assert session.notes == ["train_step is lowered as it is written"]
