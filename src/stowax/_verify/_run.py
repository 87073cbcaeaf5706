"""Running a step several times in a row, on copies, and handing on what comes back.

The arguments belong to the caller: a planned step donates its state, so every run gets
copies (`_own`), made leaf by leaf. What a step returns is looked at leaf by leaf as
well: a state fills the device, and there is no room for two.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import StowaxError, VerifyMemoryError
from .._plan._plan import Plan
from .._state._places import Kind, mesh_of, planned_kinds, put
from ._checks import comparable
from ._own import OwnArguments

Visit = Callable[[int, Any], bool | None]
"""Called with the number of a step, from one, and what it returned; true to stop."""


class StepFails(Exception):
    """The planned step ended in an error, which is the cause, where it has to run."""

    def __init__(self, step: int, error: Exception):
        self.step = step
        first = str(error).strip().partition("\n")[0]
        super().__init__(f"the planned step raises {type(error).__name__}: {first}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The step in one of its two forms, and the device that is to run it.

    `place` puts a copy of an argument where the form wants it: it gets the argument and
    the kind of memory that the plan has for it. `pairs` says which result takes the
    place of which array of the arguments. `device` is `None` for wherever the arguments
    are.
    """

    name: str
    jitted: Callable[..., Any]
    place: Callable[[Any, Kind | None], Any]
    records: Sequence[Any]
    pairs: Mapping[int, int]
    device: Any = None


def planned_version(plan: Plan, step: Any, args: Any, pairs: Any) -> Version:
    """The step as the plan has it, in the memory where the plan has it."""
    mesh = mesh_of(args)
    with warnings.catch_warnings():  # that it does not fit is no news
        warnings.simplefilter("ignore", UserWarning)
        jitted = plan.apply(step)
    return Version(
        name="planned",
        jitted=jitted,
        place=lambda leaf, kind: put(_copied(leaf), kind, mesh),
        records=plan.program.arguments,
        pairs=pairs,
    )


def plain_version(
    step: Any,
    records: Any,
    pairs: Any,
    donate: tuple[int, ...],
    device: Any,
) -> Version:
    """The step as it is written; all of it on `device`, or in its devices' memory."""
    return Version(
        name="plain",
        jitted=jax.jit(step, donate_argnums=donate),
        place=(lambda leaf, kind: put(_copied(leaf), None))
        if device is None
        else (lambda leaf, kind: _on(leaf, device)),
        records=records,
        pairs=pairs,
        device=device,
    )


def run_steps(
    version: Version,
    args: Sequence[Any],
    steps: int,
    visit: Visit,
    change: Callable[[int, Any], Any] = lambda number, leaf: leaf,
) -> None:
    """Runs `steps` steps, each on what the one before returned.

    **Arguments:** `change` gets the flat number and a placed copy of every array
    before the first step.

    **Raises:** `VerifyMemoryError` where the device has no room for it; `StepFails`
    where the planned step ends in any other error.
    """
    flat = jax.tree.leaves(tuple(args))
    kinds = planned_kinds(version.records, args)
    place = contextlib.nullcontext()
    if version.device is not None:
        place = jax.default_device(version.device)
    with place, memory_errors(version):
        own = OwnArguments(
            tuple(args), lambda i: change(i, version.place(flat[i], kinds[i]))
        )
        for number in range(1, steps + 1):
            try:
                out = version.jitted(*own.args())
            except (
                jax.errors.JaxRuntimeError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as e:
                if version.name == "plain" or isinstance(e, StowaxError) or _is_full(e):
                    raise
                raise StepFails(number, e) from e
            if visit(number, comparable(out)):
                return
            own.take(out, version.pairs)
            del out


@contextlib.contextmanager
def memory_errors(version: Version) -> Any:
    """Says what to do where the device has no room; other errors stay as they are."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _is_full(error):
            raise
        raise VerifyMemoryError(version.name, str(error)) from error


def _is_full(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


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
