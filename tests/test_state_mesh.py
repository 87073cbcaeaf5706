"""Optimizer state in host memory under a mesh: bytes per device, no traffic, numbers.

Bytes and collectives are those of programs compiled for chips that are not there.
Numbers, partitions and memory kinds are of eight CPU devices, which run the same
programs.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stowax
from planned_models import plan, target_or_skip
from stowax._hlo._program import read_program
from stowax._records._program import COLLECTIVES

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, ROWS = 2, 64
MIB = 2**20
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
MOMENTS = 2
OFFLOAD = {"optimizer state": "offload"}
AXES = ("fsdp", "tensor")


def axes(shape):
    return AXES[: len(shape)]


def shapes(width):
    """One large weight, cut along all of the mesh, and small ones on every device."""
    return {
        "mix": (LAYERS, width, 4 * width),
        "scale": (LAYERS, width),
        "gain": (LAYERS,),
    }


@stowax.stow
def loss_fn(params, x):
    def layer(x, w):
        hidden = jax.nn.gelu(x @ w["mix"]) * w["gain"]
        return x + (hidden @ w["mix"].T) * w["scale"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def step(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def arguments(mesh, width):
    """Specs of (params, state, x): moments lie as their parameters do."""
    cuts = {"mix": PartitionSpec(None, *mesh.axis_names)}

    def place(path, leaf):
        cut = cuts.get(getattr(path[-1], "key", None), PartitionSpec())
        return leaf.update(sharding=NamedSharding(mesh, cut))

    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in shapes(width).items()
    }
    state = jax.eval_shape(OPTIMIZER.init, params)
    params, state = jax.tree.map_with_path(place, (params, state))
    x = jax.ShapeDtypeStruct(
        (ROWS, width),
        jnp.float32,
        sharding=NamedSharding(mesh, PartitionSpec("fsdp")),
    )
    return params, state, x


MESHES = [
    ("v5e-16", (4, 4)),
    ("h200x8", (8,)),
]
CHIP_WIDTH = 2048


@functools.cache
def compiled(name, shape):
    """The plan, and its program compiled apart from it."""
    target = target_or_skip(name)
    args = arguments(target.mesh(shape, axes(shape)), CHIP_WIDTH)
    found = plan(step, *args, target=name, pin=OFFLOAD)
    return found, target.compile(found.apply(step), *found.specs(*args))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), MESHES)
def test_each_device_streams_its_own_shard(name, shape):
    found, program = compiled(name, shape)
    shard = moment_bytes(math.prod(shape))
    decided = {d.name: d for d in found.decisions if d.role == "optimizer state"}
    assert [d.decision for d in decided.values()] == ["offload"] * MOMENTS
    assert [d.bytes for d in decided.values()] == [shard] * MOMENTS
    assert found.host_bytes == MOMENTS * shard

    memory = stowax.inspect(program).memory
    assert memory.host.argument == memory.host.alias == MOMENTS * shard
    assert memory.host.temp == 0
    # The weight and what is small are the device's; of the state, two blocks a moment.
    assert shard <= memory.device.argument <= shard + MIB
    assert memory.device.total == found.device_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), MESHES)
def test_no_state_crosses_devices_and_none_is_computed_on_a_host(name, shape):
    _, program = compiled(name, shape)
    inspected = stowax.inspect(program)
    assert "host-compute" not in {hazard.kind for hazard in inspected.hazards}

    # Every block once in and once out, but for one that is moved beside each end.
    shard = moment_bytes(math.prod(shape))
    blocks = shard // MIB
    for direction in ("device-to-host", "host-to-device"):
        moved = [t for t in inspected.transfers if t.direction == direction]
        total = sum(t.total_bytes for t in moved)
        assert MOMENTS * shard <= total <= MOMENTS * (blocks + 2) * MIB

    read = read_program(program.hlo_module_protos()[0])
    streaming = {t.computation for t in read.transfers if "stowax.state" in t.op_name}
    assert streaming
    for computation in read.computations.values():
        for item in computation.instructions:
            kind = (item.wrapped or item.opcode).removesuffix("-start")
            if kind not in COLLECTIVES or item.result_bytes <= 64:
                continue  # nothing, or a number: the norm, or a sign that is waited for
            # What is gathered is a layer's weight; what is reduced, its gradient. A
            # gather made asynchronous may have lost its name.
            assert computation.name not in streaming, item
            once_a_layer = not item.op_name and computation.executions == LAYERS
            assert kind != "all-gather" or "jvp(" in item.op_name or once_a_layer, item


def moment_bytes(chips):
    """Bytes of a moment of the weight on one of so many chips."""
    return LAYERS * CHIP_WIDTH * 4 * CHIP_WIDTH * 4 // chips


HERE = {"fsdp and tensor": (4, 2)}
HERE_WIDTH = 1024


def arrays(specs):
    """Arrays as a user makes them: the optimizer's counter is put nowhere."""
    draw = np.random.default_rng(0)

    def normal(s):
        value = (0.02 * draw.normal(size=s.shape)).astype(s.dtype)
        return jax.device_put(value, s.sharding)

    params, x = jax.tree.map(normal, (specs[0], specs[2]))
    return params, OPTIMIZER.init(params), x


def places(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


def same_places(tree, before):
    """Compared by what they mean: an axis of one device may be named or not."""
    return all(
        leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        and leaf.sharding.memory_kind == sharding.memory_kind
        for leaf, sharding in zip(jax.tree.leaves(tree), before, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", HERE)
def test_five_steps_on_eight_devices_are_those_without_a_plan(how):
    shape = HERE[how]
    target = target_or_skip("h200x8")
    there = arguments(target.mesh(shape, axes(shape)), HERE_WIDTH)
    found = plan(step, *there, target=target.name, pin=OFFLOAD)
    *mine, x = found.place(*arrays(arguments(mesh(shape), HERE_WIDTH)))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(mine)} == {8}
    before = places(mine)
    assert [s.memory_kind for s in before].count("pinned_host") == MOMENTS
    losses, end = steps_without_a_plan()
    planned = found.apply(step)
    for loss in losses:
        *mine, my_loss = planned(*mine, x)
        np.testing.assert_allclose(my_loss, loss, rtol=1e-5)
        assert same_places(mine, before)
    assert planned._cache_size() == 1  # and so it was compiled once
    for left, right in zip(jax.tree.leaves(mine), end, strict=True):
        # JAX's own, which takes denormal numbers for zero: NumPy is slow with them.
        assert jnp.allclose(np.asarray(left), right, rtol=1e-4, atol=1e-6)


@functools.cache
def steps_without_a_plan():
    """Five losses, and the state that comes of them, on one device."""
    params, state, x = arrays(arguments(mesh((1,)), HERE_WIDTH))
    plain = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    for _ in range(5):
        params, state, loss = plain(params, state, x)
        losses.append(float(loss))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]


def mesh(shape):
    """Of the first of the attached devices."""
    devices = jax.devices()[: math.prod(shape)]
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, axes(shape), devices=devices, axis_types=auto)
