"""Streamed updates under a mesh: every device streams its own shard."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stowax
from planned_models import target_or_skip
from stowax._jax_host_memory import takes_host_memory
from stowax._jaxprs._jaxpr import evaluate, trace
from stowax._survey._options import overlap_options
from stowax._update._blocks import BlockSize
from stowax._update._find import stream_update
from stowax._update._run import run_streamed
from updates import SMALL

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS = 2
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def step(params, state, batch):
    def loss(p):
        x = batch
        for name in sorted(p):
            x = jnp.tanh(x @ p[name])
        return jnp.mean(x**2)

    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def sharded(mesh, partition, size, blocks, *, in_turn=True):
    """The streamed step, jitted, its specs and its plain jaxpr."""

    def place(spec):
        over = partition if spec.ndim else PartitionSpec()
        return spec.update(sharding=NamedSharding(mesh, over))

    weight = jax.ShapeDtypeStruct((size, size), jnp.float32)
    params = {f"w{i}": weight for i in range(LAYERS)}
    arguments = params, jax.eval_shape(OPTIMIZER.init, params), weight
    leaves, structure = jax.tree.flatten(jax.tree.map(place, arguments))
    jaxpr = trace(
        lambda *args: jax.tree.leaves(step(*jax.tree.unflatten(structure, args))),
        *[leaf.update(sharding=None) for leaf in leaves],
    )
    state = range(LAYERS, len(leaves) - 1)
    shards = {i: leaves[i].sharding.shard_shape(leaves[i].shape) for i in state}
    found = stream_update(jaxpr, {i: i for i in state}, per_device=shards, size=blocks)
    for i in found.host_inputs:
        host = leaves[i].sharding.with_memory_kind("pinned_host")
        leaves[i] = leaves[i].update(sharding=host)
    jitted = jax.jit(
        lambda *args: run_streamed(found, args, in_turn=in_turn),
        donate_argnums=tuple(range(len(leaves) - 1)),
        out_shardings=[leaf.sharding for leaf in leaves[:-1]],
    )
    return jitted, leaves, jaxpr, found


@pytest.mark.parametrize("size", [256, 232])  # shards of 29 rows have a rest each
@pytest.mark.parametrize("partition", [("d", None), (None, "d")])
def test_same_numbers_on_eight_devices(partition, size):
    mesh = Mesh(np.array(jax.devices()), ("d",))
    partition = PartitionSpec(*partition)
    jitted, specs, jaxpr, found = sharded(mesh, partition, size, SMALL)
    assert {leaf.way for leaf in found.leaves if leaf.shape} == {"streamed"}
    random = np.random.default_rng(0)
    args = [np.abs(random.normal(size=s.shape) * 0.1).astype(s.dtype) for s in specs]
    expected = jax.jit(lambda *args: evaluate(jaxpr, args))(*args)
    got = jitted(
        *[jax.device_put(a, s.sharding) for a, s in zip(args, specs, strict=True)]
    )
    for a, b, spec in zip(expected, got, specs, strict=False):
        assert b.sharding.memory_kind == spec.sharding.memory_kind
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("full_effort")
def test_every_chip_streams_its_shard():
    target = target_or_skip("v5p-8")
    chips, size = 4, 8192
    mesh, partition = target.mesh((chips,), ("d",)), PartitionSpec("d", None)
    jitted, specs, *_ = sharded(mesh, partition, size, BlockSize(), in_turn=False)
    found = stowax.inspect(
        target.compile(jitted, *specs, compiler_options=overlap_options(target))
    )
    shard = size * size * 4 // chips
    assert found.memory.host.argument == found.memory.host.alias == 2 * LAYERS * shard
    assert found.memory.host.temp == 0
    seconds = 2 * LAYERS * shard / target.link.host_to_device
    assert found.timeline.exposed_seconds <= 1.1 * seconds


def test_parameters_stay_whole_beside_moments_that_are_cut():
    """ZeRO: the compiler would spread parameters as it finds their moments spread."""
    mesh = Mesh(np.array(jax.devices()), ("d",))
    whole, cut = (NamedSharding(mesh, PartitionSpec(*p)) for p in ((), (None, "d")))

    def descend(weight, moment, gradient):
        moment = 0.9 * moment + gradient
        return weight - 0.1 * moment, moment

    values = [np.random.default_rng(k).normal(size=(64, 64)) for k in range(3)]
    args = [
        jax.device_put(jnp.asarray(v, jnp.float32), sharding)
        for v, sharding in zip(values, (whole, cut, whole), strict=True)
    ]
    shards = {i: args[i].sharding.shard_shape((64, 64)) for i in (0, 1)}
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    jaxpr = trace(descend, *specs)
    found = stream_update(jaxpr, {0: 0, 1: 1}, per_device=shards, size=SMALL)
    assert [leaf.way for leaf in found.leaves] == ["streamed"] * 2
    partitions = {0: (None, None), 1: (None, "d")}
    found = dataclasses.replace(found, partitions=partitions)
    expected = descend(*args)
    hosted = [
        jax.device_put(a, a.sharding.with_memory_kind("pinned_host")) for a in args[:2]
    ]
    streamed = takes_host_memory(lambda *args: run_streamed(found, args))
    got = jax.jit(streamed, donate_argnums=(0, 1))(*hosted, args[2])
    for new, old, same in zip(got, args, expected, strict=False):
        host = old.sharding.with_memory_kind("pinned_host")
        assert new.sharding.is_equivalent_to(host, new.ndim)
        np.testing.assert_allclose(new, same, rtol=1e-6, atol=1e-6)
