"""What calls have in common that take one program."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._calling._calling import Taken


def kind_of(
    taken: Taken, context: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Hashable:
    """What calls have in common that take one program."""
    # By name or by position: JAX makes a program for either.
    names = tuple(sorted(kwargs))
    return taken.key, types_of(taken.arrays), context, len(args), names


def _says_where(leaf: Any, sharding: Any) -> bool:
    """Whether a plan is made for where this lies: on several devices, or none here."""
    if isinstance(leaf, jax.Array) or len(sharding.device_set) > 1:
        return len(sharding.device_set) > 1
    return not sharding.device_set <= {*jax.devices()}


def types_of(arrays: Any) -> Hashable:
    """Shapes, types and shardings of arrays: what a plan is made for."""
    found = []
    for leaf in jax.tree.leaves(arrays):
        aval = _jax.aval_of(leaf)
        sharding = getattr(leaf, "sharding", None)
        spread = sharding if sharding and _says_where(leaf, sharding) else None
        if spread is not None and spread.memory_kind not in (None, "device"):
            spread = spread.with_memory_kind("device")
        typed = _jax.explicit_sharding(aval)  # on a mesh of one device, too
        found.append((aval.shape, aval.dtype, aval.weak_type, spread, typed))
    return tuple(found)
