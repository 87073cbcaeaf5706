"""Which arguments of a step a training loop gives away: their buffers are donated.

`jax.jit` donates an argument whole, so all of it has to come back. An array comes back
if an output takes its place (`_roles`), or if the step returns an array of its type at
the same place of its tree: a PRNG key, a counter, statistics of a `BatchNorm` in the
state. Other state beside such comes back if outputs of its type are left over. An
argument of which nothing is known but types is the caller's: a learning rate has the
type of the loss, weights to stay near have that of the gradients.
"""

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._records._stages import Role
from ._roles import Roles

_STATE: frozenset[Role] = frozenset({"parameter", "optimizer state"})
_GIVEN: frozenset[Role] = frozenset({"parameter", "batch"})
Kind = tuple[tuple[int, ...], str]

_DEPTHS = (0, 1, 2)
"""How deep a result may be: one tree, one of several, or one of a group (`nnx.jit`)."""


def find_donated(
    arguments: Sequence[Any],
    jaxpr: Any,
    paths: Sequence[Any],
    roles: Roles,
    told: Collection[int] | None = None,
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Arguments that hold state and are given away, by position.

    They are those that the step is `told` to donate, if anything is said of that; else
    those that come back whole.

    **Arguments:** `arguments` are the step's, flat (`_trace.Argument`), `paths` are
    those of its results, `roles` has the outputs that take an argument's place. What is
    differentiated and has none does not come back: of its gradient, which has its type,
    a caller still needs it.

    **Returns:** the positions, and for arguments with state that do not come back whole
    what of them is lost.
    """
    updates, trained = roles.updates, roles.differentiated or frozenset()
    free = _Free(jaxpr, paths, updates)
    donated: list[int] = []
    lost: dict[int, str] = {}
    for position in sorted({a.position for a in arguments}):
        own = [(i, a) for i, a in enumerate(arguments) if a.position == position]
        if _STATE.isdisjoint(a.role for _, a in own):
            continue
        if told is not None:
            donated += [position] if position in told else []
            continue
        others = [(i in trained, a) for i, a in own if i not in updates]
        beside = {_result(paths[updates[i]], a) for i, a in own if i in updates}
        known = len(others) < len(own)
        missing = free.take(others, beside) if known else own[0][1].path
        if missing is None:
            donated.append(position)
        else:
            lost[position] = missing
    return tuple(donated), lost


class _Free:
    """Outputs that take nobody's place yet."""

    def __init__(self, jaxpr: Any, paths: Sequence[Any], updates: Mapping[int, int]):
        taken = {*updates.values()}
        avals = [v.aval for v in _jax.open_jaxpr(jaxpr).outvars]
        # What is at a place of its result, and in which result that is. Deep in one
        # of several, what a place is called says little: its neighbours have to come
        # back beside it.
        self.places: dict[str, set[tuple[Kind, str, bool]]] = collections.defaultdict(
            set
        )
        for k, path in enumerate(paths):
            if k not in taken:
                for depth in _DEPTHS:
                    place = jax.tree_util.keystr(tuple(path[depth:]))
                    found = _kind(avals[k]), str(path[:depth]), depth < 2
                    self.places[place].add(found)
        self.types = collections.Counter(
            _kind(a) for k, a in enumerate(avals) if k not in taken
        )

    def take(
        self, wanted: Sequence[tuple[bool, Any]], beside: Collection[str]
    ) -> str | None:
        """Takes an output for each array; if one has none, its path, and takes none.

        **Arguments:** `wanted` has whether an array is differentiated, and the array,
        `beside` the results that hold what takes the place of others of its argument:
        weights that are only read are the caller's, unless they are in one of these.
        """
        types = collections.Counter[Kind]()
        for trained, argument in wanted:
            kind, path = _kind(argument.spec), argument.path
            place = _place(argument)
            there = bool(place) and any(
                found == kind and (result in beside or free)
                for found, result, free in self.places[place]
                if argument.role != "parameter" or result in beside
            )
            types[kind] += 1
            lost = trained or (argument.role in _GIVEN and not there)
            if lost or types[kind] > self.types[kind]:
                return path
        self.types -= types
        return None


def _place(argument: Any) -> str:
    """Where an array is in its argument."""
    return argument.path[argument.path.index("]") + 1 :]


def _result(path: Sequence[Any], argument: Any) -> str:
    """Which result an output is in that takes an argument's place."""
    mine = _place(argument)
    depths = (d for d in _DEPTHS if jax.tree_util.keystr(tuple(path[d:])) == mine)
    return str(path[: next(depths, 1)])


def _kind(value: Any) -> Kind:
    return tuple(value.shape), str(value.dtype)
