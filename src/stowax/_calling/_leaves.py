"""The leaves of a step's arguments and results: arrays, objects, everything else.

Arrays, and the Python numbers that `jax.jit` takes for arrays, are what a step computes
with. The rest (functions, strings, whatever an Equinox module carries beside its
arrays) is the same in every call, or makes another step.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._objects import is_object

_NUMBERS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Static:
    """An argument that the step's own `jit` takes as it is.

    Equal ones are of the same type, as `jax.jit` has it: `1`, `1.0` and `True` make
    programs of their own.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        """Whether it is the same argument to `jax.jit`."""
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return bool(self.value == other.value)

    def __hash__(self) -> int:
        """The same for equal ones."""
        return hash((type(self.value), self.value))


def whole(objects: bool) -> Callable[[Any], bool]:
    """What stays a leaf that a pytree library would take apart further.

    **Arguments:** `objects` says whether NNX's are changed in place, as under
    `nnx.jit`. To `jax.jit` they are trees of values: what becomes of them is what the
    step returns.
    """
    if not objects:
        return lambda leaf: isinstance(leaf, Static)
    return lambda leaf: isinstance(leaf, Static) or is_object(leaf)


def is_array(leaf: Any) -> bool:
    """Whether JAX computes with this, Python's numbers aside."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def flatten(tree: Any, objects: bool) -> tuple[list[Any], Any]:
    """Leaves and structure, objects and static arguments as leaves."""
    return jax.tree.flatten(tree, is_leaf=whole(objects))


def computed(
    tree: Any, leaves: Sequence[Any], *, numbers: bool, objects: bool
) -> list[bool]:
    """Which of the leaves of `tree` the step computes with; objects are not.

    **Arguments:** `numbers` says whether Python's are: `jax.jit` traces them,
    `eqx.filter_jit` does not. Those in an Equinox module are never: it asks `if
    self.inference`.
    """
    flags = [is_array(leaf) for leaf in leaves]
    if not numbers or all(flags):
        return flags
    fields = in_modules(tree, objects)
    return [
        flag or (isinstance(leaf, _NUMBERS) and k not in fields)
        for k, (flag, leaf) in enumerate(zip(flags, leaves, strict=True))
    ]


def in_modules(tree: Any, objects: bool) -> set[int]:
    """The positions of leaves that belong to Equinox modules."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return set()

    def is_module(leaf: Any) -> bool:
        return isinstance(leaf, equinox.Module)

    found, position = set[int](), 0
    stays = whole(objects)
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: is_module(x) or stays(x)):
        count = len(flatten(leaf, objects)[0]) if is_module(leaf) else 1
        if is_module(leaf):
            found.update(range(position, position + count))
        position += count
    return found
