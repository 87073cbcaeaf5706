"""Meshes with Explicit axes, which `jax.make_mesh` makes: types say how arrays lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import stowax
from stowax import _jax
from stowax._errors import ArgumentError
from stowax._jaxprs._canonical import outline

LAYERS, WIDTH, ROWS, DEVICES = 4, 256, 64, 8
P = PartitionSpec
TX = optax.adam(1e-2)
EVERYTHING = {"optimizer state": "offload", "parameter": "offload"}


def arrays_over(mesh, make):
    def array(seed, *shape, spec):
        return make(seed, shape, NamedSharding(mesh, spec))

    params = {
        name: array(k, LAYERS, WIDTH, WIDTH, spec=P(None, "d"))
        for k, name in enumerate(("up", "down"))
    }
    return params, array(2, ROWS, WIDTH, spec=P("d"))


def spec_of(seed, shape, sharding):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def number(seed, shape, sharding):
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape) / 16, sharding)


def specs(mesh):
    params, x = arrays_over(mesh, spec_of)

    def spread(s):
        if s.ndim == 0:
            return s
        sharding = NamedSharding(mesh, P(None, "d"))
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)

    return (params, jax.tree.map(spread, jax.eval_shape(TX.init, params))), x


def layer(x, p):
    p = jax.tree.map(lambda w: jax.sharding.reshard(w, P()), p)  # gathered, as in FSDP
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None


@stowax.stow
def loss_fn(params, x):
    return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))


def step(state, x):
    params, moments = state
    value, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, moments = TX.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def mesh_over(devices):
    array = np.array(devices[:DEVICES], dtype=object)
    return Mesh(array, ("d",), axis_types=(AxisType.Explicit,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "pin", "offloaded"),
    [
        ("1MiB", EVERYTHING, {"parameter", "optimizer state"}),
        (
            "2MiB",
            {"layer input*": "offload", "*tanh*": "recompute"},
            {"activation"},
        ),
    ],
)
def test_a_step_over_explicit_axes_is_planned(budget, pin, offloaded, usual_promotion):
    target = stowax.target("h200x8")
    planned_for, here = mesh_over(target.devices), mesh_over(jax.devices())
    with jax.set_mesh(planned_for):
        plan = stowax.plan(
            step, *specs(planned_for), target=target, budget=budget, pin=pin
        )
    assert not any("as it is written" in note for note in plan.proof.notes)
    moved = {d.role for d in plan.decisions if d.decision == "offload"}
    assert moved >= offloaded
    params, x = arrays_over(here, number)
    plain = params, TX.init(params)
    mine = plan.place(jax.tree.map(jnp.copy, plain))
    with jax.set_mesh(here):
        run, jitted = plan.apply(step), jax.jit(step)
        for _ in range(3):
            (mine, value), (plain, expected) = run(mine, x), jitted(plain, x)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)
        assert a.ndim == 0 or a.sharding.spec == b.sharding.spec


def test_a_constraint_over_the_mesh_that_is_set():
    """Its sharding names an abstract mesh, which has no devices."""
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))

    def layers(x):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec("data"))
        return jnp.sin(x)

    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(layers)(jnp.ones((8, 4)))
    assert any("sharding_constraint" in line for line in outline(jaxpr))


def test_results_lie_as_a_jitted_step_was_told(usual_promotion):
    """Types say how they lie inside of the step, and `out_shardings` how outside."""
    mesh = mesh_over(jax.devices())
    params, x = arrays_over(mesh, number)
    told = (
        NamedSharding(mesh, P(None, None, "d")),
        {"up": NamedSharding(mesh, P()), "down": None},
    )

    def sgd(params, x):
        value, grads = jax.value_and_grad(loss_fn)(params, x)
        means = jax.tree.map(jnp.mean, params)
        return jax.tree.map(lambda p, g: p - g, params, grads), {**grads}, value, means

    written = jax.jit(sgd, out_shardings=(*told, None, None))
    planned = stowax.jit(
        written, pin={"activation": "recompute"}, compiles=4, progress=False
    )
    with jax.set_mesh(mesh):
        expected, got = written(params, x), planned(params, x)
    assert planned.plan.decisions
    for a, b in zip(*map(jax.tree.leaves, (expected, got)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
        assert b.sharding.is_equivalent_to(a.sharding, a.ndim)


def test_what_is_made_of_a_number_is_typed_where_no_mesh_is_set(usual_promotion):
    """From JAX 0.11 on, a broadcast number is on no mesh unless the mesh is set."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh.abstract_mesh, P(None, "d"))
    found = []

    def step(x):
        number = jnp.float32(0)
        found.append(jax.typeof(_jax.broadcast(number, (4, 8), sharding)))
        found.append(jax.typeof(_jax.empty_on_host((4, 8), jnp.float32, sharding)))
        return x

    jax.jit(step).trace(jax.device_put(jnp.ones(8), NamedSharding(mesh, P("d"))))
    assert [aval.sharding.spec for aval in found] == [P(None, "d")] * 2
    assert [aval.memory_space for aval in found] == [
        jax.memory.Space.Device,
        jax.memory.Space.Host,
    ]


