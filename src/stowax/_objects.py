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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pure:
    """A call without objects: `function(given)` returns arrays and plain leaves only.

    `given` is a pytree that holds every array among the arguments. `finish` turns what
    `function` returned (or the same structure with other arrays) into the result of the
    call, writing the objects' new state on the way.
    """

    function: Callable[[Any], Any]
    given: Any
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
            function=lambda given: function(*given[0], **given[1]), given=(args, kwargs)
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

    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_whole)
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

    return Pure(function=pure, given=(plain, state), finish=finish)
