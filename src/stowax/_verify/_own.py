"""The arguments of a run: copies that belong to it, renewed from step to step.

A planned step donates what a training loop replaces, so a run has copies of its own.
After a step every array that came back takes the place of the one that went in
(`fed_back`), and what was donated and did not come back is copied from the caller's
arguments again.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax

Path = tuple[Any, ...]
Leaves = Sequence[tuple[Path, Any]]


class OwnArguments:
    """Copies of a step's arguments.

    **Arguments:** `args` are the caller's; `make(i)` makes a copy of their array `i`,
    counted flat.
    """

    def __init__(self, args: tuple[Any, ...], make: Callable[[int], Any]):
        self.make, self.structure = make, jax.tree.structure(args)
        self.leaves = [make(i) for i in range(self.structure.num_leaves)]

    def args(self) -> tuple[Any, ...]:
        """What the next step is called with."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def take(self, out: Any, pairs: Mapping[int, int]) -> None:
        """Makes them those of the next step, after one that returned `out`.

        **Arguments:** `pairs` says which result takes the place of which array.
        """
        results = jax.tree.leaves(out)
        for i, leaf in enumerate(self.leaves):
            if i in pairs:
                self.leaves[i] = results[pairs[i]]
            elif isinstance(leaf, jax.Array) and leaf.is_deleted():
                self.leaves[i] = self.make(i)


def fed_back(
    arguments: Leaves, results: Leaves, updates: Mapping[int, int], batch: set[int]
) -> dict[int, int]:
    """Which result takes the place of which array of the arguments, both flat.

    `updates` says so of state that is updated. What lies beside it comes back beside it
    (a step's count, the hyperparameters of `optax.inject_hyperparams`): at the same
    place of the pytree, with the same shape and dtype. An argument of which nothing is
    updated comes back if all of it is returned where the argument stands.

    **Arguments:** both as paths with anything that has a type; `batch` are the arrays
    that are no state: of those only random keys and counters come back.
    """
    pairs = dict(updates)
    free = {path: k for k, (path, _) in enumerate(results)}
    for k in pairs.values():
        free.pop(results[k][0], None)

    def of(i: int, root: tuple[Path, Path]) -> int | None:
        path, spec = arguments[i]
        if path[: len(root[0])] != root[0]:
            return None
        k = free.get(root[1] + path[len(root[0]) :])
        return k if k is not None and _type(results[k][1]) == _type(spec) else None

    for position in dict.fromkeys(path[0] for path, _ in arguments):
        own = [i for i, (path, _) in enumerate(arguments) if path[0] == position]
        roots = collections.Counter(
            _roots(arguments[i][0], results[pairs[i]][0]) for i in own if i in pairs
        )
        whole = not roots
        ways = [root for root, _ in roots.most_common()]
        ways = ways or [((position,), (position,)), ((position,), ())]
        for root in ways:
            left = [i for i in own if i not in pairs]
            found = {i: k for i in left if (k := of(i, root)) is not None}
            input_only = any(i in batch and not _is_key(arguments[i][1]) for i in found)
            if whole and (len(found) < len(own) or input_only):
                continue
            for i, k in found.items():
                pairs[i] = k
                free.pop(results[k][0])
    return pairs


def _roots(path: Path, result: Path) -> tuple[Path, Path]:
    """Both without the end that they have in common; an argument's number stays."""
    same = 0
    most = min(len(path) - 1, len(result))
    while same < most and path[-1 - same] == result[-1 - same]:
        same += 1
    return path[: len(path) - same], result[: len(result) - same]


def _type(leaf: Any) -> tuple[tuple[int, ...], str]:
    aval = _jax.aval_of(leaf)
    return tuple(aval.shape), str(aval.dtype)


def _is_key(leaf: Any) -> bool:
    """Whether it is a random key or a counter."""
    aval = _jax.aval_of(leaf)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return True
    return aval.shape in ((), (2,)) and jax.numpy.issubdtype(
        aval.dtype, jax.numpy.integer
    )
