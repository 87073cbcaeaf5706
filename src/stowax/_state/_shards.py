"""One device's part of an array, as the array's spec says."""

import math
from typing import Any

from jax.sharding import NamedSharding

from .._layers._host_layers import Partition


def shard_shape(spec: Any) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    sharding = getattr(spec, "sharding", None)
    whole = tuple(getattr(spec, "shape", ()))  # a Python number has none
    return whole if sharding is None else tuple(sharding.shard_shape(whole))


def device_bytes(spec: Any) -> int:
    """Bytes of one device's part of an array."""
    dtype = getattr(spec, "dtype", None)
    return math.prod(shard_shape(spec)) * (dtype.itemsize if dtype else 0)


def axes_of(part: Any) -> tuple[str, ...]:
    """The axes of a mesh that one axis of an array is spread over."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def mixes_axes(spec: Any) -> bool:
    """Whether an array's mesh has axes in types and others that are not.

    JAX (0.10 to 0.12) forgets in which memory results over such a mesh lie.
    """
    mesh = getattr(getattr(spec, "sharding", None), "mesh", None)
    return bool(mesh is not None and mesh.explicit_axes and mesh.auto_axes)


def partition_of(spec: Any) -> Partition | None:
    """Which axes of a mesh each axis of an array is spread over, if any are.

    Over one device that is nothing, unless types say so all the same.
    """
    sharding = getattr(spec, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if len(sharding.device_set) == 1 and not sharding.mesh.explicit_axes:
        return None
    return (*sharding.spec, *[None] * (len(spec.shape) - len(sharding.spec)))
