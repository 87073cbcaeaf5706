"""Reading a lowered module: bytes, shardings by scope, donation, memories, loops."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stowax import _mlir
from stowax._predict import _flatten
from stowax._records import _lowered

DEVICES = 4
BATCH, WIDTH, LAYERS = 16, 64, 3
F32 = 4


@pytest.fixture(scope="module")
def mesh():
    return Mesh(jax.devices()[:DEVICES], ("data",))


def sharded(mesh, shape, *axes, kind=None, dtype=jnp.float32):
    sharding = NamedSharding(mesh, PartitionSpec(*axes), memory_kind=kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def scanned(weights, x):
    def body(carry, weight):
        with jax.named_scope("stowax.value.0.1"):
            product = jnp.dot(carry, weight)
        with jax.named_scope("stowax.value.0.2"):
            out = jax.nn.relu(product)  # a jitted function: lowered to a call
        return out, jax.device_put(product, jax.memory.Space.Host)

    return jax.lax.scan(body, x, weights)


def read(function, *specs, donate=()):
    traced = jax.jit(function, donate_argnums=donate).trace(*specs)
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    before = str(module)
    graph = _mlir.read_graph(module)
    assert str(module) == before
    return graph


def test_scopes_in_a_loop_and_in_a_call_have_the_bytes_of_one_device(mesh):
    graph = read(
        scanned,
        sharded(mesh, (LAYERS, WIDTH, WIDTH)),
        sharded(mesh, (BATCH, WIDTH), "data"),
    )
    found = _lowered.shards_by_scope(graph, "stowax.value.0.")
    expected = _lowered.ScopedSharding(
        device_bytes=BATCH * WIDTH * F32 // DEVICES,
        shards=DEVICES,
        shape=(BATCH, WIDTH),
        dtype="f32",
    )
    assert found == {"stowax.value.0.1": expected, "stowax.value.0.2": expected}


def test_a_scope_means_its_forward_value_not_what_the_backward_pass_made_of_it(mesh):
    def loss(weight, x):
        with jax.named_scope("stowax.value.0.7"):
            product = jnp.dot(x, weight)
        return jnp.sum(jnp.sin(product))

    graph = read(
        jax.grad(loss),
        sharded(mesh, (WIDTH, 2 * WIDTH)),
        sharded(mesh, (BATCH, WIDTH), "data"),
    )
    (scoped,) = _lowered.shards_by_scope(graph, "stowax.value.").values()
    assert scoped.shape == (BATCH, 2 * WIDTH)


def test_uneven_shards_are_rounded_up(mesh):
    graph = read(
        lambda x: jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec("data"))
        ),
        sharded(mesh, (10, WIDTH)),
    )
    by_number = {
        value.number: value for op in graph.main.operations for value in op.results
    }
    value = by_number[graph.main.results[0]]
    assert value.bytes == 10 * WIDTH * F32
    assert value.device_bytes == 3 * WIDTH * F32  # ceil(10 / 4) rows


def test_a_stack_of_host_values_is_in_host_memory_and_its_neighbour_is_not(mesh):
    def both(weights, x):
        def body(carry, weight):
            out = jnp.dot(carry, weight)
            return out, (jax.device_put(out, jax.memory.Space.Host), jnp.sin(out))

        _, (stack, kept) = jax.lax.scan(body, x, weights)
        return jnp.sum(jax.device_put(stack, jax.memory.Space.Device)), kept

    graph = read(
        both,
        sharded(mesh, (LAYERS, WIDTH, WIDTH)),
        sharded(mesh, (BATCH, WIDTH), "data"),
    )
    flat = _flatten.flatten(graph)
    (loop,) = [n for n in flat.entry.nodes if n.name == "stablehlo.while"]
    stacks = [r for r in loop.results if flat.values[r].shape == (LAYERS, BATCH, WIDTH)]
    assert sorted(r in flat.host for r in stacks) == [False, True]
    assert flat.entry.results[1] not in flat.host


def test_host_arguments_and_donation_are_read(mesh):
    graph = read(
        lambda state, x: (state * 2, x),
        sharded(mesh, (BATCH, WIDTH), "data"),
        sharded(mesh, (BATCH, WIDTH), "data", kind="pinned_host"),
        donate=0,
    )
    assert [value.memory for value in graph.main.arguments] == ["device", "host"]
    assert graph.result_memory == ("device", "host")
    assert [donation.argument for donation in graph.donations] == [0]


def test_one_device_needs_no_mesh():
    spec = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
    graph = _mlir.read_graph(
        jax.jit(lambda x: x + x, donate_argnums=0).lower(spec).compiler_ir()
    )
    assert graph.main.arguments[0].device_bytes == BATCH * WIDTH * 2
    assert graph.donations == (_lowered.Donation(argument=0, output=0),)


def test_what_a_loop_hands_on_unchanged_is_not_carried(mesh):
    graph = read(
        scanned,
        sharded(mesh, (LAYERS, WIDTH, WIDTH)),
        sharded(mesh, (BATCH, WIDTH), "data"),
    )
    flat = _flatten.flatten(graph)
    (loop,) = [n for n in flat.entry.nodes if n.name == "stablehlo.while"]
    shapes = [flat.values[r].shape for r in loop.results]
    assert (LAYERS, WIDTH, WIDTH) not in shapes
    assert flat.entry.arguments[0] in loop.blocks[1].captured()


@pytest.mark.parametrize("name", ["square", "erf", "erf_inv", "nextafter"])
def test_what_shardy_has_no_rule_for_is_split_as_its_operands_are(mesh, name):
    def step(x):
        both = (x, x * 2) if name == "nextafter" else (x,)
        with jax.named_scope("stowax.value.0.1"):
            return getattr(jax.lax, name)(*both) + 1

    graph = read(step, sharded(mesh, (BATCH, WIDTH), "data"))
    found = _lowered.shards_by_scope(graph, "stowax.value.0.")["stowax.value.0.1"]
    assert found.device_bytes == BATCH * WIDTH * F32 // DEVICES
    names = [operation.name for operation in graph.main.operations]
    assert f"chlo.{name}".replace("nextafter", "next_after") in names
