"""Arguments where a step's own `jax.jit` was told that they belong.

`jax.jit(step, in_shardings=...)` takes arrays that lie nowhere in particular (NumPy's,
a fresh `jnp.zeros`) and puts them there itself. A plan runs the step inside of a
program of its own, where these shardings come too late: arguments are put there first.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .._jax_jit import jit_info
from ._leaves import Static, is_array


def placed_as_told(function: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """`args` where `in_shardings` wants them, those that are not committed elsewhere.

    What nothing is said of goes to all devices of the shardings.
    """
    info = jit_info(function)
    if info is None or not (told := _shardings(info)):
        return tuple(args)
    home = _whole(told[0])
    wanted = info.in_shardings_treedef.unflatten(info.in_shardings_leaves)
    dynamic = tuple(a for a in args if not isinstance(a, Static))

    def put(sharding: Any, tree: Any) -> Any:
        to = sharding if isinstance(sharding, Sharding) else home
        return jax.tree.map(lambda a: _put(a, to), tree)

    try:
        if not isinstance(wanted, tuple | list):
            wanted = (wanted,) * len(dynamic)
        placed = iter(
            jax.tree.map(put, tuple(wanted), dynamic, is_leaf=lambda s: s is None)
        )
    except ValueError:  # they do not fit together, and JAX says so
        return tuple(args)
    return tuple(a if isinstance(a, Static) else next(placed) for a in args)


def _shardings(info: Any) -> list[Sharding]:
    leaves = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    return [s for s in leaves if isinstance(s, Sharding)]


def _whole(sharding: Sharding) -> Sharding:
    """All of an array on each of the devices of a sharding."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    if len(sharding.device_set) == 1:
        return sharding
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    return NamedSharding(
        jax.make_mesh((len(devices),), ("d",), devices=devices), PartitionSpec()
    )


def _put(leaf: Any, sharding: Sharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if leaf.sharding else leaf.update(sharding=sharding)
    if isinstance(leaf, jax.Array) and leaf.committed:
        return leaf
    if not is_array(leaf) or isinstance(leaf, np.generic):
        return leaf  # a number
    return jax.device_put(leaf, sharding)
