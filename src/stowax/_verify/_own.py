"""The arguments of a run: copies that belong to it, renewed from step to step.

A planned step donates what a training loop replaces, and the step as it is written may
change objects in place (a Flax NNX module, its optimizer). So a run has copies of its
own. After a step every array that came back takes the place of the one that went in
(`fed_back`), an object that was changed in place is handed over again as it is, and
what was donated and did not come back is copied from the caller's arguments again.

Two copies of one NNX variable in two places of a model (tied weights) would be two
variables: objects are taken apart and put together by NNX itself, which keeps that.
"""

import collections
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax

Path = tuple[Any, ...]
Leaves = Sequence[tuple[Path, Any]]


def _is_whole(leaf: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Pytree | nnx.Variable | nnx.State)


def is_object(leaf: Any) -> bool:
    """Whether it is an object of Flax NNX, which a step may change in place.

    The variables in an `nnx.State` are values.
    """
    return _is_whole(leaf) and not isinstance(leaf, sys.modules["flax.nnx"].State)


def objects_in(tree: Any) -> list[tuple[Path, Any]]:
    """The objects of a pytree that a step may change in place, with their paths."""
    found = jax.tree.leaves_with_path(tree, is_leaf=_is_whole)
    return [(path, leaf) for path, leaf in found if is_object(leaf)]


class OwnArguments:
    """Copies of a step's arguments.

    **Arguments:** `args` are the caller's; `make(i)` makes a copy of their array `i`,
    counted flat.
    """

    def __init__(self, args: tuple[Any, ...], make: Callable[[int], Any]):
        self.make = make
        whole, self.structure = jax.tree.flatten_with_path(args, is_leaf=_is_whole)
        self.paths = [path for path, _ in whole]
        self.objects: dict[int, Any] = {}
        self.returned: set[int] = set()
        self.leaves: list[list[Any]] = []
        self.structures = [jax.tree.structure(part) for _, part in whole]
        self.first: list[int] = []
        numbers: dict[int, int] = {}
        count = 0
        for k, (_, part) in enumerate(whole):
            leaves = jax.tree.leaves(part)
            own = range(count, count + len(leaves))
            self.first.append(count)
            count += len(leaves)
            if is_object(part):
                self.objects[k] = part
                numbers |= {id(x): i for i, x in zip(own, leaves, strict=True)}
            self.leaves.append([] if is_object(part) else [make(i) for i in own])
        self.names = {
            k: {_name(self.paths[k] + path) for path, _ in jax.tree.leaves_with_path(x)}
            for k, x in self.objects.items()
        }
        copies = _objects(list(self.objects.values()), numbers, make)
        self.objects = dict(zip(self.objects, copies, strict=True))

    def args(self) -> tuple[Any, ...]:
        """What the next step is called with."""
        parts = [
            self.objects[k]
            if k in self.objects
            else jax.tree.unflatten(structure, self.leaves[k])
            for k, structure in enumerate(self.structures)
        ]
        return jax.tree.unflatten(self.structure, parts)

    def held(self, out: Any) -> dict[str, Any]:
        """What the objects hold after a step that returned `out`, by the arrays' paths.

        An object that the step returns is not among them: the caller goes on with that.
        """
        returned = [type(x) for _, x in objects_in(out)]
        self.returned = set()
        found: dict[str, Any] = {}
        for k, mine in self.objects.items():
            if type(mine) in returned:
                returned.remove(type(mine))
                self.returned.add(k)
                continue
            leaves = jax.tree.leaves_with_path(mine)
            now = {_name(self.paths[k] + path): leaf for path, leaf in leaves}
            found |= {n: leaf for n, leaf in now.items() if n in self.names[k]}
        return found

    def take(self, out: Any, pairs: Mapping[int, int]) -> None:
        """Makes them those of the next step, after one that returned `out`.

        **Arguments:** `pairs` says which result takes the place of which array.
        """
        results = jax.tree.leaves(out)
        objects = [x for _, x in objects_in(out)]
        for k in sorted(self.returned):
            kind = type(self.objects[k])
            self.objects[k] = next(x for x in objects if type(x) is kind)
            objects = [x for x in objects if x is not self.objects[k]]
        for first, leaves in zip(self.first, self.leaves, strict=True):
            for number, leaf in enumerate(leaves):
                i = first + number
                if i in pairs:
                    leaves[number] = results[pairs[i]]
                elif isinstance(leaf, jax.Array) and leaf.is_deleted():
                    leaves[number] = self.make(i)


def _objects(
    objects: Sequence[Any], numbers: Mapping[int, int], make: Callable[[int], Any]
) -> list[Any]:
    """Copies of objects that share what those share."""
    if not objects:
        return []
    nnx = sys.modules["flax.nnx"]
    definition, state = nnx.split(tuple(objects))
    state = jax.tree.map(lambda leaf: make(numbers[id(leaf)]), state)
    return list(nnx.merge(definition, state))


def _name(path: Path) -> str:
    first, *rest = path
    return f"args[{first.idx}]{jax.tree_util.keystr(tuple(rest))}"


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
