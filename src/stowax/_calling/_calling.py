"""A step as a function of arrays: what it is given is taken apart, and put together.

`jax.jit` takes pytrees of arrays. The steps that people have take more: objects that
they change in place, modules that carry functions and flags, arguments by name,
strings. `take` makes of the arguments of one call a `Taken`: trees of arrays, and a
key that is the same as long as everything else is. `Flat` is the step that such arrays
are given to, and `Flat.give` makes its results what the step's own
would have been.

The trees keep the paths that the user knows: `args[0]['w']` stays what it is, and the
arrays of an object that is argument 1 are below `args[1]`. What becomes of an object's
arrays is returned at the place of the argument: a plan pairs them so.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .._errors import ArgumentError, StowaxError
from .._jax import argument_path
from .._jax_jit import jit_info, spread_as_told
from ._known import Known, KnownStep, function_of, known
from ._leaves import Static, computed, flatten, in_modules, whole
from ._objects import is_object, merge, split, update
from ._told import placed_as_told, spread_as_objects_are


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The arguments of one call, taken apart.

    `arrays` are trees with `None` for what is no array, positional arguments first,
    then `by_keyword` dicts of those by keyword: first of those that are given away.
    `donated` are the positions of what is, `None` where nothing is said of that.
    `objects` says whether NNX's are changed in place (`_leaves.whole`). `key` says all
    but the arrays.
    """

    arrays: tuple[Any, ...]
    structure: Any
    flags: tuple[bool, ...]
    others: tuple[Any, ...]
    definition: Any
    by_keyword: int
    donated: frozenset[int] | None
    objects: bool

    @property
    def key(self) -> Hashable:
        """The same for calls that differ in their arrays only."""
        others = tuple((type(other), other) for other in self.others)
        return self.structure, self.flags, others, self.definition

    @property
    def plain(self) -> bool:
        """Whether the step takes its arguments as `jax.jit` does."""
        return all(self.flags) and not self.by_keyword

    def put_back(self, args: Any, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """`args` with other arrays, flat; objects are the caller's own."""
        mine = jax.tree.unflatten(jax.tree.structure(self.arrays), arrays)
        leaves, pieces = _leaves_of(self.structure, self.flags, self.others, mine)
        objects = [
            leaf for leaf in flatten(tuple(args), self.objects)[0] if is_object(leaf)
        ]
        update(objects, pieces)
        return tuple(jax.tree.unflatten(self.structure, _with_objects(leaves, objects)))

    def put_together(
        self, arrays: Sequence[Any], *, inside: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """`(objects, arguments)`, with these arrays in the place of those taken.

        Outside of the call the objects are the caller's own, updated.
        """
        own, args = self.together(arrays, inside=inside)
        return own, tuple(a.value if isinstance(a, Static) else a for a in args)

    def together(
        self, arrays: Sequence[Any], *, inside: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The same with what is static as it was marked."""
        leaves, pieces = _leaves_of(
            self.structure, self.flags, self.others, tuple(arrays)
        )
        own = merge(self.definition, pieces, inside=inside)
        return own, jax.tree.unflatten(self.structure, _with_objects(leaves, own))


def take(args: Sequence[Any], kwargs: Mapping[str, Any], known: Known) -> Taken:
    """Takes the arguments of a call apart; inside of `_objects.together`.

    **Raises:** `ArgumentError` for what is neither an array nor hashable.
    """
    args, kwargs = known.ordered(args, kwargs)
    args = placed_as_told(known.function, args, whole(known.objects))
    given = {k: v for k, v in kwargs.items() if k in known.given}
    kept = {k: v for k, v in kwargs.items() if k not in known.given}
    named = [part for part in (given, kept) if part]
    donated = known.donated
    if donated is not None and given:
        donated |= {len(args)}
    objects, taken = known.objects, (*args, *named)
    leaves, structure = flatten(taken, objects)
    flags = tuple(computed(taken, leaves, numbers=known.numbers, objects=objects))
    definition, pieces = split([leaf for leaf in leaves if is_object(leaf)])
    following = iter(pieces)
    arrays = [
        leaf if flag else next(following) if is_object(leaf) else None
        for leaf, flag in zip(leaves, flags, strict=True)
    ]
    others = _others(leaves, flags)
    _check_hashable(taken, others, flags, objects)
    arrays = spread_as_objects_are(known.function, arrays)
    return Taken(
        arrays=tuple(jax.tree.unflatten(structure, arrays)),
        structure=structure,
        flags=flags,
        others=others,
        definition=definition,
        by_keyword=len(named),
        donated=donated,
        objects=objects,
    )


def flattened(
    what: Known, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Taken, Callable[..., Any] | None, Callable[..., Any]]:
    """`(arguments taken apart, the user's function if it takes them, one that does)`.

    The last two are one where `jax.jit` would take the step as it is called.
    """
    taken = take(args, kwargs, what)
    if taken.plain and what.bare is not None:
        return taken, what.bare, what.bare
    return taken, None, Flat(spread_as_told(what.function), taken)


def as_jax_takes_it(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """`step` as a function of `jax.jit`, and the arrays it is given.

    Inside of `_objects.together`. What `jax.jit` made is that already, and so is a
    planned step; what a framework's `jit` made is not, with the objects it takes, nor
    is anything that is given arguments by name.

    **Raises:** `CallError` for a name that the step has not.
    """
    what = known(step)
    is_planned = isinstance(step, KnownStep) or not what.jitted
    is_jaxs = jit_info(step) is not None or (hasattr(step, "trace") and is_planned)
    if is_jaxs and not kwargs:
        return step, tuple(args)
    taken, _, flat = flattened(what, args, kwargs)
    return jax.jit(flat, donate_argnums=tuple(taken.donated or ())), taken.arrays


def _others(leaves: Sequence[Any], flags: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(
        _OBJECT if is_object(leaf) else leaf
        for leaf, flag in zip(leaves, flags, strict=True)
        if not flag
    )


def _check_hashable(
    tree: Any, others: Sequence[Any], flags: Sequence[bool], objects: bool
) -> None:
    for number, other in enumerate(others):
        try:
            hash(other)
        except TypeError:
            positions = [k for k, flag in enumerate(flags) if not flag]
            path, _ = jax.tree.leaves_with_path(tree, is_leaf=whole(objects))[
                positions[number]
            ]
            given = other.value if isinstance(other, Static) else other
            raise ArgumentError(
                argument_path(path),
                f"{type(given).__name__} {given!r:.60}, neither an array nor hashable",
                "Give arrays, or what can be compared from call to call.",
            ) from None


@contextlib.contextmanager
def explaining(taken: Taken) -> Iterator[None]:
    """Errors of the step's own name the argument that is no array, if there is one."""
    try:
        yield
    except StowaxError:
        raise
    except Exception as error:
        odd = _odd(taken)
        if odd is None or not _may_fail_with(odd[1], error):
            raise
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise ArgumentError(
            odd[0],
            f"{type(odd[1]).__name__} {odd[1]!r:.60}, which is no array, and the step "
            f"fails with it ({type(error).__name__}: {first})",
            "Give arrays or jax.ShapeDtypeStruct; close over anything else, for "
            "example functools.partial(step, config).",
        ) from error


def _may_fail_with(odd: Any, error: Exception) -> bool:
    """Whether an error may be for an argument that is no array.

    Functions among them (an optimizer's, say) are innocent unless it names their kind.
    """
    named = not callable(odd) or type(odd).__name__ in str(error)
    return isinstance(error, TypeError | AttributeError) and named


def _odd(taken: Taken) -> tuple[str, Any] | None:
    """The first argument that is neither an array nor at home in an object."""
    if taken.definition is not None or all(taken.flags):
        return None
    _, args = taken.together(taken.arrays, inside=True)
    inside = in_modules(args, taken.objects)
    following = iter(taken.others)
    paths = jax.tree.leaves_with_path(args, is_leaf=whole(taken.objects))
    for k, flag in enumerate(taken.flags):
        other = None if flag else next(following)
        if not flag and k not in inside and not isinstance(other, Static):
            return argument_path(paths[k][0]), other
    return None


_BY_POSITION = inspect.Signature(
    [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
)


class Flat:
    """A step that is given the arrays of `Taken` and returns arrays.

    It is for arguments that are like those of `taken`, up to their arrays.
    """

    def __init__(self, step: Callable[..., Any], taken: Taken):
        self.step, self.taken = step, taken
        own = function_of(step)
        self.__name__ = getattr(own, "__name__", type(own).__name__)
        self.__qualname__ = getattr(own, "__qualname__", self.__name__)
        self.__wrapped__ = step
        if taken.by_keyword:  # `jax.jit` asks how many arguments have a position
            self.__signature__ = _BY_POSITION
        self._results: dict[str, Any] = {}

    def __call__(self, *arrays: Any) -> Any:
        """What `jax.jit` traces: `(results,)` without objects among the arguments.

        With them, what becomes of each argument's objects stands at its place, and the
        results come after them.
        """
        own, args = self.taken.put_together(arrays, inside=True)
        by_position = len(args) - self.taken.by_keyword
        kwargs = {
            k: a.value if isinstance(a, Static) else a
            for named in args[by_position:]
            for k, a in named.items()
        }
        out = self.step(*args[:by_position], **kwargs)
        objects = self.taken.objects
        leaves, structure = flatten(out, objects)
        flags = computed(out, leaves, numbers=True, objects=objects)
        made = [leaf for leaf in leaves if is_object(leaf)]
        definition, pieces = split((*own, *made))
        kept, new = pieces[: len(own)], iter(pieces[len(own) :])
        results = jax.tree.unflatten(
            structure,
            [
                leaf if flag else next(new) if is_object(leaf) else None
                for leaf, flag in zip(leaves, flags, strict=True)
            ],
        )
        self._results = {
            "structure": structure,
            "flags": flags,
            "others": _others(leaves, flags),
            "definition": definition,
        }
        return (*self._at_arguments(kept), results) if own else results

    def _at_arguments(self, kept: Sequence[Any]) -> tuple[Any, ...]:
        """The pieces of the arguments' objects, as trees like the arguments."""
        taken, following, others = self.taken, iter(kept), iter(self.taken.others)
        leaves = [
            None if flag or next(others) is not _OBJECT else next(following)
            for flag in taken.flags
        ]
        return tuple(jax.tree.unflatten(taken.structure, leaves))

    def give(self, out: Any) -> Any:
        """What the step itself would have returned; its objects are updated.

        Inside of the same `_objects.together` as `take`.
        """
        seen, taken = self._results, self.taken
        kept: list[Any] = []
        if taken.definition is not None:
            *after, out = out
            _, kept = _leaves_of(
                taken.structure, taken.flags, taken.others, tuple(after)
            )
        leaves, made = _leaves_of(seen["structure"], seen["flags"], seen["others"], out)
        objects = merge(seen["definition"], (*kept, *made), inside=False)
        new = objects[len(kept) :]
        return jax.tree.unflatten(seen["structure"], _with_objects(leaves, new))


class _Object:
    """Stands where an object was."""

    def __repr__(self) -> str:
        return "object"


_OBJECT = _Object()


def _leaves_of(
    structure: Any, flags: Sequence[bool], others: Sequence[Any], tree: Any
) -> tuple[list[Any], list[Any]]:
    """Leaves with the rest put back, `_OBJECT` for objects, and the objects' pieces."""
    subtrees = structure.flatten_up_to(tree)
    rest, leaves, pieces = iter(others), [], []
    for flag, subtree in zip(flags, subtrees, strict=True):
        leaf = subtree if flag else next(rest)
        if leaf is _OBJECT:
            pieces.append(subtree)
        leaves.append(leaf)
    return leaves, pieces


def _with_objects(leaves: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
    following = iter(objects)
    return [next(following) if leaf is _OBJECT else leaf for leaf in leaves]
