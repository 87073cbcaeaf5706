"""A loop that the TPU's compiler peels: copies, work and seconds are still all there.

Under a mesh libtpu starts an offloading loop's copies one iteration ahead, and takes an
iteration off the forward and off the backward loop for it. What the program says has to
be moved does not change by that: each layer's input out once, and back once.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from compiled_programs import machine
from stowax._hardware._hardware import CHIPS
from stowax._hlo._program import read_program
from stowax._records._stages import Link
from stowax._timing._simulate import simulate

pytestmark = pytest.mark.usefixtures("full_effort")

LAYERS, ROWS, WIDTH, HIDDEN, CHIPS_USED = 6, 512, 512, 1024, 4
INPUT = ROWS // CHIPS_USED * WIDTH * 2  # bytes per chip in bfloat16
PRODUCT = 2 * (ROWS // CHIPS_USED) * WIDTH * HIDDEN


@functools.cache
def peeled():
    """Loss and gradients, weights and rows over four chips, layer inputs offloaded."""
    target = machine("v5e-4")
    mesh = target.mesh((CHIPS_USED,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        x = checkpoint_name(x, "input")
        hidden = jax.nn.gelu(x @ w["up"].astype(x.dtype))
        x = x + hidden @ w["down"].astype(x.dtype)
        return jax.lax.with_sharding_constraint(x, rows), None

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32))

    def weight(*shape):
        shape = (LAYERS, *shape)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=columns)

    ws = {"up": weight(WIDTH, HIDDEN), "down": weight(HIDDEN, WIDTH)}
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=rows)
    compiled = target.compile(jax.jit(jax.value_and_grad(loss)), ws, x)
    return read_program(compiled.hlo_module_protos()[0])


def test_every_copy_is_counted_inside_and_outside_of_the_loop():
    program = peeled()
    trips = [
        item.trips
        for computation in program.computations.values()
        for item in computation.instructions
        if item.opcode == "while"
    ]
    assert trips == [LAYERS - 1] * 2  # or this test is about nothing
    for direction in ("device-to-host", "host-to-device"):
        copies = [t for t in program.transfers if t.direction == direction]
        assert sorted(copy.trips for copy in copies) == [1, LAYERS - 1]
        assert sum(copy.total_bytes for copy in copies) == LAYERS * INPUT


def test_the_peeled_iterations_work_is_counted():
    # Two products forward, the first again, and four backward. Outside of the loops the
    # last layer forward and the first backward are the same layer, and share the first.
    program = peeled()
    products = {
        name: sum(item.flops for item in computation.instructions) / PRODUCT
        for name, computation in program.computations.items()
    }
    outside = products.pop(program.entry)
    assert outside == 2 + 1 + 4 - 1
    inside = sorted(count for count in products.values() if count)
    assert inside == [2, 1 + 4]
    found = sum(
        products.get(name, outside) * computation.executions
        for name, computation in program.computations.items()
    )
    assert found == 7 * LAYERS - 1


@pytest.mark.parametrize("rate", [1e8, 1e11])
def test_the_simulated_link_carries_every_byte(rate):
    link = Link(device_to_host=rate, host_to_device=2 * rate)
    timeline = simulate(peeled(), CHIPS["v5e"], link)
    assert timeline.device_to_host_seconds == pytest.approx(LAYERS * INPUT / rate)
    assert timeline.host_to_device_seconds == pytest.approx(LAYERS * INPUT / rate / 2)
    out = [i for i in timeline.intervals if i.lane == "device-to-host"]
    # Written out, loop or not, a copy follows the other.
    times = sorted(
        (start, start + interval.end - interval.start)
        for interval in out
        for start in interval.starts()
    )
    assert len(times) == LAYERS
    for (_, end), (start, _) in itertools.pairwise(times):
        assert start >= end - 1e-12
