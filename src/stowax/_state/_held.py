"""The jitted step where somebody holds what it is to overwrite in host memory.

NumPy's view of an array in host memory is the array: neither `np.asarray` nor what
writes a checkpoint copies anything. While such a view is alive a GPU refuses the
program that is given the array to overwrite ("Donation requested for buffer with
external reference"). It does so before anything runs, and leaves what it was given as
it was. So the step is called again with copies, and the view keeps what it saw.
"""

import functools
import types
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from .._jax_layouts import in_layout, order_of
from ._ordered_step import has_layouts

_HOST = "pinned_host"
_HELD = "Donation requested for buffer with external reference"


class HeldStep:
    """A jitted step that takes host memory, as `jax.jit` would return it.

    `donated` are the numbers of the arguments that it may overwrite.
    """

    def __init__(self, jitted: Any, donated: Collection[int]):
        functools.update_wrapper(self, jitted, updated=())
        self._jitted, self._donated = jitted, frozenset(donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        try:
            return self._jitted(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if _HELD not in str(error):
                raise
        own = (
            jax.tree.map(copied, arg) if number in self._donated else arg
            for number, arg in enumerate(args)
        )
        return self._jitted(*own, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # What else `jax.jit`'s functions have; copies ask before there is one.
        if name.startswith("__") or name == "_jitted":
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # As a function that is an attribute of a class.
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(step).trace`."""
        return self._jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(step).lower`; what is compiled of it copies nothing."""
        return self._jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(step).eval_shape`."""
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As `jax.jit(step).clear_cache`."""
        self._jitted.clear_cache()


def copied(leaf: Any) -> Any:
    """A copy of an array in host memory, in its place; others are returned as is.

    So are random keys, of which NumPy has no view.
    """
    if not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind != _HOST:
        return leaf
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    parts = [
        jax.device_put(np.array(shard.data), _place_of(shard.data))
        for shard in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _place_of(array: Any) -> Any:
    order = order_of(array) if has_layouts(array.sharding) else None
    return in_layout(array.sharding, order) if order else array.sharding
