"""Parameters in host memory under a mesh: every device streams its part of a layer.

Weights are cut along one axis or two (FSDP, and with tensor parallelism), scanned over
their first axis or another, or apart in a Python loop. Numbers are of eight CPU
devices; bytes, copies and collectives of programs compiled for chips that are not
there, without planning: what is offloaded is given.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stowax
from planned_models import QUICK, spec, target_or_skip
from planned_steps import CHOICES, plans
from stowax._hlo._program import read_program
from stowax._records._program import COLLECTIVES
from stowax._records._stages import Options
from stowax._state._shards import partition_of, shard_shape
from stowax._state._state import find_state, search_state
from stowax._state._stream import Hosted
from stowax._step._trace import trace_step
from stowax._survey._apply import StepPlan, apply_decisions
from stowax._survey._options import overlap_options
from stowax._target._specs import put_in_host_memory
from stowax._update._blocks import BlockSize
from updates import SMALL

pytestmark = pytest.mark.usefixtures("usual_promotion")

AXES = ("fsdp", "tensor")
ROWS, MIB = 64, 2**20
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def layer(x, w):
    return x + jax.nn.gelu(x @ w["in"]) @ w["out"]


def scan(params, x):
    return jax.lax.scan(lambda c, w: (layer(c, w), None), x, params)[0]


def loop(params, x):
    for w in params:
        x = layer(x, w)
    return x


def narrow_second_axis(params, x):
    layers_first = jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), params)
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layers_first)
    return scan(narrow, x.astype(jnp.bfloat16)).astype(jnp.float32)


FORMS = {"scan": scan, "loop": loop, "second axis, bfloat16": narrow_second_axis}
LAYER_AXIS = {"scan": 0, "second axis, bfloat16": 1}


def step_of(form, places=None):
    @stowax.stow
    def loss_fn(params, x):
        return jnp.mean((FORMS[form](params, x) - 1) ** 2)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        if places is not None:  # as many write it: gradients lie as parameters do
            grads = jax.lax.with_sharding_constraint(grads, places)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def arguments(form, mesh, layers, width):
    """Specs of (params, state, x): moments lie as their parameters do."""
    first, second, *_ = *mesh.axis_names, None
    one = {
        "in": ((width, 4 * width), (first, second)),
        "out": ((4 * width, width), (second, first)),
    }

    def place(path, leaf):
        key = next((k.key for k in reversed(path) if hasattr(k, "key")), None)
        cut = [*one[key][1]] if leaf.ndim else []
        if form in LAYER_AXIS and leaf.ndim:
            cut.insert(LAYER_AXIS[form], None)
        return leaf.update(sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    def stacked(shape):
        axis = LAYER_AXIS[form]
        return spec(*shape[:axis], layers, *shape[axis:])

    if form == "loop":
        params = [{name: spec(*shape) for name, (shape, _) in one.items()}] * layers
    else:
        params = {name: stacked(shape) for name, (shape, _) in one.items()}
    state = jax.eval_shape(OPTIMIZER.init, params)
    rows = NamedSharding(mesh, PartitionSpec(first))
    return (
        *jax.tree.map_with_path(place, (params, state)),
        spec(ROWS, width).update(sharding=rows),
    )


def streamed(step, args, size, *, in_turn, order=None):
    """The step with all large state in host memory, and where that is.

    Its axes lie in this `order`, if one is given.
    """
    traced = trace_step(step, args, Options())
    leaves = jax.tree.leaves(args)
    hosted = [i for i in traced.updates if leaves[i].ndim > 1]
    decided = StepPlan(
        stacks=plans(traced, CHOICES["recompute all"]),
        hosted=Hosted(
            updates={i: traced.updates[i] for i in hosted},
            shards={i: shard_shape(leaves[i]) for i in hosted},
            partitions={i: partition_of(leaves[i]) for i in hosted},
            orders=dict.fromkeys(hosted, order) if order else {},
            in_turn=in_turn,
            size=size,
        ),
    )
    return apply_decisions(step, decided, Options(), donate=traced.donate), hosted


def ordered(form):
    """A form of layers, and the order of the state's axes in host memory."""
    first = form == "second axis, layers first"
    return "second axis, bfloat16" if first else form, (1, 0, 2) if first else None


