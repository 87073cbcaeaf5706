"""What a step's arguments are for: what is replaced, what is read only, what is lost.

A parameter that a step reads and does not give back is the caller's still. To donate
it, because a gradient or another array of its type is returned, would delete it.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import stowax
from planned_models import spec
from stowax._errors import StepError
from stowax._records._stages import Options
from stowax._step._trace import trace_step

LAYERS, WIDTH = 3, 8
STACKED = spec(LAYERS, WIDTH, WIDTH)
X = spec(4, WIDTH)


def layer(x, w):
    return x + jnp.tanh(x @ w["base"] + x @ w["down"] @ w["up"])


@stowax.stow
def loss_fn(tuned, frozen, x):
    norm = frozen.get("norm", 1.0)
    layers = {k: w for k, w in {**tuned, **frozen}.items() if k != "norm"}
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x * norm, layers)
    return jnp.mean(x**2)


FROZEN = {"base": STACKED}
TUNED = {"down": STACKED, "up": STACKED}


def roles(step, *args):
    traced = trace_step(step, args, Options())
    names = {a.path: a.role for a in traced.arguments}
    return traced, names


def test_frozen_weights_are_parameters_that_nothing_replaces():
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(frozen, tuned, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(tuned, frozen, x)
        updates, state = optimizer.update(grads, state, tuned)
        return loss, optax.apply_updates(tuned, updates), state

    state = jax.eval_shape(optimizer.init, TUNED)
    found, names = roles(step, {**FROZEN, "norm": spec(1, WIDTH)}, TUNED, state, X)
    assert names["args[0]['base']"] == names["args[0]['norm']"] == "parameter"
    assert names["args[1]['up']"] == "parameter"
    assert names["args[3]"] == "batch"
    # Frozen, tuned and momentum are of one type: each has its own place or none.
    assert found.donate == (1, 2)
    kept = [k for k, a in enumerate(found.arguments) if a.position in (0, 3)]
    assert found.updates == {i: i - 1 for i in range(2, 6)}
    assert found.differentiated.isdisjoint(kept)


def test_gradients_take_nobodys_place():
    def step(params, x):
        return jax.value_and_grad(lambda p: loss_fn(p, {}, x))(params)

    found, names = roles(step, {**TUNED, **FROZEN}, X)
    assert set(names.values()) == {"parameter", "batch"}
    assert not found.updates
    assert not found.donate
    assert len(found.differentiated) == 3


def test_what_gradients_are_added_to_is_replaced_and_the_parameters_are_not():
    def step(params, total, x):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, {}, x))(params)
        return jax.tree.map(jnp.add, total, grads), loss

    params = {**TUNED, **FROZEN}
    found, _ = roles(step, params, params, X)
    assert found.updates == {3: 0, 4: 1, 5: 2}
    assert found.donate == (1,)


def test_parameters_made_anew_of_a_finer_copy_are_replaced():
    def step(params, fine, x):
        grads = jax.grad(lambda p: loss_fn(p, {}, x))(params)
        fine = jax.tree.map(lambda f, g: f - 0.1 * g.astype(f.dtype), fine, grads)
        return jax.tree.map(lambda f: f.astype(jnp.bfloat16), fine), fine

    fine = {**TUNED, **FROZEN}
    params = jax.tree.map(lambda s: s.update(dtype=jnp.bfloat16), fine)
    found, _ = roles(step, params, fine, X.update(dtype=jnp.bfloat16))
    assert found.donate == (0, 1)
    assert found.updates == {i: i for i in range(6)}


def test_what_is_returned_as_it_came_keeps_its_place():
    def step(state, x):
        grads = jax.grad(loss_fn)(state["tuned"], state["frozen"], x)
        tuned = jax.tree.map(lambda p, g: p - 0.1 * g, state["tuned"], grads)
        return {"tuned": tuned, "frozen": state["frozen"]}

    found, _ = roles(step, {"tuned": TUNED, "frozen": FROZEN}, X)
    assert found.updates == {0: 0, 1: 1, 2: 2}
    assert found.donate == (0,)


@pytest.mark.parametrize("cell", [True, False])
def test_what_a_recurrent_network_scans_over_time_is_no_weight(cell):
    @stowax.stow
    def recurrent(w, xs):
        start = jnp.zeros(xs.shape[1:])
        out, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), start, xs)
        return jnp.mean(out)

    def step(w, xs):
        return w - 0.1 * jax.grad(recurrent)(w, xs)

    if not cell:  # frozen layers in which only the input is trained

        def step(x, weights):
            return x - 0.1 * jax.grad(deep)(x, weights)

        @stowax.stow
        def deep(x, weights):
            return jnp.mean(
                jax.lax.scan(lambda h, w: (h @ w, None), x, weights)[0] ** 2
            )

    _, names = roles(step, spec(WIDTH, WIDTH), spec(LAYERS, WIDTH, WIDTH))
    assert names["args[1]"] == ("batch" if cell else "parameter")


@pytest.mark.slow
def test_weights_beside_a_gradient_of_the_same_place_are_the_callers():
    """What is only read comes back where the rest of its argument does, or not."""

    def step(state, x):
        def loss(w):
            out, _ = jax.lax.scan(
                lambda x, one: (jnp.tanh(x @ one[0]) @ one[1], None),
                x,
                (w, state["ref"]),
            )
            return jnp.mean(out**2)

        grads = jax.grad(loss)(state["w"])
        return {"w": state["w"] - 0.1 * grads}, {"ref": grads}

    w = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    state = {"w": w, "ref": w}
    plan = stowax.plan(step, state, x, target="h200", budget="99%", progress=False)
    assert plan.program.donate_argnums == ()


@pytest.mark.slow
def test_statistics_that_layers_return_come_back_with_the_state():
    """A scan reads each layer's statistics, and what it returns takes their place."""

    def step(state, x):
        def loss(w):
            def layer(x, one):
                w, mean = one
                y = x @ w
                return jnp.tanh(y - mean[None]), 0.9 * mean + 0.1 * y.mean(0)

            x_out, mean = jax.lax.scan(layer, x, (w, state["mean"]))
            return jnp.mean(x_out**2), mean

        (_, mean), grads = jax.value_and_grad(loss, has_aux=True)(state["w"])
        moment = 0.9 * state["m"] + grads
        return {"w": state["w"] - 0.1 * moment, "m": moment, "mean": mean}

    w = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    state = {"w": w, "m": w, "mean": jax.ShapeDtypeStruct((4, 64), jnp.float32)}
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    plan = stowax.plan(step, state, x, target="h200", budget="90%", progress=False)
    assert plan.program.donate_argnums == (0,)


