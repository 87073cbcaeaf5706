"""What a jitted function's jaxpr says to an audit: activations, updates that copy.

Asked once per function: the jaxpr is there when a function is traced, and JAX hands out
the one that it has of a function that was traced before.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .. import _jax
from .._records._audit import CopiedUpdate, Facts
from .._where import NOWHERE, Place

_UPDATES = ("scatter", "dynamic_update_slice")
_CALLS = ("jit", "pjit")


def facts_of(jaxpr: Any, donated: Any, least_bytes: int) -> Facts:
    """What `jaxpr` says; `donated` has a flag for each of its arguments."""
    plain = _jax.open_jaxpr(jaxpr)
    names = _jax.argument_names(jaxpr)
    kept = {
        var: name
        for var, name, gone in zip(plain.invars, names, donated, strict=False)
        if not gone and _bytes(var) >= least_bytes
    }
    most, place = _kept(plain, {_shape(var) for var in plain.invars})
    return Facts(
        arguments=tuple(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names)),
        recomputed=_recomputed(plain),
        kept=place,
        kept_bytes=most,
        copied=tuple(
            dict.fromkeys([*_copied(plain, kept), *_needed(plain, kept, least_bytes)])
        ),
    )


def _bytes(var: Any) -> int:
    aval = var.aval
    return (
        aval.size * getattr(aval.dtype, "itemsize", 0) if hasattr(aval, "size") else 0
    )


def _place(equation: Any) -> Place:
    line = _jax.source_line(equation)
    return NOWHERE if line is None else Place(line[0], line[1], line[2], 0)


def _copied(plain: Any, kept: dict[Any, str]) -> list[CopiedUpdate]:
    found = []
    for equation in plain.eqns:
        name = equation.primitive.name
        if name in _CALLS:
            inner = _jax.open_jaxpr(equation.params["jaxpr"])
            passed = {
                inside: kept[outside]
                for outside, inside in zip(equation.invars, inner.invars, strict=False)
                if isinstance(outside, _jax.Var) and outside in kept
            }
            found += _copied(inner, passed)
        elif name.startswith(_UPDATES):
            target = equation.invars[0]
            if isinstance(target, _jax.Var) and target in kept:
                found.append(
                    CopiedUpdate(
                        place=_place(equation),
                        argument=kept[target],
                        bytes=_bytes(target),
                    )
                )
    return found


def _placed(equations: list[Any]) -> Place:
    """The line of the first that has one: what JAX derives by itself has none."""
    places = (_place(equation) for equation in equations)
    return next((place for place in places if place.line), NOWHERE)


def _needed(
    plain: Any, kept: dict[Any, str], least_bytes: int
) -> Iterator[CopiedUpdate]:
    """Updates of what is read once more, together with the result: two arrays.

    What is read by itself is read before the update, and nothing is copied: so do XLA's
    compilers for GPUs and TPUs (JAX 0.10.2); the one for CPUs copies for any read.
    """
    for position, equation in enumerate(plain.eqns):
        yield from (
            update
            for inner in _jax.jaxprs_in(equation.params)
            for update in _needed(inner, {}, least_bytes)
        )
        target = equation.invars[0] if equation.invars else None
        if (
            not equation.primitive.name.startswith(_UPDATES)
            or not isinstance(target, _jax.Var)
            or target in kept
            or _bytes(target) < least_bytes
        ):
            continue
        after = set(equation.outvars)
        needed = target in plain.outvars
        for later in plain.eqns[position + 1 :]:
            read = {var for var in later.invars if isinstance(var, _jax.Var)}
            if read & after:
                after.update(later.outvars)
                needed = needed or target in read
        if needed:
            yield CopiedUpdate(
                place=_place(equation), argument="", bytes=_bytes(target)
            )


def _kept(plain: Any, shapes: set[Any]) -> tuple[int, Place]:
    """Bytes that the forward pass makes and the backward pass reads, and their line.

    JAX says of each equation whether it is transposed. What has the shape of an
    argument (`shapes`) is a parameter in another type.
    """
    found: Counter = Counter()
    made: dict[Any, Any] = {}
    inner: list[tuple[int, Place]] = []
    for equation in plain.eqns:
        backward = "transpose(" in _jax.name_stack(equation)
        for var in {v for v in equation.invars if isinstance(v, _jax.Var)}:
            if backward and var in made:
                found[_place(made.pop(var))] += _bytes(var)
        if not backward:
            made.update(
                dict.fromkeys(
                    (v for v in equation.outvars if _shape(v) not in shapes),
                    equation,
                )
            )
        inner += [_kept(jaxpr, shapes) for jaxpr in _jax.jaxprs_in(equation.params)]
    known = [(size, place) for place, size in found.items() if place.line]
    own = sum(found.values()), max(known, default=(0, NOWHERE))[1]
    return max([own, *inner], key=lambda kept: kept[0])


def _shape(var: Any) -> Any:
    return getattr(var.aval, "shape", None)


def _recomputed(plain: Any) -> Place | None:
    """The line of `jax.checkpoint`, where it says to compute again in the backward."""
    for equation in plain.eqns:
        if equation.primitive.name in ("checkpoint", "remat2"):
            if equation.params.get("differentiated"):
                inner = _jax.open_jaxpr(equation.params["jaxpr"])
                return _placed([equation, *inner.eqns])
            continue
        for inner in _jax.jaxprs_in(equation.params):
            if (found := _recomputed(inner)) is not None:
                return found
    return None