def layer_of_two(x, p):
    """As attention's, parameters have their heads in an axis of their own."""
    up = jnp.einsum("rk,hkn->rhn", x, p["up"], out_sharding=P("d", "e"))
    up = jnp.tanh(up)
    return x + jnp.einsum("rhn,hkn->rk", up, p["down"], out_sharding=P("d"))


def step_of_two(params, moments, x):
    def loss(params):
        if isinstance(params, dict):
            out, _ = jax.lax.scan(lambda x, p: (layer_of_two(x, p), None), x, params)
            return jnp.mean(jnp.square(out))
        out = x
        for p in params:
            out = layer_of_two(out, p)
        return jnp.mean(jnp.square(out))

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = TX.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "form"),
    [
        ("h200", "scan"),
        pytest.param("v5p-8", "loop", marks=pytest.mark.slow),
    ],
)
def test_axes_of_one_device_are_in_types_all_the_same(target, form, usual_promotion):
    """Parameters are spread over axes that a mesh of one device has by name."""
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((1, 1), ("d", "e"), kinds, devices=jax.devices()[:1])

    def parameters(*lead, spec, seed):
        place = NamedSharding(mesh, P(*[None] * len(lead), *spec))
        make = lambda k: number(seed + k, (*lead, 2, WIDTH, WIDTH // 2), place)
        return {"up": make(0), "down": make(1)}

    stacked = form == "scan"
    params = (
        parameters(LAYERS, spec=("e", "d"), seed=0)
        if stacked
        else [parameters(spec=("e", "d"), seed=2 * k) for k in range(LAYERS)]
    )
    plain = params, TX.init(params)
    x = number(9, (ROWS, WIDTH), NamedSharding(mesh, P("d")))
    with jax.set_mesh(mesh):
        planned = stowax.jit(
            step_of_two,
            target=target,
            pin=EVERYTHING,
            budget="4MiB" if stacked else "12MiB",
            donate_argnums=(0, 1),
            progress=False,
        )
        mine = jax.tree.map(jnp.copy, plain)
        for _ in range(3):
            *mine, value = planned(*mine, x)
            *plain, expected = jax.jit(step_of_two)(*plain, x)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    kinds = {
        a.role for a in planned.plan.program.arguments if a.memory_kind == "pinned_host"
    }
    assert kinds == {"parameter", "optimizer state"}
    for a, b in zip(*map(jax.tree.leaves, (mine, plain)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)
        assert a.ndim == 0 or a.sharding.spec == b.sharding.spec


@pytest.mark.slow
def test_state_stays_where_jax_forgets_the_memory_of_results(usual_promotion):
    """Over a mesh with axes of both kinds it would be overwritten on the device."""
    mesh = jax.make_mesh(
        (2, 1),
        ("d", "e"),
        (AxisType.Explicit, AxisType.Auto),
        devices=jax.devices()[:2],
    )
    place = NamedSharding(mesh, P())
    params = number(0, (LAYERS, WIDTH, WIDTH), place)
    moments, x = 0 * params, number(1, (ROWS, WIDTH), place)

    def momentum(params, moments, x):
        def loss(params):
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
            return jnp.mean(out**2)

        value, grads = jax.value_and_grad(loss)(params)
        moments = 0.9 * moments + grads
        return params - 0.1 * moments, moments, value

    wishes = {"target": "h200x8", "donate_argnums": (0, 1), "progress": False}
    with jax.set_mesh(mesh):
        pin = {"optimizer state": "offload"}
        pinned = stowax.jit(momentum, pin=pin, budget="1MiB", **wishes)
        with pytest.raises(ArgumentError, match="has Explicit axes and Auto ones"):
            pinned(params, moments, x)
        pin = {"activation": "recompute"}
        planned = stowax.jit(momentum, pin=pin, budget="1GiB", **wishes)
        mine, plain = (params + 0, moments + 0), (params, moments)
        for _ in range(3):
            *mine, value = planned(*mine, x)
            *plain, expected = jax.jit(momentum)(*plain, x)
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert {a.memory_kind for a in planned.plan.program.arguments} == {"device"}


def test_a_loss_of_each_example_runs_in_blocks_of_tokens():
    """Its sums over tokens are spread as the examples are: so is what they start from.

    The mesh has one device, as that of a script that was written for more.
    """
    mesh = Mesh(jax.devices()[:1], ("d",), axis_types=(AxisType.Explicit,))

    def loss(params, x, labels):
        logits = x @ params["head"]
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).sum(axis=1)

    def train(params, x, labels):
        grads = jax.grad(lambda *args: loss(*args).mean())(params, x, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def array(*shape, dtype=jnp.float32, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    examples, tokens, words = 4, 1024, 4096
    params = {"head": array(WIDTH, words, spec=P())}
    x = array(examples, tokens, WIDTH, spec=P("d"))
    labels = array(examples, tokens, dtype=jnp.int32, spec=P("d"))
    budget = 4 * examples * tokens * words
    found = stowax.plan(train, params, x, labels, target="h200", budget=budget)
    assert found.fits
    assert "blocks of tokens" in str(found)
