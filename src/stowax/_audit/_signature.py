"""What a jitted function is compiled for, and what changes from one to the next."""

from typing import Any, NamedTuple

import jax

from .._jax_hooks import Array
from .._watcher import Trip
from ._values import argument_name, arguments_of


class Signature(NamedTuple):
    """Types of the arguments by name, what is static, and which object was jitted."""

    types: dict[str, tuple[Any, ...]]
    static: dict[str, str]
    function: int


def signature_of(function: Any, arguments: Any, trip: Trip) -> Signature:
    """Of one call; `function` is the jitted one, or on the slow way what is in it."""
    inner = getattr(function, "_fun", function)
    args, kwargs = arguments
    if trip.leaves is not None:
        leaves = trip.leaves
    else:
        dynamic = arguments_of(function, args, kwargs)
        paths = jax.tree_util.tree_leaves_with_path(dynamic)
        leaves = [(argument_name(path, inner), leaf) for path, leaf in paths]
    types = {name: _type(leaf) for name, leaf in leaves}
    roots = {name.partition("[")[0].partition(".")[0] for name in types}
    code = getattr(inner, "__code__", None)
    names: Any = () if code is None else code.co_varnames[: code.co_argcount]
    static = {
        name: f"{value!r:.60}"
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]
        if name not in roots and jax.tree.leaves(value)
    }
    return Signature(types, static, id(inner))


def _type(leaf: Any) -> tuple[Any, ...]:
    if type(leaf) is Array:
        return (
            leaf.shape,
            str(leaf.dtype),
            leaf.weak_type,
            leaf.sharding,
            leaf.committed,
        )
    shape = getattr(leaf, "shape", ())
    if isinstance(leaf, jax.Array):  # random keys
        return shape, str(leaf.dtype), False, leaf.sharding, leaf.committed
    dtype = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", type(leaf)))
    return shape, str(dtype), not hasattr(leaf, "dtype"), None, None


def difference(before: Signature, after: Signature) -> str:
    """What changed from one compilation to the next, in words."""
    found = [
        f"static {name} went from {before.static[name]} to {value}"
        for name, value in after.static.items()
        if before.static.get(name, value) != value
    ]
    if before.types.keys() != after.types.keys():
        new = sorted(after.types.keys() ^ before.types.keys())
        found.append(f"the structure of its arguments changed ({', '.join(new[:3])})")
    for name, now in after.types.items():
        if (then := before.types.get(name, now)) != now:
            found += [text for text in _changed(name, then, now) if text]
    if not found and before.function != after.function:
        found.append("it is a new function each time, jitted where it is called")
    shown = ", ".join(found[:2]) + (f" and {len(found) - 2} more" * (len(found) > 2))
    return shown or "nothing in its arguments: JAX's settings, or its cache was cleared"


def _changed(name: str, then: tuple[Any, ...], now: tuple[Any, ...]) -> list[str]:
    if then[:2] != now[:2]:
        return [f"{name} went from {_short(then)} to {_short(now)}"]
    if then[2] != now[2]:
        return [f"{name} {'became' if now[2] else 'is no longer'} weakly typed"]
    if then[3] is not None and now[3] is not None and str(then[3]) != str(now[3]):
        return [f"{name} lies elsewhere: {then[3]}, then {now[3]}"[:160]]
    if then[4] is not None and now[4] is not None:
        how = "committed to its device" if now[4] else "no longer committed to a device"
        return [f"{name} became {how}"]
    return []


def _short(described: tuple[Any, ...]) -> str:
    return f"{described[1]}[{', '.join(map(str, described[0]))}]"
