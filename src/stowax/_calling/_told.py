"""Arguments where a step's own `jax.jit` was told that they belong.

`jax.jit(step, in_shardings=...)` takes arrays that lie nowhere in particular (NumPy's,
a fresh `jnp.zeros`) or on one device, and puts them there itself. A plan runs the step
inside of a program of its own, where these shardings come too late: arguments are put
there first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .. import _jax
from .._jax_jit import jit_info
from ._leaves import Static, is_array


def placed_as_told(
    function: Any, args: Sequence[Any], stays: Callable[[Any], bool]
) -> tuple[Any, ...]:
    """`args` where `in_shardings` wants them, those that are not spread already.

    What `stays` a leaf is left alone. What nothing is said of goes to all devices of
    the shardings. In a trace nothing lies anywhere.
    """
    info = jit_info(function)
    if info is None or _jax.is_tracing() or not (told := _shardings(info)):
        return tuple(args)
    home = _whole(told[0])
    dynamic = tuple(a for a in args if not isinstance(a, Static))
    wanted = info.in_shardings_treedef.unflatten(info.in_shardings_leaves)
    if not isinstance(wanted, tuple | list):
        wanted = (wanted,) * len(dynamic)

    def put(told: Any, tree: Any) -> Any:
        sharding = _resolved(told) or home
        return jax.tree.map(lambda a: _put(a, sharding), tree, is_leaf=stays)

    try:
        placed = iter(
            jax.tree.map(put, tuple(wanted), dynamic, is_leaf=lambda s: s is None)
        )
    except ValueError:  # they do not fit together, and JAX says so
        return tuple(args)
    return tuple(a if isinstance(a, Static) else next(placed) for a in args)


def spread_as_objects_are(function: Any, arrays: Any) -> Any:
    """The arrays of objects that `nnx.jit` was told of, on all devices that it names.

    It says where what objects are taken apart into belongs, and spreads it in there.
    """
    info = jit_info(getattr(function, "jitted_fn", None))
    if info is None or _jax.is_tracing() or not (told := _shardings(info)):
        return arrays
    home = _whole(told[0])
    return jax.tree.map(lambda a: _put(a, home), arrays)


def _shardings(info: Any) -> list[Sharding]:
    leaves = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    return [s for s in map(_resolved, leaves) if s is not None]


def _resolved(told: Any) -> Sharding | None:
    """A sharding as it was told, of a `PartitionSpec` over the mesh that is set."""
    if isinstance(told, PartitionSpec):
        mesh = jax.sharding.get_mesh()
        return None if mesh.empty else NamedSharding(mesh, told)
    return told if isinstance(told, Sharding) else None


def _whole(sharding: Sharding) -> Sharding:
    """All of an array on each of the devices of a sharding."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    if len(sharding.device_set) == 1:
        return sharding
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    mesh = jax.make_mesh((len(devices),), ("d",), devices=devices)
    return NamedSharding(mesh, PartitionSpec())


def _put(leaf: Any, sharding: Sharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if leaf.sharding else leaf.update(sharding=sharding)
    if not is_array(leaf) or isinstance(leaf, np.generic):
        return leaf  # a number
    if isinstance(leaf, jax.Array):
        devices = leaf.sharding.device_set
        there = leaf.committed and devices == sharding.device_set
        if there or len(devices) > 1:
            return leaf
    if not sharding.device_set <= {*jax.devices()}:  # a target that is not there
        weak = _jax.aval_of(leaf).weak_type
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak
        )
    return jax.device_put(leaf, sharding)
