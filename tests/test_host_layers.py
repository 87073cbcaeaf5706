"""Layers whose parameters are in host memory give the numbers of those on the device.

A step is traced with everything on the device and run again with weights, and their
gradients, in host memory (`host_weights.host_step`): operation by operation
the results are the same bits. What it saves is read from programs compiled for chips
that are not there. Together about 60 s, most of it compiling.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import host_weights
import stowax
from benchmarks.models.host_layers import FORMS, specs_of
from host_weights import compile_hosted, host_step
from layered import LAYERS, WIDTH, X, draw
from planned_models import target_or_skip
from planned_steps import CHOICES, assert_same_bits, at_random, unfused
from stowax._layers._host_layers import (
    Cast,
    HostArray,
    Transpose,
    can_stream,
    host_layers,
)
from stowax._mark import stow

W = draw(1, LAYERS, WIDTH, WIDTH)
V = draw(2, LAYERS, WIDTH, 2 * WIDTH)
B = draw(3, LAYERS, WIDTH)


def body(x, p):
    w, v, b = p
    return x + jnp.tanh(x @ w + b[None, :]) @ v @ v.T, jnp.sum(x)


def host_sharding():
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def check(loss, weights, *others, host=(0, 1), argnums=0, stacked=False, **how):
    """Runs loss and gradients with the weights `host` in host memory, and as written.

    `host` counts the leaves of `weights`; those that are lists of layers go whole.
    Their gradients come back in host memory, stacked for an unrolled model (`stacked`).
    """
    step = jax.value_and_grad(stow(loss), argnums=argnums)
    parts = [len(jax.tree.leaves(w)) for w in weights]
    starts = np.cumsum([0, *parts])
    hosted = [k for i in host for k in range(starts[i], starts[i + 1])]
    run = host_step(step, (weights, *others), hosted, **how)
    flat = [
        jax.device_put(leaf, host_sharding()) if k in hosted else leaf
        for k, leaf in enumerate(jax.tree.leaves((weights, *others)))
    ]
    with unfused():
        value, grads = step(weights, *others)
        got = run(*flat)
    if stacked:
        grads = [jnp.stack(g) if i in host else g for i, g in enumerate(grads)]
    expected = [value, *jax.tree.leaves(grads)]
    assert_same_bits(got, expected)
    compiled = jax.jit(run)(*flat)
    for a, b in zip(compiled, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2
        )
    return run, compiled


def in_host_memory(arrays):
    return [a.sharding.memory_kind == "pinned_host" for a in arrays]


def scanned(weights, x, prepare=lambda w: w, reverse=False):
    y, sums = lax.scan(body, x, prepare(weights), reverse=reverse)
    return jnp.mean(jnp.square(y)) + jnp.mean(
        sums * jnp.arange(LAYERS, dtype=sums.dtype)
    )


WAYS = {
    "in time": {},
    "lean": {"lean": True},
    "at once": {"lean": True, "late": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])
def test_a_scan_over_the_first_axis(way, reverse):
    loss = functools.partial(scanned, reverse=reverse)
    _, got = check(loss, [W, V, B], X, **WAYS[way])
    assert in_host_memory(got) == [False, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [*CHOICES, "random 1", "random 2"])
def test_under_any_decisions(choice):
    number = choice.removeprefix("random ")
    choose = at_random(int(number)) if number != choice else CHOICES[choice]
    check(scanned, [W, V, B], X, choose=choose)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_scan_over_other_axes(way):
    def prepare(p):
        return [jnp.moveaxis(p[0], 1, 0), jnp.moveaxis(p[1], 2, 0), p[2]]

    weights = [jnp.moveaxis(W, 0, 1), jnp.moveaxis(V, 0, 2), B]
    loss = functools.partial(scanned, prepare=prepare)
    _, got = check(loss, weights, X, **WAYS[way])
    assert [g.shape for g in got[1:]] == [w.shape for w in weights]
    assert in_host_memory(got) == [False, True, True, False]


@pytest.mark.slow
def test_casts_and_transpositions_before_the_loop():
    def prepare(p):
        w = jnp.transpose(p[0], (2, 1, 0)).astype(jnp.bfloat16)
        v = jnp.swapaxes(p[1].astype(jnp.bfloat16), 1, 2)
        return [w, v, p[2].astype(jnp.bfloat16)]

    weights = [jnp.transpose(W, (2, 1, 0)), jnp.swapaxes(V, 1, 2), B]
    loss = functools.partial(scanned, prepare=prepare)
    run, got = check(loss, weights, X.astype(jnp.bfloat16), host=(0, 1, 2))
    assert [g.dtype for g in got[1:]] == [jnp.float32] * 3
    # Nothing is done to a whole array: that would be the host's processor's work.
    text = str(jax.make_jaxpr(run)(*weights, X.astype(jnp.bfloat16)))
    assert f"bf16[{LAYERS},{WIDTH},{WIDTH}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_unrolled_model(way):
    def loss(weights, x):
        ws, vs, bs = weights
        total = 0.0
        for k in range(LAYERS):
            x, s = body(x, [ws[k], vs[k].astype(x.dtype), bs[k]])
            total = total + s
        return jnp.mean(jnp.square(x)) + total

    weights = [[*W], [*V.astype(jnp.bfloat16)], [*B]]
    _, got = check(loss, weights, X, stacked=True, **WAYS[way])
    assert [g.dtype for g in got[1:3]] == [jnp.float32, jnp.bfloat16]
    assert in_host_memory(got) == [False, True, True, *[False] * LAYERS]


@pytest.mark.slow
def test_frozen_weights():
    def loss(v, weights, x):
        return scanned([weights[0], v[0], weights[1]], x)

    step = jax.value_and_grad(stow(loss))
    args = [V], [W, B], X
    run = host_step(step, args, [0, 1])
    flat = jax.tree.leaves(args)
    placed = [jax.device_put(f, host_sharding()) for f in flat[:2]] + flat[2:]
    with unfused():
        assert_same_bits(run(*placed), jax.tree.leaves(step(*args)))
    (backward,) = [e for e in run.boundary.values() if e.kind == "backward"]
    assert sorted(backward.gradients.values()) == [1]


@pytest.mark.slow
def test_shared_constants_and_gradients_left_on_the_device():
    def loss(weights, x, shared):
        def layer(x, p):
            return body(x @ shared, p)[0] + jnp.sum(shared), None

        return jnp.sum(lax.scan(layer, x, weights)[0])

    shared = draw(9, WIDTH, WIDTH)

    def both(weights, x, shared):
        return loss(weights, x, shared)

    step = jax.value_and_grad(stow(both), argnums=(0, 2))
    args = [W, V, B], X, shared
    for gradients in (True, False):
        run = host_step(step, args, [0, 1], gradients=gradients)
        flat = jax.tree.leaves(args)
        placed = [jax.device_put(f, host_sharding()) for f in flat[:2]] + flat[2:]
        with unfused():
            got = run(*placed)
            assert_same_bits(got, jax.tree.leaves(step(*args)))
        wanted = [False, gradients, gradients, False, False]
        assert in_host_memory(got) == wanted


@pytest.mark.slow
def test_a_stack_that_is_run_twice_and_evaluated():
    @stow
    def loss(weights, x):
        return scanned(weights, x)

    def step(weights, x):
        one = jax.value_and_grad(loss)(weights, x)
        other = jax.value_and_grad(loss)(weights, 2 * x)
        return one, loss(weights, x + 1), other

    args = [W, V, B], X
    run = host_step(step, args, [0, 1])
    kinds = [e.kind for e in run.boundary.values()]
    assert sorted(kinds) == ["backward"] * 2 + ["forward"] * 2 + ["plain"]
    flat = jax.tree.leaves(args)
    placed = [jax.device_put(f, host_sharding()) for f in flat[:2]] + flat[2:]
    with unfused():
        assert_same_bits(run(*placed), jax.tree.leaves(step(*args)))


def test_what_is_registered_is_what_is_traced():
    step = jax.value_and_grad(stow(scanned))
    run = host_step(step, ([W, V, B], X), [0])
    equations = {
        e.params["name"]: e
        for e in run.jaxpr.eqns
        if e.primitive.name in ("jit", "pjit") and e.params["name"] in run.boundary
    }
    assert len(equations) == len(run.boundary) == 2
    for name, emission in run.boundary.items():
        assert name.startswith(f"stowax_{emission.kind}.{emission.stack.name}")
        for found, specs in (
            (equations[name].invars, emission.inputs),
            (equations[name].outvars, emission.outputs),
        ):
            got = [(v.aval.shape, v.aval.dtype) for v in found]
            assert got == [(s.shape, s.dtype) for s in specs]
        for numbers, w in zip(emission.layer_inputs, (W, V, B), strict=True):
            assert [emission.inputs[n].shape for n in numbers] == [w.shape]


@pytest.mark.slow
def test_the_axis_of_the_layers_is_followed_through_the_chain():
    rng = np.random.default_rng(0)
    for _ in range(20):
        chain, rank = [], int(rng.integers(1, 5))
        for _ in range(int(rng.integers(0, 4))):
            order = tuple(int(k) for k in rng.permutation(rank))
            chain.append(Transpose(order=order))
        array = jnp.arange(float(np.prod(range(2, 2 + rank)))).reshape(
            range(2, 2 + rank)
        )
        whole = array
        for step in chain:
            whole = whole.transpose(step.order)
        layers = host_layers(
            [HostArray(array=array, chain=tuple(chain))], separate=False
        )
        gradients = layers.gradients
        for k in range(whole.shape[0]):
            part = layers.fetch(k)
            np.testing.assert_array_equal(layers.prepare(part), whole[k])
            np.testing.assert_array_equal(gradients.finish(whole[k]), part)
        assert HostArray(array=array, chain=tuple(chain)).shape == whole.shape


def test_what_a_loop_cannot_do_to_one_layer_is_refused():
    array = HostArray(array=W)
    jaxpr = jax.make_jaxpr(
        lambda w: [w * 2, w.astype(jnp.bfloat16), w.transpose(1, 0, 2)]
    )(W)
    product, cast, moved = [array.then(e) for e in jaxpr.eqns]
    assert product is None
    assert cast.chain == (Cast(source=W.dtype, target=jnp.dtype(jnp.bfloat16)),)
    assert (cast.dtype, moved.shape) == (jnp.bfloat16, (WIDTH, LAYERS, WIDTH))


def test_which_arrays_can_stream():
    def part(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    for shape, on_tpu in (((64, 128), True), ((128,), False), ((3, 100), False)):
        assert can_stream(part(*shape), platform="tpu") == on_tpu
        assert can_stream(part(*shape), platform="gpu")


SIZES = {"layers": 8, "width": 2048, "hidden": 4096, "rows": 64}
MATRIX = 2048 * 4096 * 2  # bytes, bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["v5p-8", "h200"])
def test_bytes_of_compiled_programs(name, form, usual_promotion):
    machine = target_or_skip(name)
    compiled = compile_hosted(machine, form, specs_of(form, **SIZES))
    found = stowax.inspect(compiled)
    assert [h for h in found.hazards if h.kind == "host-compute"] == []
    # Two of the layer's weights and gradients in flight or in use, one more on its way
    # out, and activations: a layer's are 64 x (2048 + 4096) x 2 bytes. A TPU's figure
    # has the places of both loops, where they differ.
    places = 4 if form == "loop" and name == "v5p-8" else 3
    assert found.memory.device.total < (places + 0.5) * MATRIX
    memory = compiled.memory_analysis()
    whole = 2 * SIZES["layers"] * MATRIX
    assert memory.host_argument_size_in_bytes == whole
    assert memory.host_output_size_in_bytes == whole
    gone = copies_of(found, "gradients")
    assert {t.bytes for t in gone} == {MATRIX}
    assert all(t.asynchronous for t in gone)
    assert sum(t.trips for t in gone) >= 2 * SIZES["layers"]
    if form == "loop":
        # The copies are inside of branches, and have lost their names there.
        lines = compiled.as_text().splitlines()
        named = [x for x in lines if " conditional(" in x and "stowax.weights." in x]
        assert len(named) == 4
        return
    brought = copies_of(found, "weights")
    assert {t.bytes for t in brought} == {MATRIX}
    assert all(t.asynchronous for t in brought)
    assert sum(t.trips for t in brought) == 4 * SIZES["layers"]


@pytest.mark.slow
@pytest.mark.parametrize("lean", [True, False])
def test_shards_travel_as_they_lie(lean, usual_promotion):
    machine = target_or_skip("v5p-8")
    mesh = machine.mesh((4,), ("data",))
    host = NamedSharding(mesh, PartitionSpec(None, "data"), memory_kind="pinned_host")
    rows = NamedSharding(mesh, PartitionSpec("data"), memory_kind="device")
    weights, x = arguments = specs_of("scan", **SIZES)
    step = host_weights.step_of("scan")
    run = host_step(step, arguments, dict.fromkeys(range(2), host), lean=lean)
    compiled = machine.compile(
        jax.jit(run, out_shardings=[NamedSharding(mesh, PartitionSpec()), host, host]),
        *[w.update(sharding=host) for w in weights],
        x.update(sharding=rows),
        compiler_options={"xla_disable_automatic_host_compute_offload": True},
    )
    found = stowax.inspect(compiled)
    assert [h for h in found.hazards if h.kind == "host-compute"] == []
    for what in ("weights", "gradients"):
        assert {t.bytes for t in copies_of(found, what)} == {MATRIX / 4}
    memory = compiled.memory_analysis()
    whole = 2 * SIZES["layers"] * MATRIX / 4
    assert memory.host_argument_size_in_bytes == whole
    assert memory.host_output_size_in_bytes == whole


def copies_of(found, what):
    return [t for t in found.transfers if f"stowax.{what}." in (t.op_name or "")]


def keep_all(stack, body):
    return dict.fromkeys(host_weights.offload_all(stack, body), "keep")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5p-8", "h200"])
@pytest.mark.usefixtures("full_effort")
def test_copies_hide_behind_the_layers_where_there_is_work(name, usual_promotion):
    machine = target_or_skip(name)
    # A layer's products take several times as long as its weights on the link.
    specs = specs_of("scan", **{**SIZES, "rows": 2**17})
    waits = {}
    for lean in (True, False):
        compiled = compile_hosted(
            machine, "scan", specs, lean=lean, late=not lean, choose=keep_all
        )
        found = stowax.inspect(compiled)
        assert [h for h in found.hazards if h.kind == "host-compute"] == []
        waits[lean] = found.timeline.exposed_seconds
    link = found.timeline.host_to_device_seconds / (2 * SIZES["layers"] + 2)
    assert waits[False] < 6 * link  # the first and last layers', of both passes
    assert waits[True] > 2 * waits[False]
