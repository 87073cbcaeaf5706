"""The machine that a step's arguments name by their shardings, or stand in for.

Scripts that compile ahead of time (MaxText's `train_compile`, whatever calls
`jax.experimental.topologies`) shard over devices of a TPU that is not there, made by
another client than ours. Those devices are the target.

A script that spreads its arrays over a mesh of this machine's own devices, and is
planned for a machine that is not there, cannot be told to build another mesh. There its
devices stand in for the target's: the step is traced over them, and compiled for those.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .._errors import ArgumentError, NothingToPlanError
from .._hardware._hardware import chip_of_kind
from ._machine import Target, make_target
from ._specs import ONE_DEVICE
from ._target import attached_devices, platform_name, target, targets


def target_for(wanted: str | Target | None, args: Any) -> Target:
    """The target that is wanted; by default the one whose devices `args` are over.

    A wanted name of the same machine is that machine with the devices of `args`.

    **Raises:** `NothingToPlanError` for arguments over devices that make up no target,
    where none is wanted; else what `stowax.target` raises.
    """
    if isinstance(wanted, Target):
        return stood_in(wanted, args)
    devices, here = _spread_over(args), attached_devices(None)
    if devices <= {*here}:
        return stood_in(target(wanted), args)
    named = _named(devices)
    if named is not None and wanted in (None, named.name):
        return named
    if wanted is not None:
        return stood_in(target(wanted), args)
    names = sorted(map(str, devices))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise NothingToPlanError(
        f"step: its arguments are sharded over {', '.join(names[:3])}{more}, which are "
        f"not this machine's ({here[0].device_kind}). Name the machine that they stand "
        "for: target='h200x8', say, or another one of stowax.targets()."
    )


def stood_in(machine: Target, args: Any, meshes: Sequence[Any] = ()) -> Target:
    """`machine`, with the devices that types of `args` name in the place of its own.

    Or that `meshes` are over, which the step itself names.

    Where it is not there, and these are attached.

    **Raises:** `ArgumentError` where they are more than it has, or beside its own.
    """
    named = dict.fromkeys(
        d for mesh in (*_meshes(args), *meshes) for d in mesh.devices.flat
    )
    devices = tuple(named)
    own, here = machine.devices, {*attached_devices(None)}
    if not machine.compile_only or not devices or not {*devices} <= here - {*own}:
        return machine
    if not {*own}.isdisjoint(d for s in _shardings(args) for d in s.device_set):
        raise ArgumentError(
            "args",
            f"arrays over {machine.name} and others, or a mesh that is set, over this "
            "machine",
            f"Build each mesh with stowax.target({machine.name!r}).mesh(...), or none.",
        )
    if len(devices) > len(own):
        raise _too_small(machine, len(devices))
    return dataclasses.replace(
        machine,
        devices=(*devices, *own[len(devices) :]),
        compile_devices=machine.compile_devices or own,
    )


def _too_small(machine: Target, wanted: int) -> ArgumentError:
    larger = [
        record.name
        for record in targets()
        if record.chip.key == machine.chip.key
        and not record.attached
        and record.device_count >= wanted
    ]
    own = machine.device_count
    return ArgumentError(
        "target",
        f"{machine.name!r}, which has {own} device{'s' * (own != 1)}, for arrays that "
        f"are spread over {wanted}",
        f"Write {larger[0]!r}." if larger else "Spread them over fewer.",
    )


def _meshes(args: Any) -> list[Any]:
    """The meshes that types may name: those of arrays, and the one that is set."""
    found = [getattr(sharding, "mesh", None) for sharding in _shardings(args)]
    with contextlib.suppress(ValueError):  # while something is traced
        found.append(jax.sharding.get_mesh())
    return [
        mesh
        for mesh in found
        if mesh is not None and mesh.axis_names not in ((), (ONE_DEVICE,))
    ]


def _shardings(args: Any) -> list[Any]:
    """Those of leaves that have one, over devices: an error of others comes later."""
    found = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    abstract = jax.sharding.AbstractMesh
    return [
        sharding
        for sharding in found
        if sharding is not None
        and not isinstance(getattr(sharding, "mesh", None), abstract)
    ]


def is_lowered_elsewhere(args: Any) -> bool:
    """Whether JAX lowers what `args` are given to for a TPU that is not there."""
    away = _spread_over(args) - {*attached_devices(None)}
    return any(platform_name(device) == "tpu" for device in away)


def _spread_over(args: Any) -> set[Any]:
    """The devices that some leaf names: by a mesh of several, or as a type alone."""
    found: set[Any] = set()
    for leaf in jax.tree.leaves(args):
        devices = {d for sharding in _shardings(leaf) for d in sharding.device_set}
        if len(devices) > 1 or not isinstance(leaf, jax.Array):
            found |= devices
    return found


def _named(devices: set[Any]) -> Target | None:
    """The machine that is made of these devices, under its name."""
    ordered = tuple(sorted(devices, key=lambda device: device.id))
    if attached := _attached(ordered):
        return attached
    chip = chip_of_kind(ordered[0].device_kind)
    if chip is None or chip.platform != "tpu":
        return None  # a GPU that is not there has no memories to plan with
    for record in targets():
        same = record.chip.key == chip.key and record.device_count == len(ordered)
        if same and not record.attached:
            return make_target(record.name, chip, ordered)
    return None


def _attached(devices: tuple[Any, ...]) -> Target | None:
    """Attached devices that are not JAX's default ones: the CPU beside a GPU."""
    name = platform_name(devices[0])
    try:
        there = jax.devices(name)
    except RuntimeError:
        return None
    return target(name) if {*devices} <= {*there} else None