def test_a_whole_epoch_has_the_roles_of_its_steps(usual_promotion):
    """From the second trip on, parameters are made of moments and batches."""
    optimizer = optax.adam(0.1)

    def epoch(params, state, batches):
        def one(carry, x):
            params, state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, {}, x)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), loss

        (params, state), losses = jax.lax.scan(one, (params, state), batches)
        return params, state, losses

    params = {**FROZEN, **TUNED}
    moments = jax.eval_shape(optimizer.init, params)
    traced, names = roles(epoch, params, moments, spec(5, *X.shape))
    by_argument = {
        path.split("]")[0]: role
        for path, role in names.items()
        if not path.endswith("count")
    }
    assert by_argument == {
        "args[0": "parameter",
        "args[1": "optimizer state",
        "args[2": "batch",
    }
    assert traced.donate == (0, 1)


def test_what_is_logged_under_the_same_name_is_not_the_state_given_back():
    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["w"], {}, x - state["ref"])
        new = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], grads)
        return {"w": new}, {"log": {"ref": 2 * x}}, loss

    state = {"w": {**FROZEN, **TUNED}, "ref": X}
    traced, _ = roles(step, state, X)
    assert traced.donate == ()


def test_weights_that_are_moved_to_look_at_the_gradient_there_are_no_update():
    """Of one that the loss is linear in, the moved value is needed by nothing."""

    def linear(params, x):
        return loss_fn(params["w"], {}, x) + jnp.sum(params["offset"])

    def step(params, x):
        grads = jax.grad(linear)(params, x)
        moved = jax.tree.map(lambda p, g: p + 0.1 * g, params, grads)
        return jax.grad(linear)(moved, x)

    params = {"w": {**FROZEN, **TUNED}, "offset": spec(WIDTH)}
    traced, _ = roles(step, params, X)
    assert not traced.updates


def test_a_lost_update_is_refused_whatever_else_stays_as_it_was():
    """Most of the weights are differentiated by, and only one is updated."""

    def step(weights, x):
        value, grads = jax.value_and_grad(loss_of_all)(weights, x)
        weights["w"] - 0.1 * grads["w"]
        return value, jnp.sum(jnp.square(grads["w"]))

    def loss_of_all(weights, x):
        scale = sum(jnp.sum(b) for b in weights["frozen"])
        return loss_fn(
            dict.fromkeys(("base", "down", "up"), weights["w"]), {}, scale * x
        )

    given = {"w": STACKED, "frozen": [spec()] * 4}
    with pytest.raises(StepError, match="none of its outputs is made of them"):
        roles(step, given, X)
