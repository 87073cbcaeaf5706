"""Objects that a marked function changes: Flax NNX modules.

A marked function is traced like any pure function, one level below its caller. An NNX
module among its arguments belongs to the caller's level: what the function writes into
it (statistics of a `BatchNorm`, the counts of `nnx.Rngs`, any `nnx.Variable`) would be
refused by NNX or leak tracers. So the modules are taken apart before the trace, put
together inside of it, and what they have become comes out as ordinary results, which
are written into the caller's own objects after the call: what `nnx.jit` does, by NNX's
own public means. Modules that the function makes and returns come back as modules, too.

Nothing is imported here: a program that has not imported `flax.nnx` has no such
objects. Equinox needs none of this. Its modules are pytrees that nobody changes, and
`eqx.nn.State` is handed on as a value.

An NNX module that the function reads from its surroundings, instead of getting it as an
argument, must not change in the call; NNX says so (`TraceContextError`).
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.tree_util import keystr as _keystr
from jax.tree_util import tree_flatten_with_path as _flatten_with_path
from jax.tree_util import tree_leaves_with_path as _leaves_with_path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pure:
    """A call without objects: `function(given)` returns arrays and plain leaves only.

    `given` is a pytree that holds every array among the arguments. `paths` names its
    leaves, in their order, as the caller knows them: `args[0]['up']`, and in an object
    `args[0].up.kernel.value`. `finish` turns what `function` returned (or the same
    structure with other arrays) into the result of the call, writing the objects' new
    state on the way.
    """

    function: Callable[[Any], Any]
    given: Any
    paths: Callable[[], list[str]]
    finish: Callable[[Any], Any] = lambda out: out


@contextlib.contextmanager
def without_objects(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Pure]:
    """`function(*args, **kwargs)` as a function that changes no object outside of it.

    **Yields:** the pure call; both of its functions belong inside the block.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        yield Pure(
            function=lambda given: function(*given[0], **given[1]),
            given=(args, kwargs),
            paths=lambda: [_path(p) for p, _ in _leaves_with_path((args, kwargs))],
        )
        return
    tag = object()
    with nnx.update_context(tag):
        yield _pure(nnx, tag, function, args, kwargs)


def _pure(
    nnx: Any,
    tag: object,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Pure:
    # The variables in an nnx.State are values: what becomes of them is returned.
    whole = (nnx.Pytree, nnx.Variable, nnx.State)

    def is_whole(leaf: Any) -> bool:
        return isinstance(leaf, whole)

    def is_object(leaf: Any) -> bool:
        return is_whole(leaf) and not isinstance(leaf, nnx.State)

    called, structure = _flatten_with_path((args, kwargs), is_leaf=is_whole)
    leaves = [leaf for _, leaf in called]
    positions = [k for k, leaf in enumerate(leaves) if is_object(leaf)]
    with nnx.split_context(tag) as split:
        definition, state = split.split(tuple(leaves[k] for k in positions))
    plain = [None if is_object(leaf) else leaf for leaf in leaves]
    seen: dict[str, Any] = {}

    def pure(given: Any) -> Any:
        leaves, state = given
        with nnx.merge_context(tag, True) as merge:
            own = merge.merge(definition, state)
        leaves = list(leaves)
        for position, mine in zip(positions, own, strict=True):
            leaves[position] = mine
        args, kwargs = jax.tree.unflatten(structure, leaves)
        out = function(*args, **kwargs)
        results, seen["structure"] = jax.tree.flatten(out, is_leaf=is_whole)
        made = tuple(r for r in results if is_object(r))
        with nnx.split_context(tag) as split:
            seen["definition"], after = split.split((own, made))
        return [None if is_object(r) else (r,) for r in results], after

    def finish(out: Any) -> Any:
        results, after = out
        with nnx.merge_context(tag, False) as merge:
            _, made = merge.merge(seen["definition"], after)
        following = iter(made)
        leaves = [next(following) if r is None else r[0] for r in results]
        return jax.tree.unflatten(seen["structure"], leaves)

    def paths() -> list[str]:
        of = [_path(path) for path, _ in called]
        return [
            *(
                of[k.idx] + _keystr(tuple(below))
                for (k, *below), _ in _leaves_with_path(plain)
            ),
            *(
                of[positions[k.key]] + "".join(map(_attribute, below))
                for (k, *below), _ in _leaves_with_path(state)
            ),
        ]

    return Pure(function=pure, given=(plain, state), paths=paths, finish=finish)


def _path(path: tuple[Any, ...]) -> str:
    """The path of a leaf of `(args, kwargs)`, as text."""
    which, *below = path
    return ("kwargs" if which.idx else "args") + _keystr(tuple(below))


def _attribute(key: Any) -> str:
    """NNX knows a module's attributes by their names, as a dict knows its keys."""
    name = getattr(key, "key", None)
    named = isinstance(name, str) and name.isidentifier()
    return f".{name}" if named else _keystr((key,))
