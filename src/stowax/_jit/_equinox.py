"""Steps that `eqx.filter_jit` makes, with the user's arguments as arguments.

Equinox calls `jax.jit`'s function with the leaves of all arguments but the first in one
tuple. What is planned is given away by argument: the optimizer's state would stay on
the device because the batch does. So the function is jitted with each of the user's
arguments in a place of its own, as the tree that it is.

Served: Equinox 0.13.
"""

import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MODULE = "equinox._jit"
_THEIRS = "_EquinoxRuntimeError: "
_PARAMETERS = ["dynamic_donate", "dynamic_nodonate", "static"]

SAID = ("donate_argnums", "static_argnums")
"""What it says to `jax.jit` of arguments, which are in other places here."""

_Parts = Mapping[str, Sequence[Any]]


def is_equinoxs(caller: str, function: Any) -> bool:
    """Whether `eqx.filter_jit` jits `function`, and in the way that is known here."""
    parameters = caller == _MODULE and inspect.signature(function).parameters
    return bool(parameters) and list(parameters) == _PARAMETERS


def is_filter_jit(function: Any) -> bool:
    """Whether a function is one of `eqx.filter_jit`."""
    return type(function).__module__ == _MODULE


def raise_as_equinox(error: Exception) -> None:
    """Raises what `eqx.filter_jit` makes of an error of `eqx.error_if`.

    In a program it is a callback's, in hundreds of lines of XLA's; others are left.
    """
    equinox = sys.modules.get(_MODULE)
    told = getattr(equinox, "last_error_info", None)
    if equinox is None or told is None or _THEIRS not in str(error):
        return
    message, frames = told
    inside = itertools.takewhile(lambda frame: isinstance(frame, str), frames)
    stack = "".join(reversed([*inside]))
    text: str = getattr(equinox, "_on_error_msg", "{msg}")
    raise equinox.EquinoxRuntimeError(text.format(msg=message, stack=stack)) from None


class Regrouped:
    """What `eqx.filter_jit` calls in place of `jax.jit`'s function.

    `make(function, **options)` jits, once for each number of arguments. Calls have two
    dicts, of what is donated and what is not, with the leaves of the function itself
    (`fun`), of its `first` argument and of the `rest`, which are a tuple and a dict.
    `static` has the same three, each with its other leaves and its tree. `lower` is
    that of the function as it is written: Equinox calls what is compiled of it.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        function: Callable[..., Any],
        lower: Callable[..., Any],
    ):
        self._make, self._function, self.lower = make, function, lower
        self._steps: dict[tuple[frozenset[str], tuple[bool, ...]], Any] = {}

    def __call__(self, given: _Parts, kept: _Parts, static: Any) -> Any:
        """As the function that Equinox jits."""
        step, args = self._regrouped(given, kept, static)
        return step(*args, static=static)

    def _regrouped(
        self, given: _Parts, kept: _Parts, static: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        parts, donated = {**given, **kept}, frozenset(given)
        _, (_, of_first), (_, of_rest) = static
        structures = of_first, *_arguments(of_rest)
        cut = parts["first"], *_cut(of_rest, parts["rest"])
        pairs = list(zip(structures, cut, strict=True))
        whole = tuple(_is_whole(structure, leaves) for structure, leaves in pairs)
        args = tuple(
            structure.unflatten(leaves) if flag else tuple(leaves)
            for flag, (structure, leaves) in zip(whole, pairs, strict=True)
        )
        args = *args, tuple(parts["fun"])
        key = donated, whole
        if key not in self._steps:
            places = {"first": [0], "rest": range(1, len(args) - 1)}
            positions = [k for name in donated for k in places.get(name, ())]
            self._steps[key] = self._make(
                _with_arguments(self._function, donated, whole),
                donate_argnums=tuple(sorted(positions)) or None,
                static_argnames="static",
            )
        return self._steps[key], args


def _with_arguments(
    function: Callable[..., Any], donated: frozenset[str], whole: tuple[bool, ...]
) -> Callable[..., Any]:
    def taking_arguments(*args: Any, static: Any) -> Any:
        *mine, fun = args
        _, (_, of_first), (_, of_rest) = static
        first, *rest = (
            tuple(structure.flatten_up_to(tree)) if flag else tree
            for flag, structure, tree in zip(
                whole, (of_first, *_arguments(of_rest)), mine, strict=True
            )
        )
        together = tuple(leaf for leaves in rest for leaf in leaves)
        parts = {"fun": fun, "first": first, "rest": together}
        given = {name: parts.pop(name) for name in sorted(donated)}
        return function(given, parts, static)

    functools.update_wrapper(taking_arguments, function)
    del taking_arguments.__wrapped__  # it takes other arguments
    return taking_arguments


def _arguments(structure: Any) -> list[Any]:
    """The trees of positional arguments, and then that of those by name."""
    by_position, by_name = structure.children()
    return [*by_position.children(), by_name]


def _cut(structure: Any, leaves: Sequence[Any]) -> list[Sequence[Any]]:
    """The leaves of each of the arguments."""
    found, start = [], 0
    for argument in _arguments(structure):
        found.append(leaves[start : start + argument.num_leaves])
        start += argument.num_leaves
    return found


def _is_whole(structure: Any, leaves: Sequence[Any]) -> bool:
    """Whether these leaves, `None` for what is no array, make a tree that has them.

    A class may look at what it is made of, and leave out what is `None`.
    """
    try:
        found = structure.flatten_up_to(structure.unflatten(leaves))
    except Exception:
        return False
    return len(found) == len(leaves) and all(map(operator.is_, found, leaves))
