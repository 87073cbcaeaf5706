"""What a jitted function says of itself: static arguments, what it donates.

`jax.jit`, `nnx.jit` and `eqx.filter_jit` return objects that are called like functions.
A plan runs them as they are, inside of its own program; there they neither donate nor
know what is static, so both is read off them first.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax

from .. import _jax_jit
from .._errors import ArgumentError, CallError
from ._leaves import Static

NO_PROGRAM = (
    "It is a function of jax.pmap, which spreads its arguments over devices itself, "
    "and a plan is for a function of jax.jit. Write it with jax.jit over a mesh: "
    "jax.make_mesh, and jax.shard_map where axes have names (jax.lax.pmean)."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """How a step takes its arguments.

    `static` are positions and `named` names of arguments that are no arrays, `donated`
    the positions of those that a call gives away, `given` their names; `None` where
    nothing is said of that. Negative static ones count from the end of what a call is
    given. `numbers` tells whether Python's numbers are computed with. One that is
    `pmapped` spreads its arguments over devices itself, and is no part of a program.
    `objects` tells whether NNX's are changed in place; to `jax.jit` they are values.
    """

    function: Callable[..., Any]
    jitted: bool = False
    static: frozenset[int] = frozenset()
    named: frozenset[str] = frozenset()
    donated: frozenset[int] | None = None
    given: frozenset[str] = frozenset()
    numbers: bool = True
    pmapped: bool = False
    objects: bool = True

    @property
    def bare(self) -> Callable[..., Any] | None:
        """What can be traced in place of the step and takes the same arrays."""
        if not self.jitted:
            return self.function
        info = _jax_jit.jit_info(self.function)
        if info is None or _jax_jit.has_shardings(info):
            return None
        return self.function.__wrapped__

    def told(
        self,
        static_argnums: Any = None,
        static_argnames: Any = None,
        donate_argnums: Any = None,
        donate_argnames: Any = None,
    ) -> "Known":
        """The same with what `jax.jit` would be told of the step.

        **Raises:** what `jax.jit` raises for positions and names that are none.
        """
        info = _jax_jit.jit_info(
            jax.jit(
                self.function,
                static_argnums=static_argnums,
                static_argnames=static_argnames,
                donate_argnums=donate_argnums,
                donate_argnames=donate_argnames,
            )
        )
        silent = donate_argnums is None and donate_argnames is None
        return dataclasses.replace(
            self,
            static=self.static | {*info.static_argnums},
            named=self.named | {*info.static_argnames},
            donated=self.donated if silent else _donated(info),
            given=self.given if silent else frozenset(info.donate_argnames),
        )

    def ordered(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments by position, but for those that only have a name.

        **Raises:** `ArgumentError` for arguments that the step does not take.
        """
        if kwargs:
            args, kwargs = self._bound(args, kwargs)
        count = len(args)
        static = {n + count if n < 0 else n for n in self.static}
        ordered = tuple(Static(a) if k in static else a for k, a in enumerate(args))
        return ordered, {
            k: Static(a) if k in self.named else a for k, a in kwargs.items()
        }

    def _bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return args, kwargs
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            others = [name for name in kwargs if name not in signature.parameters]
            raise CallError(
                next(iter(others or kwargs)),
                f"an argument that neither stowax nor the step takes so ({error})",
                "Write the step's arguments as the step is called.",
            ) from None
        return bound.args, bound.kwargs


class KnownStep:
    """A step that is called like a function and says of itself how (`stowax.jit`'s).

    A class, not an attribute: `functools.wraps` copies attributes onto functions that
    do something else.
    """

    known: Known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the step returns."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        """Itself, as functions are."""
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        """Itself, as functions are."""
        return self

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A step that is a method is bound to its object, as any function is."""
        return self if instance is None else functools.partial(self, instance)


def function_of(step: Any) -> Any:
    """What a partial function is of, unless it has a name of its own."""
    while isinstance(step, functools.partial) and not hasattr(step, "__name__"):
        step = step.func
    return step


def known(step: Callable[..., Any], options: Mapping[str, Any] | None = None) -> Known:
    """What is known of how `step` is called.

    **Arguments:** `options` are further ones that `jax.jit` is to be given.

    **Raises:** `ArgumentError` for what cannot be called.
    """
    if not callable(step):
        raise ArgumentError(
            "step",
            f"{step!r}, which cannot be called",
            "Pass the training step itself.",
        )
    if isinstance(step, KnownStep):
        return step.known
    values = _jax_jit.jit_info(step) is not None
    if options:
        step = jax.jit(step.__wrapped__ if values else step, **options)
    if (info := _jax_jit.jit_info(step)) is not None:
        return dataclasses.replace(_of_jit(step, info), objects=not values)
    if _jax_jit.is_pmapped(step):
        return Known(function=step, jitted=True, pmapped=True)
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    inner = _jax_jit.jit_info(getattr(step, "jitted_fn", None))
    flax = type(step).__module__.startswith("flax.")
    if nnx is not None and flax and inner is not None:
        found = _of_jit(step, inner)
        static = getattr(step, "static_argnums", None) or ()
        static = (static,) if isinstance(static, int) else static
        return dataclasses.replace(found, static=frozenset(static))
    if equinox is not None and type(step).__module__.startswith("equinox"):
        donated = _of_filter_jit(step)
        return Known(function=step, jitted=True, donated=donated, numbers=False)
    return Known(function=step)


def _of_filter_jit(step: Any) -> frozenset[int] | None:
    """Positions that `eqx.filter_jit` donates; its default, none, says nothing."""
    try:
        count = len(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return None
    first, rest = (getattr(step, f"donate_{n}", False) for n in ("first", "rest"))
    found = {k for k in range(count) if (first if k == 0 else rest)}
    return frozenset(found) or None


def _of_jit(step: Any, info: Any) -> Known:
    donated = _donated(info)
    return Known(
        function=step,
        jitted=True,
        static=frozenset(info.static_argnums),
        named=frozenset(info.static_argnames),
        donated=donated if donated or info.donate_argnames else None,
        given=frozenset(info.donate_argnames),
    )


def _donated(info: Any) -> frozenset[int]:
    """Positions that `jax.jit` donates.

    An argument that only has a name has no position; of negative ones among `*args` it
    keeps none that it would donate.
    """
    return frozenset(n for n in info.donate_argnums if n >= 0)
