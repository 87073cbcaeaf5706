"""Where the arguments of a planned step belong: in device memory or in the host's.

In host memory some lie in an order of their axes that is not their type's
(`_ordered_step`).
A plan has a record per array of the step's arguments. `planned_kinds` finds the records
of whatever arguments it is given, all of them or some: a training loop places its state
once, and hands over batches later.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from .. import _jax
from .._errors import ArgumentError, PlanMismatchError
from .._jax_host_memory import compute_on_copies
from .._jax_layouts import in_layout, order_of
from .._records._plan import ArgumentRecord
from .._target._specs import one_device_sharding
from ._laying import lay_out
from ._ordered_step import has_layouts
from ._shards import axes_of, partition_of

_ON_DEVICE = (None, "device")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Where an array belongs: the kind of memory, and in what order its axes lie."""

    memory: str
    order: tuple[int, ...] | None = None


def planned_kinds(
    records: Sequence[ArgumentRecord], args: Sequence[Any]
) -> list[Kind | None]:
    """The kind of every array of `args`, flat.

    An argument belongs to the first of the step's arguments that has its paths, shapes
    and dtypes and is not taken by an earlier one. What is none of them, and what stays
    on the device and the step does not return (a batch), has the kind `None`, like
    anything that nobody asked about. If the plan has nothing in host memory, everything
    has.

    **Raises:** `PlanMismatchError` for what has the paths of an argument in host memory
    with other shapes or dtypes: left on the device it might be larger than that.
    """
    hosted = any(record.memory_kind != "device" for record in records)
    planned: dict[str, list[ArgumentRecord]] = {}
    for record in records:
        planned.setdefault(_argument(record.path), []).append(record)
    kinds: list[Kind | None] = []
    for number, tree in enumerate(args):
        leaves = jax.tree.leaves_with_path(tree)
        signature = [(_below(path), *_type(leaf)) for path, leaf in leaves]
        # Its own place first: then the order of the step's arguments decides.
        names = sorted(planned, key=lambda name: name != f"args[{number}]")
        found = next((n for n in names if _signature(planned[n]) == signature), None)
        own = planned.pop(found) if found else []
        if not found:
            _check_not_another_shape(planned, number, signature)
        for record, (_, leaf) in zip(own, leaves, strict=False):
            _check_spread_alike(record, leaf)
        kinds += [_kind(r, hosted) for r in own] or [None] * len(leaves)
    return kinds


def attached_specs(args: Sequence[Any]) -> Any:
    """`args` as specs with their own shardings, if those are over attached devices.

    `None` if they say nothing of where they belong, or name devices of a target.
    Arrays on one device say nothing: that is where JAX puts what is put nowhere.
    """
    found: list[tuple[Any, Any]] = [
        (leaf, getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(args)
    ]
    shardings = [
        sharding
        for leaf, sharding in found
        if sharding is not None
        and not isinstance(getattr(sharding, "mesh", None), AbstractMesh)
        and not (isinstance(leaf, jax.Array) and len(sharding.device_set) == 1)
    ]
    attached = set(jax.devices())
    if not shardings or not all(s.device_set <= attached for s in shardings):
        return None
    return jax.tree.map(_spec, tuple(args))


def mesh_of(args: Sequence[Any]) -> Mesh | None:
    """The mesh of several devices that arrays of `args` are spread over, if any are."""
    for leaf in jax.tree.leaves(tuple(args)):
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
            return sharding.mesh  # pyright: ignore[reportReturnType]
    return None


def check_alive(args: Sequence[Any]) -> None:
    """**Raises:** `ArgumentError` naming the first array whose memory was donated."""
    for path, leaf in jax.tree.leaves_with_path(tuple(args)):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ArgumentError(
                f"args{_below(path)}",
                "an array that an earlier step was given and has donated",
                "Go on with what that step returned, or keep a copy (jnp.copy) of what "
                "is needed after it.",
            )


def put(leaf: Any, kind: Kind | None, mesh: Mesh | None = None) -> Any:
    """An array in memory of that kind (`planned_kinds`), partitioned as it is.

    What moves nowhere may still get another sharding of the same meaning, which copies
    nothing. State in host memory is committed to its devices, and so is what a step
    with it returns: were the rest of the state not committed as well (all of `mesh`,
    where there is one: a counter made beside it), the second step would be compiled
    anew. And an array that was put together from single-device ones (a checkpointer
    does that) may lie in host memory and be of a type that says device.
    """
    wanted = _moves_to(leaf, kind, mesh)
    if wanted is not None:
        return _put(leaf, wanted, kind.order if kind else None)
    return leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)


def spec_put(leaf: Any, kind: Kind | None, mesh: Mesh | None = None) -> Any:
    """What `put` would return, as a spec; what it would leave is left."""
    wanted = _moves_to(leaf, kind, mesh)
    if wanted is None:
        return leaf
    aval = _jax.aval_of(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=_lying(wanted, kind.order if kind else None),
        weak_type=aval.weak_type,
    )


