"""Parameters that a step reads and does not update: frozen weights in host memory.

They are fetched layer by layer like others, and nothing else happens to them: no
gradient, no update, no donation. Numbers are of the CPU, bytes and host computations of
programs compiled for chips that are not there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from planned_models import kinds, plan, spec

LAYERS, WIDTH, RANK, ROWS = 4, 1024, 16, 64
MATRIX = WIDTH * WIDTH * 4
FROZEN = 2 * LAYERS * MATRIX
PARAMETER = {"parameter": "offload"}


def layer(x, base, tuned):
    hidden = jnp.tanh(x @ base["in"] + (x @ tuned["down"]) @ tuned["up"])
    return x + hidden @ base["out"]


def scan(base, tuned, x):
    return jax.lax.scan(lambda x, w: (layer(x, *w), None), x, (base, tuned))[0]


def second_axis(base, tuned, x):
    return scan(jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), base), tuned, x)


def mixed(base, tuned, x):
    """Frozen weights in bfloat16, as they are often kept, and cast before the loop."""
    return scan(jax.tree.map(lambda w: w.astype(jnp.float32), base), tuned, x)


def loop(base, tuned, x):
    for pair in zip(base, tuned, strict=True):
        x = layer(x, *pair)
    return x


FORMS = {"scan": scan, "second axis": second_axis, "mixed": mixed, "loop": loop}


def loss_of(form):
    @stowax.stow
    def loss_fn(tuned, base, x):
        return jnp.mean((FORMS[form](base, tuned, x) - 1) ** 2)

    return loss_fn


def tuning(form):
    """Low-rank weights are trained with momentum; the rest is another argument."""

    def step(base, tuned, momentum, x):
        loss, grads = jax.value_and_grad(loss_of(form))(tuned, base, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, tuned, momentum), momentum, loss

    return step


def carried(form):
    """The same with everything in one state, the frozen part returned as it came."""

    def step(state, x):
        base, tuned = state["base"], state["tuned"]
        loss, grads = jax.value_and_grad(loss_of(form))(tuned, base, x)
        tuned = jax.tree.map(lambda p, g: p - 0.1 * g, tuned, grads)
        return {"base": base, "tuned": tuned}, loss

    return step


def handed_through(form):
    """The frozen part goes through what is differentiated, as in Flax NNX."""

    def step(state, x):
        def loss_fn(tuned, base):
            return jnp.mean((FORMS[form](base, tuned, x) - 1) ** 2), base

        (loss, base), grads = jax.value_and_grad(stowax.stow(loss_fn), has_aux=True)(
            state["tuned"], state["base"]
        )
        tuned = jax.tree.map(lambda p, g: p - 0.1 * g, state["tuned"], grads)
        return {"base": base, "tuned": tuned}, loss

    return step


def shapes(form):
    base = {"in": spec(WIDTH, WIDTH), "out": spec(WIDTH, WIDTH)}
    tuned = {"down": spec(WIDTH, RANK), "up": spec(RANK, WIDTH)}
    if form == "loop":
        return [base] * LAYERS, [tuned] * LAYERS
    kind = jnp.bfloat16 if form == "mixed" else jnp.float32
    axis = 1 if form == "second axis" else 0

    def stacked(s):
        shape = [*s.shape]
        shape.insert(axis, LAYERS)
        return spec(*shape, dtype=kind)

    return (
        jax.tree.map(stacked, base),
        jax.tree.map(lambda s: spec(LAYERS, *s.shape), tuned),
    )


def arrays(tree, seed=0):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        structure,
        [
            (0.02 * jax.random.normal(key, s.shape)).astype(s.dtype)
            for key, s in zip(keys, leaves, strict=True)
        ],
    )


def batch(number):
    return jax.random.normal(jax.random.key(number), (ROWS, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mixed", "second axis", "loop"])
def test_steps_are_those_without_a_plan_and_the_frozen_part_stays_usable(form):
    base, tuned = shapes(form)
    step = tuning(form)
    found = plan(step, base, tuned, tuned, spec(ROWS, WIDTH), pin=PARAMETER)
    assert 0 not in found.program.donate_argnums
    base, tuned = arrays(base), arrays(tuned, 1)
    mine = tuned, jax.tree.map(jnp.zeros_like, tuned)
    theirs = jax.tree.map(jnp.copy, mine)
    hosted = found.place(base)
    assert kinds(hosted) == {"pinned_host"}
    planned, plain = found.apply(step), jax.jit(step)
    for number in range(3):
        *theirs, loss = plain(base, *theirs, batch(number))
        *mine, my_loss = planned(hosted, *mine, batch(number))
        np.testing.assert_allclose(my_loss, loss, rtol=1e-4)
    for left, right in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)
    # Neither deleted nor moved: an evaluation reads them next.
    for left, right in zip(jax.tree.leaves(hosted), jax.tree.leaves(base), strict=True):
        assert left.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "target"), [("scan", "h200"), ("loop", "v5p-8")])
def test_two_layers_of_the_frozen_part_are_on_the_device(form, target):
    base, tuned = shapes(form)
    step, args = tuning(form), (base, tuned, tuned, spec(ROWS, WIDTH))
    stays = plan(step, *args, target=target)
    found = plan(step, *args, target=target, pin=PARAMETER)
    assert stays.device_bytes > FROZEN
    assert found.host_bytes == FROZEN
    # Two layers of two matrices are in flight.
    saved = stays.device_bytes - found.device_bytes
    assert saved >= FROZEN - 2 * 2 * MATRIX
    program = stowax.target(target).compile(found.apply(step), *found.specs(*args))
    inspection = stowax.inspect(program)
    assert not [h for h in inspection.hazards if h.kind == "host-compute"]
    # Forward and backward they come in, and nothing of them goes out.
    directions = {"host-to-device": 0, "device-to-host": 0}
    for transfer in inspection.transfers:
        directions[transfer.direction] += transfer.total_bytes
    assert directions["device-to-host"] == 0
    assert 2 * FROZEN <= directions["host-to-device"] <= 2.5 * FROZEN + 4 * MATRIX


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "returned"), [("scan", carried), ("loop", handed_through)]
)
def test_what_is_returned_as_it_came_is_the_same_buffer(form, returned):
    base, tuned = shapes(form)
    step, args = returned(form), ({"base": base, "tuned": tuned}, spec(ROWS, WIDTH))
    found = plan(step, *args, pin=PARAMETER)
    program = stowax.target("h200").compile(found.apply(step), *found.specs(*args))
    host = stowax.inspect(program).memory.host
    assert (host.argument, host.output, host.alias, host.temp) == (FROZEN,) * 3 + (0,)
    moves = [t for t in program_transfers(program) if t.direction == "device-to-host"]
    assert not moves
    state = arrays(args[0])
    before, theirs = (
        jax.tree.map(np.asarray, state["base"]),
        jax.tree.map(jnp.copy, state),
    )
    state = found.place(state)
    planned, plain = found.apply(step), jax.jit(step)
    for number in range(2):
        state, loss = planned(state, batch(number))
        theirs, expected = plain(theirs, batch(number))
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert kinds(state["base"]) == {"pinned_host"}
    for left, right in zip(
        jax.tree.leaves(state["base"]), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(left, right)


def program_transfers(program):
    return stowax.inspect(program).transfers


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5p-8"])
def test_a_frozen_tower_before_the_trained_layers_is_fetched_once(target):
    """No gradient goes through it, so its loop is no stack of the plan's."""
    base, tuned = shapes("scan")

    @stowax.stow
    def loss_fn(tuned, tower, x):
        x, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w["in"]) @ w["out"], None), x, tower
        )
        return jnp.mean(scan(jax.tree.map(jnp.ones_like, tower), tuned, x) ** 2)

    def step(tuned, tower, x):
        loss, grads = jax.value_and_grad(loss_fn)(tuned, tower, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, tuned, grads), loss

    args = (tuned, base, spec(ROWS, WIDTH))
    found = plan(step, *args, target=target, pin={"args?1?*": "offload"})
    assert found.host_bytes == FROZEN
    program = stowax.target(target).compile(found.apply(step), *found.specs(*args))
    moved = {"host-to-device": 0, "device-to-host": 0}
    for transfer in program_transfers(program):
        moved[transfer.direction] += transfer.total_bytes
    # Once forward, and a layer more where the first is fetched before the loop.
    assert FROZEN <= moved["host-to-device"] <= FROZEN + 2 * MATRIX
    assert moved["device-to-host"] == 0
