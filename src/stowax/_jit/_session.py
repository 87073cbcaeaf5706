"""`stowax.planning`: every `jax.jit` in a block, or a script, under a budget.

`jax.jit` is replaced for the time, wherever a module has it. What JAX's own modules jit
stays theirs. A function is looked at when JAX traces it: one that differentiates is
planned from then on; any other runs as it did, and what a plan has put into host memory
is brought to the device for it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax

from .. import _jax
from .._calling._known import NO_PROGRAM, Known, KnownStep, function_of, known
from .._errors import ArgumentError, MisfitError, StepError, StowaxError
from .._mark import current, noticing
from .._plan._plan import Plan
from .._units import format_bytes, parse_share
from . import _equinox
from ._planned import Planned
from ._wishes import Given, Wishes, given_plan, wished

_JAXS_OWN = ("jax.", "jaxlib.", "stowax.")
_ASKS_FOR_A_TYPE = "equinox._module."  # and never calls what `jax.pmap` returns

_LITTLE = 2**20
"""Bytes. A share of a step that is less is no reason to stop a script."""

# The step that may turn out to differentiate in the trace that is under way.
_deciding: contextvars.ContextVar["_Step | None"] = contextvars.ContextVar(
    "stowax_deciding", default=None
)


class _DifferentiatesError(BaseException):
    """Ends the trace of a function that is to be planned instead."""


class Session:
    """What `stowax.planning` yields: `plans` has the plan of every step, by its name.

    `notes` are what is said of functions that run as they are written, and `refused`
    tells whether one was not planned, and ended in an error that says why.
    """

    def __init__(self, wishes: Wishes, given: Given | None):
        self.wishes, self.given = wishes, given
        self.notes: list[str] = []
        self.refused = False
        self._steps: list[_Step] = []

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans, by the names of their steps; another of a name has a number.

        A step that is made again (in every fold, say) has the same plan again.
        """
        found: dict[str, Plan] = {}
        for step in self._steps:
            if step.planned is not None and (plan := step.planned.plan) is not None:
                names = (f"{step.__name__} {n}" for n in itertools.count(2))
                name = step.__name__
                while name in found and not _is_alike(plan, found[name]):
                    name = next(names)
                found[name] = plan
        return found

    def leave(self, note: str) -> None:
        """Takes note, once, of why something runs as it is written."""
        if note not in self.notes:
            self.notes.append(note)

    def explain(self, error: BaseException) -> None:
        """Adds to an error of JAX's, that an array is gone, which plan overwrote it."""
        if "has been deleted" not in str(error):
            return
        for step in self._steps:
            plan = step.planned.plan if step.planned is not None else None
            told = step.known.donated is not None
            if plan is not None and plan.program.donate_argnums and not told:
                error.add_note(
                    f"stowax: {step.__name__} does not fit unless what it returned is "
                    "overwritten by the next call. Keep copies (jnp.copy) of what is "
                    "needed longer, or write jax.jit(..., donate_argnums=()): then "
                    "nothing is overwritten, and the plan has to fit so."
                )

    def add(self, step: "_Step") -> None:
        """A step in place of a function that `jax.jit` made."""
        self._steps.append(step)


def _is_alike(plan: Plan, other: Plan) -> bool:
    same = plan.program == other.program
    return same and plan.decisions == other.decisions