def _moves_to(leaf: Any, kind: Kind | None, mesh: Mesh | None) -> Any:
    """The sharding that an array is given; `None`: it has it."""
    if not isinstance(leaf, jax.Array):
        return None if kind is None else _anywhere(mesh, kind.memory)
    current = leaf.sharding.memory_kind
    if kind is None:
        there = current in _ON_DEVICE
        return None if there else leaf.sharding.with_memory_kind("device")
    if mesh is not None and not leaf.committed:
        return _anywhere(mesh, kind.memory)
    wanted = sharding_in(leaf.sharding, kind.memory)
    there = current in (_ON_DEVICE if kind.memory == "device" else (kind.memory,))
    if kind.order is not None and has_layouts(wanted):
        there = there and order_of(leaf) == kind.order
    typed = _jax.in_host_memory(leaf) == (kind.memory != "device")
    right = there and typed and type(wanted) is type(leaf.sharding)
    return None if right else wanted


def _put(leaf: Any, sharding: Any, order: tuple[int, ...] | None) -> Any:
    if sharding.memory_kind not in _ON_DEVICE:
        compute_on_copies()
    if order is None or not has_layouts(sharding):
        return jax.device_put(leaf, sharding)
    return lay_out(leaf, sharding, order)


def spec_in(path: Sequence[Any], spec: Any, kind: Kind | None) -> Any:
    """A `jax.ShapeDtypeStruct` in memory of that kind (`planned_kinds`).

    **Raises:** `ArgumentError` for one without a sharding, which has no memory kind.
    """
    sharding = getattr(spec, "sharding", None)  # a number has none
    if kind is None or (kind.memory == "device" and sharding is None):
        return spec
    if sharding is None:
        raise ArgumentError(
            f"args{_below(path)}",
            "a spec without a sharding beside some with one, and the plan keeps it in "
            "host memory",
            "Give it the sharding that the step was planned with "
            "(spec.update(sharding=...)); jax.eval_shape drops it.",
        )
    # Not `update`, which keeps a layout that the spec may have.
    return jax.ShapeDtypeStruct(
        spec.shape,
        spec.dtype,
        sharding=_lying(sharding_in(sharding, kind.memory), kind.order),
        weak_type=getattr(spec, "weak_type", False),
    )


def _lying(sharding: Any, order: tuple[int, ...] | None) -> Any:
    """`sharding`, with the order of the axes where that is not the type's."""
    if order is None or not has_layouts(sharding):
        return sharding
    return in_layout(sharding, order)


def sharding_in(sharding: Any, kind: str) -> Any:
    """`sharding` in memory of that kind; a `NamedSharding` where it is of one device.

    With a `SingleDeviceSharding` types lose their memory space.
    """
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return one_device_sharding(device, kind)
    return sharding.with_memory_kind(kind)


def _spec(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=getattr(leaf, "sharding", None),
        weak_type=getattr(leaf, "weak_type", False),
    )


def _check_not_another_shape(
    planned: dict[str, list[ArgumentRecord]], number: int, signature: list[Any]
) -> None:
    """**Raises:** `PlanMismatchError`, see `planned_kinds`."""
    paths = [path for path, *_ in signature]
    if paths == [""]:
        return  # an array has no paths to be known by
    for name, records in planned.items():
        own = _signature(records)
        if [path for path, *_ in own] != paths:
            continue
        for record, mine, (path, shape, dtype) in zip(
            records, own, signature, strict=True
        ):
            if record.memory_kind != "device" and mine != (path, shape, dtype):
                raise PlanMismatchError(
                    f"args[{number}]{path} is {_name(shape, dtype)}, and the plan, "
                    f"which keeps {record.path} in host memory, was made for "
                    f"{_name(record.shape, record.dtype)}. Give the state that was "
                    "planned; one of other shapes takes another plan."
                )


def _check_spread_alike(record: ArgumentRecord, leaf: Any) -> None:
    """**Raises:** `PlanMismatchError` for what is spread otherwise than planned.

    What is on one device says nothing: a plan for many may be tried there.
    """
    found, planned = partition_of(leaf), record.partition
    if record.memory_kind == "device" or found is None or planned is None:
        return
    sizes = leaf.sharding.mesh.shape

    def axes(partition: Sequence[Any]) -> list[tuple[str, ...]]:
        return [tuple(a for a in axes_of(p) if sizes.get(a) != 1) for p in partition]

    if axes(found) != axes(planned):
        raise PlanMismatchError(
            f"{record.path} is spread as {PartitionSpec(*found)}, and the plan, which "
            f"keeps it in host memory, was made for {PartitionSpec(*planned)}. Spread "
            "it as it was planned; another sharding takes another plan."
        )


def _name(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _kind(record: ArgumentRecord, hosted: bool) -> Kind | None:
    if not hosted or (record.output is None and record.memory_kind == "device"):
        return None
    order = None if record.memory_kind == "device" else record.order
    return Kind(memory=record.memory_kind, order=order)


def _anywhere(mesh: Mesh | None, kind: str) -> NamedSharding:
    """Where what is put nowhere belongs: all of the mesh, or JAX's first device."""
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    (device,) = jax.device_put(0.0).sharding.device_set
    return one_device_sharding(device, kind)


def _argument(path: str) -> str:
    return path[: path.index("]") + 1]


def _below(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path))


def _signature(records: Sequence[ArgumentRecord]) -> list[Any]:
    return [
        (r.path[len(_argument(r.path)) :], tuple(r.shape), r.dtype) for r in records
    ]


def _type(leaf: Any) -> tuple[tuple[int, ...], str]:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        dtype = jax.dtypes.canonicalize_dtype(type(leaf))
    return tuple(getattr(leaf, "shape", ())), str(dtype)
