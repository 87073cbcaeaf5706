"""Where the arguments of a planned step belong: in device memory or in the host's.

A plan has a record per array of the step's arguments. `planned_kinds` finds the records
of whatever arguments it is given, all of them or some: a training loop places its state
once, and hands over batches later.
"""

from collections.abc import Sequence
from typing import Any

import jax

from ._plan_record import ArgumentRecord

_ON_DEVICE = (None, "device")


def planned_kinds(records: Sequence[ArgumentRecord], args: Sequence[Any]) -> Any:
    """The memory kind of every array of `args`, as trees of the same structure.

    An argument belongs to the first of the step's arguments that has its paths, shapes
    and dtypes and is not taken by an earlier one; what is none of them stays on the
    device.
    """
    planned: dict[str, list[ArgumentRecord]] = {}
    for record in records:
        planned.setdefault(_argument(record.path), []).append(record)
    kinds = []
    for number, tree in enumerate(args):
        leaves, structure = jax.tree.flatten_with_path(tree)
        signature = [(_below(path), *_type(leaf)) for path, leaf in leaves]
        # Its own place first: then the order of the step's arguments decides.
        names = sorted(planned, key=lambda name: name != f"args[{number}]")
        found = next((n for n in names if _signature(planned[n]) == signature), None)
        own = planned.pop(found) if found else []
        mine = [record.memory_kind for record in own] or ["device"] * len(leaves)
        kinds.append(jax.tree.unflatten(structure, mine))
    return tuple(kinds)


def put(leaf: Any, kind: str) -> Any:
    """An array in memory of that kind, partitioned as it is."""
    if isinstance(leaf, jax.Array):
        current = leaf.sharding.memory_kind
        if current == kind or (kind == "device" and current in _ON_DEVICE):
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
    if kind == "device":
        return jax.device_put(leaf)
    return jax.device_put(leaf, _here().with_memory_kind(kind))


def spec_in(spec: Any, kind: str) -> Any:
    """A `jax.ShapeDtypeStruct` in memory of that kind."""
    if kind == "device" or spec.sharding is None:
        return spec
    return spec.update(sharding=spec.sharding.with_memory_kind(kind))


def _here() -> Any:
    return jax.device_put(0.0).sharding


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
