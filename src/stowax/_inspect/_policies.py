"""Which names a checkpoint policy mentions.

JAX's own policies are closures and small records that hold the names which they were
made with: some versions one, some the other, and a combined policy holds its parts. A
function of the user's own says nothing, and is not guessed at.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple


class PolicyNames(NamedTuple):
    """Names that a policy mentions.

    `others` says that it may store values without a name as well; `opaque` that there
    is a part which cannot be read.
    """

    names: frozenset[str] = frozenset()
    others: bool = False
    opaque: bool = False


# The function or class that makes a policy -> what holds the names: variables of the
# closure, or attributes of the record (JAX 0.10 to 0.12).
_NAMED = {
    "save_only_these_names": ("names_which_can_be_saved", "names"),
    "save_and_offload_only_these_names": (
        "names_which_can_be_saved",
        "names_which_can_be_offloaded",
    ),
    "SaveOnlyTheseNames": ("saveable_names",),
}
# Made with names, too, but of what is not to be stored: a wrong one stores more.
_UNNAMED = frozenset(
    {
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "DotsSaveable",
        "offload_dot_with_no_batch_dims",
        "save_anything_except_these_names",
        "save_any_names_but_these",
        "SaveAnyNamesButThese",
    }
)
_COMBINED = "save_from_both_policies"


def names_of(policy: Any) -> PolicyNames:
    """The names in `policy`; `None` is the policy that stores nothing.

    >>> import jax
    >>> sorted(names_of(jax.checkpoint_policies.save_only_these_names("a", "b")).names)
    ['a', 'b']
    """
    if policy is None:
        return PolicyNames()
    function = getattr(policy, "__qualname__", None) or type(policy).__qualname__
    maker = function.partition(".")[0]
    module = getattr(policy, "__module__", "") or ""
    if not module.startswith("jax."):
        return PolicyNames(opaque=True)
    held = _held(policy)
    if maker in _NAMED:
        names = [held[key] for key in _NAMED[maker] if key in held]
        if not names:
            return PolicyNames(opaque=True)
        return PolicyNames(names=frozenset(str(n) for group in names for n in group))
    if maker == _COMBINED:
        parts = [names_of(part) for part in held.values() if callable(part)]
        return PolicyNames(
            names=frozenset().union(*(part.names for part in parts)),
            others=any(part.others for part in parts),
            opaque=any(part.opaque for part in parts) or not parts,
        )
    if maker in _UNNAMED:
        return PolicyNames(others=maker != "nothing_saveable")
    return PolicyNames(opaque=True)


def _held(policy: Any) -> dict[str, Any]:
    """What a closure or a record holds, by name."""
    held = dict(_closure(policy))
    held.update(getattr(policy, "__dict__", {}))
    return held


def _closure(policy: Any) -> Iterator[tuple[str, Any]]:
    cells = getattr(policy, "__closure__", None)
    code = getattr(policy, "__code__", None)
    if not cells or code is None:
        return
    for name, cell in zip(code.co_freevars, cells, strict=True):
        yield name, cell.cell_contents