def mesh_of(shape):
    devices = jax.devices()[: math.prod(shape)]
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, AXES[: len(shape)], devices=devices, axis_types=auto)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "shape", "in_turn"),
    [
        ("scan", (8,), True),
        ("loop", (4, 2), False),
        ("second axis, bfloat16", (4, 2), True),
        ("second axis, layers first", (4, 2), False),
    ],
)
def test_twenty_steps_are_those_with_everything_on_the_device(form, shape, in_turn):
    form, order = ordered(form)
    args = arguments(form, mesh_of(shape), 3, 64)
    places = jax.tree.map(lambda spec: spec.sharding, args[0])
    step = step_of(form, places if form == "scan" else None)
    planned, hosted = streamed(step, args, SMALL, in_turn=in_turn, order=order)
    draw = np.random.default_rng(0)
    flat = [
        jax.device_put((0.1 * draw.normal(size=s.shape)).astype(s.dtype), s.sharding)
        for s in jax.tree.leaves((args[0], args[2]))
    ]
    *params, x = flat
    params = jax.tree.unflatten(jax.tree.structure(args[0]), params)
    plain, state = jax.jit(step), OPTIMIZER.init(params)
    leaves, structure = jax.tree.flatten((params, state))
    for i in hosted:
        place = leaves[i].sharding.with_memory_kind("pinned_host")
        leaves[i] = jax.device_put(leaves[i], place)
    mine = jax.tree.unflatten(structure, leaves)
    # A product in bfloat16 has three digits, and Adam divides by what may be rounding.
    tolerance = 1e-2 if "bfloat16" in form else 1e-5
    for _ in range(20):
        params, state, loss = plain(params, state, x)
        *mine, my_loss = planned(*mine, x)
        np.testing.assert_allclose(my_loss, loss, rtol=tolerance)
    for k, (left, right) in enumerate(
        zip(jax.tree.leaves(mine), jax.tree.leaves((params, state)), strict=True)
    ):
        close = np.isclose(left, right, rtol=tolerance, atol=tolerance / 5)
        assert close.mean() > 0.999
        # Where it was, and how it was spread.
        kind = "pinned_host" if k in hosted else "device"
        assert left.sharding.memory_kind == kind
        assert shard_shape(left) == shard_shape(jax.tree.leaves(args)[k])


LAYERS, WIDTH = 6, 1024
MATRIX = WIDTH * 4 * WIDTH * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name", "shape"),
    [
        ("scan", "v5e-16", (4, 4)),
        ("loop", "h200x8", (8,)),
        ("second axis, bfloat16", "h200x8", (4, 2)),
        ("second axis, layers first", "v5p-8", (2, 2)),
    ],
)
def test_each_device_copies_its_own_part_of_a_layer(form, name, shape):
    blocks, (form, order) = BlockSize(leaf_bytes=MIB), ordered(form)
    target = target_or_skip(name)
    args = arguments(form, target.mesh(shape, AXES[: len(shape)]), LAYERS, WIDTH)
    on_tpu = target.platform == "tpu"
    jitted, hosted = streamed(
        step_of(form), args, blocks, in_turn=not on_tpu, order=order
    )
    program = target.compile(
        jitted,
        *put_in_host_memory(args, hosted, dict.fromkeys(hosted, order)),
        compiler_options={**overlap_options(target), **(QUICK if on_tpu else {})},
    )
    found, part = stowax.inspect(program), MATRIX // math.prod(shape)
    assert not [h for h in found.hazards if h.kind == "host-compute"]
    # Two matrices a layer: parameters and two moments, gradients in between.
    assert found.memory.host.argument == found.memory.host.alias == 6 * LAYERS * part
    assert found.memory.host.temp == 2 * LAYERS * part
    assert found.memory.device.argument < MIB
    # Weights gathered for a product, their gradient before it is reduced: not the
    # state, of which all devices together have 48 matrices.
    assert found.memory.device.total < 7 * MATRIX

    for what, times in (("weights", 2), ("gradients", 1)):
        copies = [t for t in found.transfers if f"stowax.{what}." in (t.op_name or "")]
        assert {t.bytes for t in copies} <= {part}
        if what == "gradients" or form != "loop":  # in branches they lose their names
            trips = sum(t.trips for t in copies)
            assert 2 * times * LAYERS <= trips <= 2 * times * (LAYERS + 1)
    read = read_program(program.hlo_module_protos()[0])
    blocks = [t for t in read.transfers if "stowax.state." in t.op_name and t.trips > 1]
    updating = {t.computation for t in blocks}
    assert updating
    for computation in read.computations.values():
        for item in computation.instructions:
            kind = (item.wrapped or item.opcode).removesuffix("-start")
            if kind in COLLECTIVES:
                # Neither blocks nor signs cross devices, and a layer at most once.
                assert computation.name not in updating, item
                assert item.result_bytes <= 2.5 * MATRIX, item


def test_layers_that_are_spread_over_devices_stay():
    """A layer would have to be fetched by devices that do not hold it."""
    target = target_or_skip("h200x8")
    mesh, step = target.mesh((4, 2), AXES), step_of("scan")
    args = arguments("scan", mesh, 8, 2048)
    chosen = {}
    for first in (None, "fsdp"):
        spread = PartitionSpec(first, None, "tensor")

        def place(leaf, spread=spread):
            over = spread if leaf.ndim == 3 else PartitionSpec()
            return leaf.update(sharding=NamedSharding(mesh, over))

        specs = (*jax.tree.map(place, args[:2]), args[2])
        traced, leaves = trace_step(step, specs, Options()), jax.tree.leaves(specs)
        state = find_state(traced, leaves, target, search_state(traced, leaves, target))
        chosen[first] = {value.role for value in state.body.values}
    assert chosen == {
        None: {"parameter", "optimizer state"},
        "fsdp": {"optimizer state"},
    }
