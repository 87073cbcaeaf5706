"""The jitted step where arrays in host memory do not lie as they are typed.

`jax.jit` has to be told the layouts of arguments and of results, and it takes those of
results as a tree of the step's own outputs, which nobody has before the step is traced.
So `OrderedStep` is in the place of what `jax.jit` returns: it traces the step once to
see what comes out, and has `jax.jit` make the program with the layouts then. The trace
is JAX's own, and JAX keeps it.

Layouts are a TPU's (`_axis_order`): on other devices this is `jax.jit` and no more.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._errors import PlanMismatchError
from .._jax import argument_path, is_tracer
from .._jax_layouts import in_layout, order_of
from .._layers._axis_order import lying

PLATFORMS = frozenset({"tpu"})
"""Where arrays in host memory get layouts."""


def has_layouts(sharding: Any) -> bool:
    """Whether arrays with this sharding get a layout where a plan has an order."""
    if sharding is None or sharding.memory_kind in (None, "device"):
        return False
    return all(device.platform in PLATFORMS for device in sharding.device_set)


class OrderedStep:
    """A step as `jax.jit` would return it; made by `ordered_step`."""

    def __init__(
        self,
        step: Callable[..., Any],
        orders: Mapping[int, tuple[int, ...]],
        updates: Mapping[int, int | None],
        jit: Callable[..., Any],
    ):
        functools.update_wrapper(self, step)
        self._step = step
        self._orders, self._updates, self._jit = orders, updates, jit
        self._plain = jit(step)
        self._jitted: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Runs the step."""
        return self._for(args)(*args)

    def trace(self, *args: Any) -> Any:
        """As `jax.jit(step).trace`."""
        return self._for(args).trace(*args)

    def lower(self, *args: Any, **options: Any) -> Any:
        """As `jax.jit(step).lower`."""
        return self._for(args).lower(*args, **options)

    def eval_shape(self, *args: Any) -> Any:
        """As `jax.jit(step).eval_shape`."""
        return self._for(args).eval_shape(*args)

    def clear_cache(self) -> None:
        """As `jax.jit(step).clear_cache`."""
        self._plain.clear_cache()
        self._jitted.clear()

    def _for(self, args: Sequence[Any]) -> Any:
        """What `jax.jit` makes of the step for arguments in these places.

        **Raises:** `PlanMismatchError` for an array that lies in another order.
        """
        leaves, structure = jax.tree.flatten(tuple(args))
        mine = {i: leaves[i] for i in self._orders if i < len(leaves)}
        if any(is_tracer(leaf) for leaf in mine.values()):
            return self._plain
        shardings = {i: getattr(leaf, "sharding", None) for i, leaf in mine.items()}
        if not all(has_layouts(sharding) for sharding in shardings.values()):
            return self._plain
        for i, leaf in mine.items():
            if order_of(leaf) != self._orders[i]:
                raise _lies_otherwise(args, i, self._orders[i])
        key = structure, tuple(shardings.values())
        if key not in self._jitted:
            places = {i: in_layout(s, self._orders[i]) for i, s in shardings.items()}
            self._jitted[key] = self._with_layouts(args, places)
        return self._jitted[key]

    def _with_layouts(self, args: Sequence[Any], places: Mapping[int, Any]) -> Any:
        """`jax.jit(step)`, told how the results lie; arguments bring their layouts."""
        out, structure = jax.tree.flatten(self._plain.eval_shape(*args))
        results: list[Any] = [None] * len(out)
        for i, place in places.items():
            if (output := self._updates[i]) is not None:
                results[output] = place
        places_of_results = jax.tree.unflatten(structure, results)
        return self._jit(self._step, out_shardings=places_of_results)


def _lies_otherwise(
    args: Sequence[Any], i: int, order: tuple[int, ...]
) -> PlanMismatchError:
    path, leaf = jax.tree.leaves_with_path(tuple(args))[i]
    name = argument_path(path)
    found = order_of(leaf) or tuple(range(len(order)))
    wanted = "×".join(map(str, lying(leaf.shape, order)))
    return PlanMismatchError(
        f"step: {name} lies in host memory with its axes in the order {found}, and the "
        f"plan has it in the order {order}, as {wanted}: its layers first, which are "
        "fetched one by one. Call the step with what plan.place(...) returns, and "
        "compile it for plan.specs(...)."
    )
