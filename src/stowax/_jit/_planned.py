"""A step that plans itself when it is called with arguments of a new kind.

What is called again with arrays of the same types costs what `jax.jit`'s function
costs, because it is one (or `_state._held` around it). A call that is not like the
planned ones (other types, other settings of JAX's, caches that were cleared) is one
that JAX has to trace. It may not, unless it is told to (`_when_told`); so such a call
goes the slow way, which plans it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import threading
import time
from collections.abc import (
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax

from .. import _jax
from .._calling._calling import Taken, explaining, flattened
from .._calling._known import NO_PROGRAM, Known, KnownStep
from .._calling._objects import together
from .._errors import (
    ArgumentError,
    MisfitError,
    NothingToPlanError,
    PlanMismatchError,
)
from .._plan import _asked
from .._plan._asking import asked_for
from .._plan._key import plan_key, step_key
from .._plan._plan import Plan
from .._survey._asked import Asked
from ._ahead import Ahead, with_static
from ._equinox import is_filter_jit, raise_as_equinox
from ._kept import Kept
from ._kinds import kind_of, types_of
from ._lent import Lent, Results
from ._placing import is_about_donation, on_device, on_one_mesh, raise_no_number
from ._processes import agreed
from ._ready import Ready, given_by, step_under, under
from ._wishes import Given, Wishes

_LITTLE = 2**16
"""Bytes. Arguments that have less, such as a key and a count, free nothing."""


class Planned(KnownStep):
    """A step under a plan, called as `jax.jit`'s function would be.

    `plan` is that of the last kind of arguments that has one: `None` before the first
    call, and where there is nothing to plan. `known` says how the step is called.
    """

    def __init__(self, what: Known, wishes: Wishes, given: Given | None):
        functools.update_wrapper(self, what.function)
        self.plan: Plan | None = given and given.plan
        self.known, self._wishes, self._given = what, wishes, given
        self._kept = Kept.within(wishes.cache)
        self._ready: dict[Hashable, Ready] = {}
        self._results: Results = {}
        self._inlined: dict[Hashable, tuple[Any, Any]] = {}
        self._fast: Callable[..., Any] | None = None
        self._context: Any = None
        self._lock = threading.RLock()
        self._said = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's results, planned at the first call with arguments of a kind.

        **Raises:** what `stowax.plan` raises, and the step itself; `MisfitError`.
        """
        if _jax.is_tracing():
            return self._within(args, kwargs)
        fast = None if kwargs else self._fast  # which knows no names
        if fast is not None:
            try:
                return fast(*args)
            except PlanMismatchError as error:
                raise_no_number(error, self._name, args)
                # else of another kind, or not yet where the plan wants them
            except (RuntimeError, ValueError) as error:
                raise_no_number(error, self._name)
                if not is_about_donation(error):
                    raise_as_equinox(error)
                    raise
        if self.known.pmapped:
            return self._spread(args, kwargs)
        if _jax.jit_is_disabled():
            return self._within(args, kwargs)
        with together():
            taken, ready = self._for(args, kwargs)
            try:
                with _telling():
                    out = ready.run(*ready.arrays(taken))
                if is_filter_jit(self.known.function):
                    jax.block_until_ready(out)  # as that does: its errors come here
            except (RuntimeError, ValueError) as error:
                raise_no_number(error, self._name)
                raise_as_equinox(error)
                raise
            return ready.returned(out)

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """The same for calls that are planned alike."""
        with together():
            taken, _, _ = flattened(self.known, args, kwargs)
            return kind_of(taken, _jax.trace_context(), args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `lower` of `jax.jit`'s functions; planned first, if need be."""
        return self._ahead("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `trace` of `jax.jit`'s functions; planned first, if need be."""
        return self._ahead("trace", args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `eval_shape` of `jax.jit`'s functions; nothing is planned."""
        with together():
            taken, _, flat = flattened(self.known, args, kwargs)
            if taken.definition is None:  # no objects, which would be changed
                shapes = jax.eval_shape(flat, *on_device(taken.arrays))
                return given_by(flat)(shapes)
        return jax.eval_shape(self.known.function, *args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets the programs; the next call makes them again."""
        with self._lock:
            self._ready.clear()
            self._inlined.clear()
            self._fast = None

    def _within(self, args: Any, kwargs: Any) -> Any:
        """The step as it is written, as a part of what is traced around it."""
        if self.known.pmapped:
            return self.known.function(*args, **kwargs)
        with together():
            taken, _, flat = flattened(self.known, args, kwargs)
            key = taken.key, types_of(taken.arrays), _jax.trace_context()
            if key not in self._inlined:
                self._inlined[key] = jax.jit(flat, inline=True), flat
            run, flat = self._inlined[key]
            give = given_by(flat)
            return give(run(*on_device(taken.arrays)))

    def _spread(self, args: Any, kwargs: Any) -> Any:
        """What a function of `jax.pmap` returns, which runs as it is written."""
        if not self._said:
            self._said = True
            self._say()(f"{self._name} runs as it is written. {NO_PROGRAM}")
        return self.known.function(*args, **kwargs)

    def _ahead(self, what: str, args: Any, kwargs: Any) -> Any:
        """What the program is traced or lowered to, called as the step is."""
        if self.known.pmapped:
            return getattr(self.known.function, what)(*args, **kwargs)
        with together():
            taken, ready = self._for(args, kwargs)
            with _telling():
                stage = getattr(ready.run, what)(*ready.specs(taken))
        if ready.direct and not kwargs:
            return stage

        def call(compiled: Any, given: Any, named: Any) -> Any:
            whole = with_static(self.known, (args, kwargs), given, named)
            with together():
                now = flattened(self.known, *whole)[0]
                if now.key != taken.key:
                    raise ArgumentError(
                        "arguments",
                        "others than the step was lowered for, besides arrays",
                        "Lower it for each of them.",
                    )
                return ready.returned(compiled(*ready.arrays(now)))

        return Ahead(stage, call)

    def _for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Taken, Ready]:
        """The arguments taken apart, and the program for them."""
        taken, own, flat = flattened(self.known, args, kwargs)
        taken = dataclasses.replace(taken, arrays=on_one_mesh(taken.arrays))
        context = _jax.trace_context()
        key = kind_of(taken, context, args, kwargs)
        with self._lock:
            if self._context is not None and self._context[1] is not context[1]:
                self.clear_cache()  # as `jax.clear_caches` has cleared all of JAX's
            if key not in self._ready:
                with explaining(taken):
                    self._ready[key] = self._made(taken, own is not None, flat)
                made = self._ready[key]
                direct = len(self._ready) == 1 and made.direct
                direct = direct and not is_filter_jit(self.known.function)
                fast = made.lent.direct(made.run) if made.lent else made.run
                self._fast = fast if direct else None
                self._context = context
            ready = self._ready[key]
        self.plan = ready.plan or self.plan
        return taken, ready

    def _made(self, taken: Taken, direct: bool, flat: Any) -> Ready:
        """The program for arguments of a new kind."""
        ready = functools.partial(under, taken, direct, flat, _when_told, self._lent)
        if (given := self._given) is not None:
            plan, text = given.plan, json.dumps(given.plan.to_json())
            agreed(self._name, lambda: (text, plan), lambda plan: plan)
            made = ready(plan, flat)  # or the plan is another step's
            if (said := given.said()) and not self._ready:
                self._say()(f"{self._name} runs {said}")
            return made
        if self._ready:
            self._say()(f"planning {self._name} anew, for arguments of other types")
        try:
            return self._planned(taken, direct, flat, ready)
        except NothingToPlanError as nothing:
            self._say()(f"{nothing} It runs as jax.jit would run it.")
            donated = tuple(sorted(taken.donated or ()))
            run = jax.jit(_when_told(flat), donate_argnums=donated)
            give = given_by(flat)
            return Ready(plan=None, run=run, give=give, placing=None, direct=direct)

    def _planned(
        self, taken: Taken, direct: bool, flat: Any, ready: Callable[..., Ready]
    ) -> Ready:
        """The program under the plan that is kept, or a new one."""
        tried: dict[int, Ready] = {}

        def ask() -> tuple[str, Asked]:
            asked = self._asked(taken, flat)
            return step_key(asked), asked

        def make(asked: Asked) -> Plan:
            key = plan_key(asked)
            kept = self._kept.read(key, asked.compiler_options)
            if kept is not None:
                # The step may differ in what its key does not say: that shows here.
                with (
                    contextlib.suppress(PlanMismatchError, MisfitError),
                    _telling(),
                ):
                    made = ready(kept, step_under(kept, asked))
                    made.run.trace(*made.specs(taken))
                    tried[id(kept)] = made
                    return kept
            plan = self._found(asked, taken_apart=not direct)
            if plan.fits:
                self._kept.write(key, plan)
            return plan

        asked, plan = agreed(self._name, ask, make)
        if taken.donated is None and plan.fits and plan.program.donate_argnums:
            given = ", ".join(f"args[{n}]" for n in plan.program.donate_argnums)
            self._say()(
                f"{self._name} does not fit unless {given} may be overwritten: what a "
                "call returns is gone after the next one. Keep copies (jnp.copy) of "
                "what is needed longer, or let it overwrite nothing: donate_argnums=()"
            )
        waits = [a for a in plan.program.arguments if a.memory_kind != "device"]
        if plan.fits and waits:
            names = {"parameter": "parameters"}
            roles = dict.fromkeys(names.get(a.role, a.role) for a in waits)
            self._say()(f"{self._name}: in host memory from now on: {', '.join(roles)}")
        return tried.get(id(plan)) or ready(plan, step_under(plan, asked))

    def _found(self, asked: Asked, *, taken_apart: bool) -> Plan:
        """A new plan.

        Where the user says nothing of donation, what the step is given stays theirs,
        unless nothing fits without: a key alone frees nothing.
        """
        # Late: a plan that is kept needs no search.
        from .._plan._planning import found_for

        frugal: Plan | None = None
        if asked.recording.donated is None:
            # Pins may ask for what only donated state allows.
            with contextlib.suppress(ArgumentError):
                little = asked.given_bytes < _LITTLE
                least = dataclasses.replace(asked, donate=False, first=not little)
                (frugal,) = found_for(least, taken_apart=taken_apart)
                if frugal.fits or little:
                    return frugal
                # A share is of the step as it is written, which donates nothing.
                asked = dataclasses.replace(asked, budgets=(frugal.budget_bytes,))
        (plan,) = found_for(asked, taken_apart=taken_apart)
        if frugal is not None and frugal.smallest_budget < plan.smallest_budget:
            search = dataclasses.replace(
                plan.search,
                smallest_budget=frugal.smallest_budget,
                smallest_budget_is=frugal.search.smallest_budget_is,
            )
            plan = dataclasses.replace(plan, search=search)
        return plan

    def _lent(self, plan: Plan) -> Lent:
        """For a plan that overwrites what nobody said it may."""
        say = lambda text: self._say()(f"{self._name}: {text}")
        return Lent(plan.program.donate_argnums, plan.device_bytes, self._results, say)

    def _asked(self, taken: Taken, flat: Any) -> Asked:
        wishes = {
            field.name: getattr(self._wishes, field.name)
            for field in dataclasses.fields(Wishes)
        }
        wishes.update(budgets=(wishes.pop("budget"),), cache=wishes["cache"] or None)
        return asked_for(flat, taken.arrays, taken.donated, donate=None, **wishes)

    @property
    def _name(self) -> str:
        return getattr(self.known.function, "__name__", "the step")

    def _say(self) -> Callable[[str], None]:
        """Where one line goes, at once."""
        return _asked.sayer(self._wishes.progress, time.perf_counter() - 1e9)


_told = contextvars.ContextVar("stowax_told", default=False)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """What JAX has to trace it may."""
    token = _told.set(True)
    try:
        yield
    finally:
        _told.reset(token)


def _when_told(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, which is traced only where that was foreseen."""

    @functools.wraps(fun)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _told.get():
            raise PlanMismatchError("step: arguments of another kind. Plan them first.")
        return fun(*args, **kwargs)

    return guarded
