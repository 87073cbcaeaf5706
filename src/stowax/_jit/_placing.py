"""Arrays of a call on their way to where the plan wants them."""

import collections
import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax

from .. import _jax
from .._plan._plan import Plan
from .._state._places import mesh_of, planned_kinds, put, spec_put
from ._lent import copied

# How JAX (0.10 to 0.12) begins to say so, itself and by its runtime.
_OF_DONATION = re.compile(
    "Array has been deleted"
    "|INVALID_ARGUMENT: (Attempt to (donate|use a buffer)|Invalid buffer passed)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Where each array of a step's arguments belongs, flat."""

    kinds: tuple[Any, ...]
    donated: tuple[bool, ...]

    @classmethod
    def of(cls, plan: Plan, arrays: Sequence[Any]) -> "Placing | None":
        """The places of a plan with state in host memory; `None` of any other."""
        if all(a.memory_kind == "device" for a in plan.program.arguments):
            return None
        kinds = planned_kinds(plan.program.arguments, arrays)
        donated = tuple(
            position in plan.program.donate_argnums
            for position, tree in enumerate(arrays)
            for _ in jax.tree.leaves(tree)
        )
        return cls(kinds=tuple(kinds), donated=donated)

    def place(self, arrays: Sequence[Any], lent: Collection[int] = ()) -> Any:
        """`arrays` where they belong; those that are `lent`, by identity, are copies.

        What moves and is donated anyway gives its old memory back at once: else the
        first step would need room for the state twice.
        """
        leaves, structure = jax.tree.flatten(tuple(arrays))
        mesh, uses = mesh_of(arrays), [id(leaf) for leaf in leaves]
        placed = []
        for leaf, kind, donated in zip(leaves, self.kinds, self.donated, strict=True):
            new = put(leaf, kind, mesh)
            if donated and isinstance(leaf, jax.Array):
                moved = new.sharding.memory_kind != leaf.sharding.memory_kind
                if id(leaf) in lent:
                    new = new if moved else copied(new)
                elif moved and uses.count(id(leaf)) == 1:
                    new.block_until_ready()
                    leaf.delete()
            placed.append(new)
        return jax.tree.unflatten(structure, placed)

    def specs(self, arrays: Sequence[Any]) -> Any:
        """What `place` would return, for lowering: what would move is a spec."""
        leaves, structure = jax.tree.flatten(tuple(arrays))
        mesh = mesh_of(arrays)
        placed = [
            spec_put(leaf, kind, mesh)
            for leaf, kind in zip(leaves, self.kinds, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)


def apart(arrays: Sequence[Any], donated: Sequence[int]) -> tuple[Any, ...]:
    """`arrays`, where what is given away is nothing else's, too.

    A target network starts as the online network: the same arrays twice. JAX refuses
    to be given a buffer that it may overwrite, and to be given it once more. What is
    given away is a copy then: the other one stays the caller's.
    """
    if not donated:
        return tuple(arrays)
    uses = collections.Counter(id(leaf) for leaf in jax.tree.leaves(tuple(arrays)))
    held = {
        id(leaf)
        for position, tree in enumerate(arrays)
        if position not in donated
        for leaf in jax.tree.leaves(tree)
    }

    def own(leaf: Any) -> Any:
        if uses[id(leaf)] == 1 or not isinstance(leaf, jax.Array):
            return leaf
        if id(leaf) in held:
            return copied(leaf)
        held.add(id(leaf))
        return leaf

    return tuple(
        jax.tree.map(own, tree) if position in donated else tree
        for position, tree in enumerate(arrays)
    )


def is_about_donation(error: Exception) -> bool:
    """Whether JAX complains of an array that was given away, or is given twice.

    It does before anything runs. Further inside of a message the same words are
    somebody else's: a host callback's, whose step has run.
    """
    return _OF_DONATION.match(str(error)) is not None


def raise_no_number(error: Exception, name: str, args: Any = None) -> None:
    """**Raises:** `FloatingPointError` where `error` is of JAX's search for a NaN.

    Under `jax.debug_nans` JAX runs a step that gave one again, operation by operation.
    It cannot where arguments were donated, and an inner function's NaN stops it. With
    `args`, only where some of them are gone: else the caller runs the step again.
    """
    found = error.__context__
    while found is not None and type(found).__name__ != "InternalFloatingPointError":
        if isinstance(found, FloatingPointError):  # an earlier one, which is handled
            return
        found = found.__context__
    if found is None or (args is not None and not _any_deleted(args)):
        return
    raise FloatingPointError(
        f"invalid value ({getattr(found, 'ty', 'nan')}) encountered in {name}. JAX "
        "could not run it again under its plan, which may have donated its arguments, "
        "to see where: call it under jax.disable_jit() with its last state."
    ) from None


def _any_deleted(args: Any) -> bool:
    leaves = jax.tree.leaves(args)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def on_one_mesh(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """`arrays`, those from nowhere on the mesh that the types of others name.

    Or on that which is set. JAX mixes both, and what comes out is on the mesh. A plan
    is made for one of them.
    """
    leaves = jax.tree.leaves(arrays)
    types = (_jax.explicit_sharding(_jax.aval_of(leaf)) for leaf in leaves)
    typed = [k for k, sharding in enumerate(types) if sharding is not None]
    mesh = leaves[typed[0]].sharding.mesh if typed else jax.sharding.get_mesh()
    if len(typed) == len(leaves) or not mesh.explicit_axes:
        return arrays
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(leaf: Any) -> Any:
        if _jax.explicit_sharding(_jax.aval_of(leaf)) is not None:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf if leaf.sharding else leaf.update(sharding=whole)
        if isinstance(leaf, jax.Array) and leaf.committed:
            return leaf
        # Python's numbers have a type of their own, and no mesh in it.
        return jax.device_put(leaf, whole) if hasattr(leaf, "shape") else leaf

    return jax.tree.map(put, arrays)


def on_device(tree: Any) -> Any:
    """Arrays in host memory, on the device that they belong to."""

    def fetched(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if _jax.is_tracer(leaf):
            host = _jax.in_host_memory(leaf)
            return jax.device_put(leaf, jax.memory.Space.Device) if host else leaf
        if leaf.sharding.memory_kind != "pinned_host":
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))

    return jax.tree.map(fetched, tree)