class _Step(KnownStep):
    """A jitted function that is planned if it turns out to differentiate.

    It belongs to the block under way, or, after it, to the one that planned it.
    `options` are those of `jit`.
    """

    def __init__(self, jit: Callable[..., Any], fun: Any, **options: Any):
        original = jit(_watched(fun, self), **options)
        # First: `fun` may have attributes of the step that it wraps (`jax.grad` copies
        # them), and those are not this one's.
        functools.update_wrapper(self, original)
        self._original: Any = original
        donated = (options.get(f"donate_arg{what}") for what in ("nums", "names"))
        self._says_what_it_donates = any(given is not None for given in donated)
        self._session: Session | None = None
        self._left = set[Hashable]()  # kinds of calls that run as written
        self.planned: Planned | None = None

    @property
    def known(self) -> Known:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What is known of the function that `jax.jit` made.

        Of `donate_argnums=()` it knows nothing, and that is to donate nothing.
        """
        found = known(self._original)
        if found.donated is None and self._says_what_it_donates:
            return dataclasses.replace(found, donated=frozenset())
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function that `jax.jit` made."""
        if _jax.is_tracing():
            return self._original(*args, **kwargs)
        session, out = self._decided(lambda: self._original(*args, **kwargs))
        if session is None or self.planned is None:
            return out
        planned = self.planned
        return self._under_a_plan(
            session, planned, planned, self._original, args, kwargs
        )

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `lower` of the function that `jax.jit` made; planned, if it is to be."""
        return self._ahead("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `trace` of the function that `jax.jit` made; planned, if it is to be."""
        return self._ahead("trace", args, kwargs)

    def clear_cache(self) -> None:
        """As `clear_cache` of the function that `jax.jit` made: it is traced again."""
        self._original.clear_cache()
        if self.planned is not None:
            self.planned.clear_cache()
        self._left.clear()

    def _ahead(self, what: str, args: Any, kwargs: Any) -> Any:
        plainly = getattr(self._original, what)
        session, out = self._decided(lambda: plainly(*args, **kwargs))
        if session is None or self.planned is None:
            return out
        return self._under_a_plan(
            session, self.planned, getattr(self.planned, what), plainly, args, kwargs
        )

    def _decided(self, plainly: Callable[[], Any]) -> tuple[Session | None, Any]:
        """`(session, what it gives plainly)`; no session where it runs as written.

        With a session and `planned`, it is to run under that plan, and nothing ran.
        """
        session = _active or self._session
        if session is not None and session is not self._session:
            self._session, self.planned, self._left = session, None, set()
            session.add(self)
        if session is None or (self.planned is None and not _active):
            return None, plainly()
        if self.planned is None:
            token = _deciding.set(self)
            try:
                with noticing():
                    return session, plainly()
            except _DifferentiatesError:
                self.planned = Planned(self.known, session.wishes, session.given)
            finally:
                _deciding.reset(token)
        return session, None

    def _under_a_plan(
        self,
        session: Session,
        planned: Planned,
        call: Callable[..., Any],
        plainly: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """`call`, or `plainly` what is left as it is written: calls of one kind."""
        if self._left and planned.kind(args, kwargs) in self._left:
            return plainly(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except StepError as error:
            why = str(error)
        except StowaxError as error:
            if (why := _too_little(error, session.wishes)) is None:
                session.refused = True
                raise
        session.leave(f"{self.__name__} runs as it is written: {why}")
        self._left.add(planned.kind(args, kwargs))
        return plainly(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # of an object that is not made yet
            raise AttributeError(name)
        return getattr(self._original, name)


def _too_little(error: StowaxError, wishes: Wishes) -> str | None:
    """Why a step that keeps no share of what it takes may run all the same.

    A script has small steps beside the one that somebody wants in less memory.
    """
    share = parse_share(wishes.budget, "budget")
    if not isinstance(error, MisfitError) or share is None or error.plan is None:
        return None
    if (least := error.plan.budget_bytes) > _LITTLE:
        return None
    return (
        f"no plan keeps it within {100 * share:.4g}% of what it takes, "
        f"{format_bytes(least)}, but every device has that"
    )


def _watched(fun: Any, step: _Step) -> Callable[..., Any]:
    """`fun`, whose trace ends with an error if `step` has to know what it does.

    It ends after the user's code, which is not left half-run.
    """

    @functools.wraps(fun)
    def watched(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        seen = current()
        differentiates = seen is not None and (seen.found or seen.marked)
        if differentiates and _deciding.get() is step:
            raise _DifferentiatesError
        return out

    own = function_of(fun)
    watched.__name__ = getattr(own, "__name__", type(own).__name__)
    watched.__qualname__ = getattr(own, "__qualname__", watched.__name__)
    return watched


_active: Session | None = None


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
    global _active
    if _active is not None:
        raise ArgumentError(
            "planning", "a block within another one", "Leave out one of the two."
        )
    asked = wished(wishes)
    session = Session(asked, given_plan(plan, asked.compiler_options))
    real, spread = jax.jit, jax.pmap

    def jit(fun: Any = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(jit, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if f"{caller}.".startswith(_JAXS_OWN) or _active is None:
            return real(fun, **options)
        if _equinox.is_equinoxs(caller, fun):
            return _of_equinox(real, fun, options)
        return _Step(real, fun, **options)

    def pmap(fun: Any, *args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not f"{caller}.".startswith((*_JAXS_OWN, _ASKS_FOR_A_TYPE)):
            name = getattr(function_of(fun), "__name__", type(fun).__name__)
            session.leave(f"{name} runs as it is written. {NO_PROGRAM}")
        return spread(fun, *args, **options)

    functools.update_wrapper(jit, real)
    functools.update_wrapper(pmap, spread)
    _forget()
    _replace(real, jit)
    _replace(spread, pmap)
    _active = session
    try:
        yield session
    except Exception as error:
        session.explain(error)
        raise
    finally:
        _active = None
        _replace(jit, real)
        _replace(pmap, spread)
        _forget()


def _of_equinox(
    real: Callable[..., Any], fun: Callable[..., Any], options: Mapping[str, Any]
) -> _equinox.Regrouped:
    """What `eqx.filter_jit` has in place of a function that `real` jits."""
    others = {k: v for k, v in options.items() if k not in _equinox.SAID}

    def make(regrouped: Any, **more: Any) -> _Step:
        return _Step(real, regrouped, **others, **more)

    def lower(*args: Any) -> Any:
        if _active is not None:
            _active.notes.append(f"{fun.__name__} is lowered as it is written")
        return real(fun, **options).lower(*args)

    return _equinox.Regrouped(make, fun, lower)


def _replace(old: Any, new: Any) -> None:
    """Puts `new` wherever a module has `old`: `from jax import jit` is common."""
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(_JAXS_OWN) and name != "jax":
            continue
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for key in [key for key, value in names.items() if value is old]:
                names[key] = new


def _forget() -> None:
    """Equinox keeps what it has jitted; from here on it is another."""
    if (equinox := sys.modules.get("equinox")) is not None:
        equinox.clear_caches()
