"""What runs as it is written, and says so: effects, and layers in a `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import stowax
from stowax._plan._effect import why_it_does_not_fit
from verified_steps import LARGE, arguments

pytestmark = [pytest.mark.usefixtures("usual_promotion")]


def step_of(told):
    def loss_fn(params, x):
        def layer(x, w):
            x = x + jnp.tanh(jnp.sin(x @ w["up"]) @ w["down"])
            return told(x), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params, momentum, x):
        grads = jax.grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), momentum

    return step


calls: list[float] = []


def called(x):
    def scale(mean):
        calls.append(float(mean))
        return np.float32(1.0)

    mean = jax.lax.stop_gradient(jnp.mean(x))
    return x * io_callback(scale, jax.ShapeDtypeStruct((), jnp.float32), mean)


def printed(x):
    jax.debug.callback(lambda _: None, jnp.mean(x))
    return x


def planned(told):
    step, args = step_of(told), jax.tree.map(jnp.copy, arguments(LARGE))
    plan = stowax.plan(step, *args, budget="99%", target="cpu", progress=False)
    said = [note for note in plan.proof.notes if "must not run twice" in note]
    assert all(note.startswith("the loop at test_effects_note.py:") for note in said)
    return plan, said


def test_layers_that_print_are_planned():
    assert planned(printed)[1] == []


def test_what_layers_call_is_called_once_or_they_are_left_and_named():
    """JAX 0.12 lets rules of our own have such effects inside, 0.10 and 0.11 do not."""
    plan, said = planned(called)
    again = [d for d in plan.decisions if d.decision == "recompute"]
    assert bool(said) != bool(again)
    if again:
        step, args = step_of(called), jax.tree.map(jnp.copy, arguments(LARGE))
        calls.clear()
        jax.block_until_ready(plan.apply(step)(*args))
        assert len(calls) == 4


SPREAD, WHOLE = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()


def placed(mesh, where, *shape):
    sharding = jax.sharding.NamedSharding(mesh, where)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def test_layers_in_a_shard_map_beside_more_are_said_to_run_as_written():
    """Where few products are in there, what is around it is planned."""
    mesh = jax.make_mesh((8,), ("d",))

    def step_with(wrapped):
        def apart(weights, x):
            layer = wrapped(lambda x, w: (x + jnp.tanh(x @ w), None))
            return jax.lax.scan(layer, x, weights)[0]

        inside = jax.shard_map(
            apart, mesh=mesh, in_specs=(WHOLE, SPREAD), out_specs=SPREAD
        )

        def loss(weights, x):
            x = inside(weights[:2], x)
            for i, power in enumerate((2, 3, 4, 5, 6, 7, 8)):  # no two are alike
                x = jnp.tanh(x @ weights[i % 6]) ** power
            return jnp.mean(x)

        return lambda weights, x: weights - jax.grad(loss)(weights, x)

    args = placed(mesh, WHOLE, 6, 64, 64), placed(mesh, SPREAD, 1024, 64)
    step = step_with(lambda layer: layer)
    found = stowax.plan(step, *args, target="cpu", budget="60%", progress=False)
    assert not found.fits
    note, *others = found.proof.notes
    assert note.startswith("layers inside of jax.shard_map run as they are written")
    assert note.endswith(
        "With jax.checkpoint around the layer they keep little more than its input"
    )
    assert not any(other.startswith("no layers repeat") for other in others)
    assert note in " ".join(why_it_does_not_fit(found).split())
    # What it says to write helps.
    step = step_with(jax.checkpoint)
    less = stowax.plan(step, *args, target="cpu", progress=False)
    assert less.device_bytes < found.device_bytes
    assert note not in less.proof.notes


def test_a_shard_map_within_layers_that_are_planned_is_no_reason():
    mesh = jax.make_mesh((8,), ("d",))

    def inner(x):
        return jax.lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x)

    def step(weights, x):
        apart = jax.shard_map(inner, mesh=mesh, in_specs=SPREAD, out_specs=SPREAD)
        layer = lambda x, w: (x + apart(jnp.tanh(x @ w)), None)
        loss = lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)
        return weights - jax.grad(loss)(weights)

    args = placed(mesh, WHOLE, 6, 64, 64), placed(mesh, SPREAD, 1024, 64)
    found = stowax.plan(step, *args, target="cpu", budget="1KiB", progress=False)
    assert found.program.stacks
    assert not found.fits
    assert not any("jax.shard_map" in note for note in found.proof.notes)
