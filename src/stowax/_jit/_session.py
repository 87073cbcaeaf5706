"""`stowax.planning`: every `jax.jit` in a block, or a script, under a budget.

`jax.jit` is replaced for the time. What JAX's own modules jit stays theirs. A function
is looked at when it is first called: one that differentiates is planned; any other runs
as it did, and what a plan has put into host memory is brought to the device for it.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from .. import _jax
from .._calling._known import known
from .._errors import ArgumentError, StepError
from .._mark import noticing
from .._plan._plan import Plan
from ._planned import Planned, Wishes, given_plan, wished

_JAXS_OWN = ("jax.", "jaxlib.", "stowax.")


class Session:
    """What `stowax.planning` yields: `plans` has every plan that was made, by name.

    `notes` are what is said of functions that run as they are written.
    """

    def __init__(self, wishes: Wishes, plan: Plan | None):
        self.wishes, self.given = wishes, plan
        self.notes: list[str] = []
        self._steps: list[_Step] = []

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans, by the names of their steps."""
        found: dict[str, Plan] = {}
        for step in self._steps:
            if step.planned is not None and step.planned.plan is not None:
                found[step.__name__] = step.planned.plan
        return found

    def jit(self, original: Callable[..., Any]) -> "_Step":
        """A step in place of a function that `jax.jit` made."""
        step = _Step(original, self)
        self._steps.append(step)
        return step

    def hosts(self) -> bool:
        """Whether a plan has put anything into host memory."""
        kinds = {a.memory_kind for p in self.plans.values() for a in p.arguments}
        return bool(kinds - {"device"})


class _Step:
    """A jitted function that is planned if it turns out to differentiate."""

    def __init__(self, original: Any, session: Session):
        functools.update_wrapper(self, original)
        self._original, self._session = original, session
        self.planned: Planned | None = None
        self._call: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function that `jax.jit` made."""
        if self._call is None:
            if any(_jax.is_tracer(leaf) for leaf in jax.tree.leaves((args, kwargs))):
                return self._original(*args, **kwargs)
            self._call = self._decided(args, kwargs)
        try:
            return self._call(*args, **kwargs)
        except StepError as error:
            if self.planned is None or self.planned.plan is not None:
                raise
            self._session.notes.append(
                f"{self.__name__} runs as it is written: {error}"
            )
            self.planned, self._call = None, self._plainly
            return self._plainly(*args, **kwargs)

    def _decided(self, args: Any, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        with noticing() as seen:
            self._original.trace(*_on_device(args), **_on_device(kwargs))
        if not seen.found:
            return self._plainly
        session = self._session
        self.planned = Planned(known(self._original), session.wishes, session.given)
        return self.planned

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        if self._session.hosts():
            args, kwargs = _on_device(args), _on_device(kwargs)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


def _on_device(tree: Any) -> Any:
    """Arrays in host memory, on the device that they belong to."""

    def fetched(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or _jax.is_tracer(leaf):
            return leaf
        if leaf.sharding.memory_kind != "pinned_host":
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))

    return jax.tree.map(fetched, tree)


@contextlib.contextmanager
def planning(
    *, plan: Plan | str | os.PathLike[str] | None = None, **wishes: Any
) -> Iterator[Session]:
    """Every `jax.jit` in here is `stowax.jit`, a framework's own included.

    A jitted function that differentiates is planned when it is first called; one that
    does not runs as it is written, and is given arrays on the device where a plan has
    put them into host memory. Functions that were jitted before are left alone.

    **Arguments:** `plan` as for `stowax.jit`, and as `wishes` what that has in common
    with `stowax.plan` (`budget`, `host_budget`, `target`, `pin`, `forbid`, …).

    **Yields:** a `Session` with the `plans` that were made.

    **Raises:** `ArgumentError` within another one; in the block what `stowax.plan`
    raises, and `MisfitError` where no plan keeps the budget.

    ```python
    with stowax.planning(budget="16GiB") as session:
        train()
    print(session.plans)
    ```
    """
    real = jax.jit
    if getattr(real, "stowax_planning", False):
        raise ArgumentError(
            "planning", "a block within another one", "Leave out one of the two."
        )
    session = Session(wished(wishes), given_plan(plan))

    def jit(fun: Any = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(jit, **options)
        made = real(fun, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if f"{caller}.".startswith(_JAXS_OWN):
            return made
        return session.jit(made)

    functools.update_wrapper(jit, real)
    jit.stowax_planning = True
    jax.jit = jit
    try:
        yield session
    finally:
        jax.jit = real
