"""Where a program's arrays lie: nowhere in particular, or spread over eight devices."""

import contextlib

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "data"
MAPPED = "shard_map gradient"
SPREAD = (
    "auto",
    "explicit",
    "set mesh",
    "shard_map layers",
    "shard_map around",
    MAPPED,
)


def mesh_of(program):
    """The program's mesh; `None` without one."""
    if program.mesh == "none":
        return None
    if program.mesh == "one device":
        return jax.make_mesh((1,), (AXIS,), devices=jax.devices()[:1])
    kind = AxisType.Explicit if program.mesh in ("explicit", "set mesh") else None
    types = (kind or AxisType.Auto,)
    return jax.make_mesh((8,), (AXIS,), axis_types=types, devices=jax.devices()[:8])


@contextlib.contextmanager
def in_mesh(program, mesh):
    """The context that the program's own script would run in."""
    if program.mesh == "set mesh":
        with jax.set_mesh(mesh):
            yield
    else:
        yield


def is_typed_key(leaf):
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def placed_state(mesh, tree):
    """Weights and state spread over their last axis that the devices divide."""
    if mesh is None:
        return tree

    def put(leaf):
        parts = [None] * leaf.ndim
        for axis in reversed(range(leaf.ndim)):
            if mesh.size > 1 and not is_typed_key(leaf) and leaf.shape[axis] % 8 == 0:
                parts[axis] = AXIS
                break
        return jax.device_put(leaf, NamedSharding(mesh, P(*parts)))

    return jax.tree.map(put, tree)


def placed_batch(mesh, tree, axis=0):
    """Examples spread over the devices."""
    if mesh is None:
        return tree

    def put(leaf):
        return jax.device_put(leaf, NamedSharding(mesh, P(*[None] * axis, AXIS)))

    return jax.tree.map(put, tree)


def gathered(program, mesh, tree):
    """Weights as a layer uses them: with Explicit axes a user gathers them by hand."""
    if program.mesh not in ("explicit", "set mesh"):
        return tree
    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, whole), tree)


def mapped_layer(body, mesh):
    """A layer in `shard_map`: every device has its examples and all weights."""

    def run(p, c, x, i):
        tokens = {"tokens": c["tokens"]}
        rest = {name: leaf for name, leaf in c.items() if name != "tokens"}
        return jax.shard_map(
            lambda p, tokens, rest, x, i: body(p, {**rest, **tokens}, x, i),
            mesh=mesh,
            in_specs=(P(), P(AXIS), P(), P(AXIS), P()),
            out_specs=P(AXIS),
            check_vma=False,
        )(p, tokens, rest, x, jax.numpy.asarray(i, "int32"))

    return run


def mapped_mean(run, mesh):
    """What `run` makes of a device's own examples, in `shard_map`: the mean of all."""

    def local(params, batch, key):
        found = run(params, batch, key)
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, AXIS), found)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(), check_vma=False
    )
