"""Running a step several times in a row, on copies, and handing on what comes back.

The arguments belong to the caller: a planned step donates its state, so every run gets
copies, made leaf by leaf. What a step returns is looked at leaf by leaf as well: a
state fills the device, and there is no room for two.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import VerifyMemoryError
from .._plan._plan import Plan
from .._state._places import Kind, mesh_of, planned_kinds, put

Visit = Callable[[int, Any], bool | None]
"""Called with the number of a step, from one, and what it returned; true to stop."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The step in one of its two forms, and the device that is to run it.

    `place` puts a copy of an argument where the form wants it: it gets the argument and
    the kind of memory that the plan has for it. `device` is `None` for wherever the
    arguments are.
    """

    name: str
    jitted: Callable[..., Any]
    place: Callable[[Any, Kind | None], Any]
    records: Sequence[Any]
    updates: Mapping[int, int]
    device: Any = None


def planned_version(plan: Plan, step: Any, args: Any, updates: Any) -> Version:
    """The step as the plan has it, in the memory where the plan has it."""
    mesh = mesh_of(args)
    with warnings.catch_warnings():  # that it does not fit is no news
        warnings.simplefilter("ignore", UserWarning)
        jitted = plan.apply(step)
    return Version(
        name="planned",
        jitted=jitted,
        place=lambda leaf, kind: put(_copied(leaf), kind, mesh),
        records=plan.arguments,
        updates=updates,
    )


def plain_version(
    step: Any, records: Any, updates: Any, donate: tuple[int, ...], device: Any
) -> Version:
    """The step as it is written; all of it on `device`, or in its devices' memory."""
    return Version(
        name="plain",
        jitted=jax.jit(step, donate_argnums=donate),
        place=(lambda leaf, kind: put(_copied(leaf), None))
        if device is None
        else (lambda leaf, kind: _on(leaf, device)),
        records=records,
        updates=updates,
        device=device,
    )


def run_steps(
    version: Version,
    args: Sequence[Any],
    steps: int,
    visit: Visit,
    change: Callable[[Any], Any] = lambda leaf: leaf,
) -> None:
    """Runs `steps` steps, each on the state that the one before returned.

    **Arguments:** `change` gets a placed copy of every array before the first step.

    **Raises:** `VerifyMemoryError` where the device has no room for it.
    """
    flat, structure = jax.tree.flatten(tuple(args))
    kinds = jax.tree.leaves(
        planned_kinds(version.records, args), is_leaf=lambda kind: kind is None
    )
    place = contextlib.nullcontext()
    if version.device is not None:
        place = jax.default_device(version.device)
    with place, memory_errors(version):
        given = [
            change(version.place(leaf, kind))
            for leaf, kind in zip(flat, kinds, strict=True)
        ]
        for number in range(1, steps + 1):
            out = version.jitted(*jax.tree.unflatten(structure, given))
            if visit(number, out):
                return
            results = jax.tree.leaves(out)
            for i, k in version.updates.items():
                given[i] = results[k]
            del out, results


@contextlib.contextmanager
def memory_errors(version: Version) -> Any:
    """Says what to do where the device has no room; other errors stay as they are."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise VerifyMemoryError(version.name, str(error)) from error


def on_host(leaf: Any) -> np.ndarray:
    """The numbers of an array, whole; of a random key its words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _copied(leaf: Any) -> Any:
    """A copy that shares no memory with `leaf`; a Python number is its own."""
    if isinstance(leaf, jax.Array):
        if leaf.committed:
            return jax.device_put(leaf, leaf.sharding, may_alias=False)
        return jax.device_put(leaf, may_alias=False)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _on(leaf: Any, device: Any) -> Any:
    """A copy on one device, from wherever it is; all of it, if it was in parts.

    Copied first: of an array that is there in several copies, `device_put` hands out
    the one that is on `device`, also where it may not.
    """
    return jax.device_put(_copied(leaf), device)
