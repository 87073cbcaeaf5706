"""What a program is compiled for: types of arrays, put on a target's devices.

An array says where it lies on this machine, a `ShapeDtypeStruct` where it is wanted on
the target, or nothing. What goes silently wrong without care: a memory kind that is
lost on the way, and with it what a plan has put into host memory.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .. import _jax
from .._errors import ArgumentError
from .._jax_layouts import in_layout, laid_out

HOST_KINDS = frozenset({"pinned_host", "unpinned_host"})
"""JAX's names of the host's memories."""


ONE_DEVICE = "stowax_device"
"""The axis of a mesh of ours over one device. In a type it says nothing."""


def one_device_sharding(device: Any, memory_kind: str | None = None) -> NamedSharding:
    """A sharding over one device that keeps memory kinds.

    A `NamedSharding`: with `SingleDeviceSharding` the traced types lose their memory
    space and `dynamic_update_slice` on a host buffer is refused.
    """
    mesh = Mesh(np.array([device], dtype=object), (ONE_DEVICE,))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)


def spread_specs(devices: tuple[Any, ...], specs: Any, target_name: str) -> Any:
    """`specs` as `ShapeDtypeStruct`s; shardings are checked, missing ones kept open.

    Leaves that are no arrays (static arguments, Python numbers) pass through.
    """

    def convert(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        spec = jax.ShapeDtypeStruct(
            leaf.shape,
            _jax.dtype_in_jit(leaf.dtype),
            weak_type=getattr(leaf, "weak_type", False),
        )
        if sharding is None:
            return spec
        if isinstance(sharding, SingleDeviceSharding):
            # An array that lies somewhere by default says nothing about the target, but
            # its memory kind does.
            (device,) = sharding.device_set
            nowhere = isinstance(leaf, jax.Array) and not leaf.committed
            if nowhere and sharding.memory_kind in (None, "device", "unpinned_host"):
                return spec
            if device not in devices and not isinstance(leaf, jax.Array):
                check_devices(_argument(path), (device,), devices, target_name)
            if device not in devices and sharding.memory_kind in (None, "device"):
                return spec
            home = device if device in devices else devices[0]
            return spec.update(sharding=one_device_sharding(home, sharding.memory_kind))
        if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            raise ArgumentError(
                _argument(path),
                "a sharding over an abstract mesh",
                f"Build the mesh with stowax.target({target_name!r}).mesh(...).",
            )
        if _lies_elsewhere(leaf, devices):
            return spec
        check_devices(_argument(path), sharding.device_set, devices, target_name)
        _check_divides(_argument(path), sharding, spec.shape)
        given = sharding if isinstance(leaf, jax.Array) else laid_out(leaf)
        return spec.update(sharding=given)

    return jax.tree_util.tree_map_with_path(convert, specs)


def _lies_elsewhere(leaf: Any, devices: tuple[Any, ...]) -> bool:
    """Whether it is an array on one device of this machine, and not of the target's.

    That says nothing about the target, unless its type names the mesh.
    """
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) > 1:
        return False
    typed = getattr(leaf.sharding, "mesh", None)
    explicit = typed is not None and typed.explicit_axes
    return not explicit and not leaf.sharding.device_set <= {*devices}


def put_specs(devices: tuple[Any, ...], specs: Any) -> Any:
    """`specs` with everything that has no sharding put on the first of `devices`.

    Where others are on another one, or their types name a mesh of one device, it is put
    on that: JAX refuses operations on two of them.
    """
    sharding = _explicit_home(specs) or one_device_sharding(_home(specs, devices[0]))

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            return leaf.update(sharding=sharding)
        return leaf

    return jax.tree.map(put, specs)


def _home(specs: Any, default: Any) -> Any:
    """The device that some of `specs` are on."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(specs))
    return next((d for s in shardings if s is not None for d in s.device_set), default)


def _explicit_home(specs: Any) -> jax.sharding.NamedSharding | None:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(specs))
    for sharding in shardings:
        named = isinstance(sharding, jax.sharding.NamedSharding)
        if named and sharding.mesh.abstract_mesh.explicit_axes:
            return jax.sharding.NamedSharding(
                sharding.mesh, jax.sharding.PartitionSpec()
            )
    return None


def put_in_device_memory(specs: Any) -> Any:
    """`specs` with those in host memory on the device, sharded as they are."""

    def put(spec: Any) -> Any:
        sharding = getattr(spec, "sharding", None)  # a number of Python's has none
        if sharding is None or sharding.memory_kind not in HOST_KINDS:
            return spec
        return spec.update(sharding=sharding.with_memory_kind("device"))

    return jax.tree.map(put, specs)


def put_in_host_memory(
    specs: Any, positions: Collection[int], orders: Mapping[int, Any] | None = None
) -> Any:
    """`specs` with the arrays at these flat positions in pinned host memory.

    Those in `orders` lie there with their axes so.
    """
    leaves, structure = jax.tree.flatten(specs)
    for i in positions:
        sharding = leaves[i].sharding.with_memory_kind("pinned_host")
        if order := (orders or {}).get(i):
            sharding = in_layout(sharding, order)
        spec = leaves[i]
        leaves[i] = jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=sharding, weak_type=spec.weak_type
        )
    return jax.tree.unflatten(structure, leaves)


def any_sharded(specs: Any) -> bool:
    """Whether any of `specs` spans several devices, so that the rest must stay open.

    Or a mesh of several devices is set: then arrays from nowhere go there.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return True
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(specs))
    return any(s is not None and len(s.device_set) > 1 for s in shardings)


def _argument(path: Any) -> str:
    return f"specs{jax.tree_util.keystr(path)}"


def _check_divides(argument: str, sharding: Any, shape: tuple[int, ...]) -> None:
    """**Raises:** `ArgumentError` for a sharding that does not split `shape` evenly."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        spec = getattr(sharding, "spec", sharding)
        over = dict(sharding.mesh.shape) if hasattr(sharding, "mesh") else ""
        raise ArgumentError(
            argument,
            f"shape {shape} with {spec} over a mesh {over}, which does not split it "
            "into equal parts",
            "Spread another axis, or make this one a multiple of the devices it is "
            "spread over.",
        ) from error


def check_devices(
    argument: str, used: Any, devices: tuple[Any, ...], target_name: str
) -> None:
    """**Raises:** `ArgumentError` for devices that are not the target's."""
    foreign = sorted({str(d) for d in used if d not in devices})
    if foreign:
        raise ArgumentError(
            argument,
            f"a sharding over {', '.join(foreign[:3])}"
            + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
            + f", which target {target_name} does not have",
            f"Build the mesh with stowax.target({target_name!r}).mesh(...).",
        )
