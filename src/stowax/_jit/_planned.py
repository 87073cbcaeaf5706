"""A step that plans itself when it is called with arguments of a new kind.

What is called again with arrays of the same types costs what `jax.jit`'s function
costs, because it is one. A call that is not like the planned ones is noticed when JAX
traces it (`PlanMismatchError`), and goes the slow way, which plans it.
"""

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._calling._calling import Taken, flattened
from .._calling._known import Known
from .._calling._objects import together
from .._errors import (
    ArgumentError,
    MisfitError,
    NothingToPlanError,
    PlanMismatchError,
)
from .._plan import _asked
from .._plan._effect import put_into_effect, why_it_does_not_fit
from .._plan._plan import Plan, load_plan
from .._plan._planning import plans_for
from .._target._machine import Target
from ._placing import Placing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What `stowax.jit` was asked: the arguments of `stowax.plan` by these names."""

    budget: int | str | None = None
    host_budget: int | str | None = None
    target: str | Target | None = None
    pin: Mapping[str, str] | None = None
    forbid: Collection[str] = ()
    keep_checkpoint: bool = False
    roll: bool = True
    compiler_options: Mapping[str, Any] | None = None
    compiles: int | None = None
    cache: str | os.PathLike[str] | None = None
    progress: _asked.Progress = None


def wished(wishes: Mapping[str, Any]) -> Wishes:
    """The wishes of these names.

    **Raises:** `ArgumentError` for a name that is none.
    """
    names = [field.name for field in dataclasses.fields(Wishes)]
    for name, value in wishes.items():
        if name not in names:
            raise ArgumentError(name, f"{value!r:.60}", f"Write one of {names}.")
    return Wishes(**wishes)


def given_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """A plan, or that of a file."""
    return plan if plan is None or isinstance(plan, Plan) else load_plan(plan)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """The program for arguments of one kind, and its plan, if it has one.

    `give` makes the program's results the step's. `direct` says that the program takes
    the user's own arguments.
    """

    plan: Plan | None
    run: Any
    give: Callable[[Any], Any]
    placing: Placing | None
    direct: bool

    def arrays(self, taken: Taken) -> tuple[Any, ...]:
        """The arrays of a call, where the plan wants them."""
        if self.placing is None:
            return taken.arrays
        return self.placing.place(taken.arrays)

    def specs(self, taken: Taken) -> tuple[Any, ...]:
        """What the program is lowered for."""
        if self.placing is None or self.plan is None:
            return taken.arrays
        specs = self.plan.specs(*taken.arrays)
        return (specs,) if len(taken.arrays) == 1 else specs


class Planned:
    """A step under a plan, called as `jax.jit`'s function would be.

    `plan` is that of the last kind of arguments that was planned: `None` before the
    first call, and where there is nothing to plan. `known` says how the step is called.
    """

    def __init__(self, what: Known, wishes: Wishes, plan: Plan | None):
        functools.update_wrapper(self, what.function)
        self.plan: Plan | None = plan
        self.known, self._wishes, self._given = what, wishes, plan
        self._ready: dict[Hashable, _Ready] = {}
        self._fast: Callable[..., Any] | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's results, planned at the first call with arguments of a kind.

        **Raises:** what `stowax.plan` raises, and the step itself; `MisfitError`.
        """
        if self._fast is not None:
            try:
                return self._fast(*args, **kwargs)
            except PlanMismatchError:
                pass  # of another kind, or not yet where the plan wants them
        if any(_jax.is_tracer(leaf) for leaf in jax.tree.leaves((args, kwargs))):
            return self.known.function(*args, **kwargs)  # within another trace
        with together():
            taken, ready = self._for(args, kwargs)
            return ready.give(ready.run(*ready.arrays(taken)))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `lower` of `jax.jit`'s functions; planned first, if need be."""
        with together():
            taken, ready = self._for(args, kwargs)
            return ready.run.lower(*ready.specs(taken))

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `trace` of `jax.jit`'s functions; planned first, if need be."""
        with together():
            taken, ready = self._for(args, kwargs)
            return ready.run.trace(*ready.specs(taken))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A step that is a method is bound to its object, as any function is."""
        return self if instance is None else functools.partial(self, instance)

    def _for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Taken, _Ready]:
        """The arguments taken apart, and the program for them."""
        taken, own, flat = flattened(self.known, args, kwargs)
        key = taken.key, _types(taken.arrays)
        with self._lock:
            if key not in self._ready:
                self._ready[key] = self._made(args, kwargs, taken, own, flat)
                direct = len(self._ready) == 1 and self._ready[key].direct
                self._fast = self._ready[key].run if direct else None
            ready = self._ready[key]
        self.plan = ready.plan
        return taken, ready

    def _made(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        taken: Taken,
        own: Any,
        flat: Any,
    ) -> _Ready:
        give = getattr(flat, "give", _as_it_is)
        try:
            plan = self._planned(args, kwargs)
        except NothingToPlanError as nothing:
            self._say()(f"{nothing} It runs as jax.jit would run it.")
            donated = tuple(sorted(self.known.donated or ()))
            run = jax.jit(flat, donate_argnums=donated)
            return _Ready(
                plan=None, run=run, give=give, placing=None, direct=own is not None
            )
        if not plan.fits:
            raise MisfitError(why_it_does_not_fit(plan))
        return _Ready(
            plan=plan,
            run=put_into_effect(plan, flat),
            give=give,
            placing=Placing.of(plan, taken.arrays),
            direct=own is not None,
        )

    def _planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
        if self._given is not None:
            return self._given
        if self._ready:
            name = getattr(self.known.function, "__name__", "the step")
            self._say()(f"planning {name} anew, for arguments of other types")
        wishes = {
            field.name: getattr(self._wishes, field.name)
            for field in dataclasses.fields(Wishes)
        }
        budgets = (wishes.pop("budget"),)
        (plan,) = plans_for(
            self.known, args, kwargs, budgets=budgets, donate=None, **wishes
        )
        return plan

    def _say(self) -> Callable[[str], None]:
        """Where one line goes, at once."""
        return _asked.sayer(self._wishes.progress, time.perf_counter() - 1e9)


def _as_it_is(out: Any) -> Any:
    return out


def _types(arrays: Any) -> Hashable:
    """Shapes, dtypes and shardings of arrays: what a plan is made for."""
    found = []
    for leaf in jax.tree.leaves(arrays):
        aval = _jax.aval_of(leaf)
        sharding = getattr(leaf, "sharding", None)
        spread = sharding if sharding and len(sharding.device_set) > 1 else None
        if spread is not None and spread.memory_kind not in (None, "device"):
            spread = spread.with_memory_kind("device")
        found.append((aval.shape, aval.dtype, spread))
    return tuple(found)
