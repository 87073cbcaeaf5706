"""Copies and checkpoint policies in a traced step.

After differentiation a policy that offloads has become `device_put` equations, so these
are all that has to be looked for; they stand inside of loops, and run as often.
`stowax._inspect._intent` is the caller.
"""

import collections
import dataclasses
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .. import _jax
from .._cost._cost import operation_seconds
from .._cost._trips import trip_count
from .._hardware._figures import Chip
from .._jaxprs._jaxpr import Program, is_checkpoint
from .._records._intent import CopyAsked, PolicyAsked
from .._step._lineage import returned_copies
from .._target._specs import HOST_KINDS
from ._policies import PolicyNames, names_of

_LIBRARIES = tuple({sysconfig.get_paths()[k] for k in ("purelib", "platlib")})
# What is made without reading memory is made where it is wanted; nothing is copied.
_MADE_IN_PLACE = frozenset({"broadcast_in_dim", "empty", "iota", "empty2"})


@dataclasses.dataclass(slots=True)
class Found:
    """What the walk over a jaxpr collects."""

    copies: list[CopyAsked]
    policies: collections.Counter[tuple[PolicyNames, str]]
    named: set[str]
    opaque: set[str]


def find_copies(jaxpr: Any, chip: Chip | None, devices: int) -> Found:
    """Everything in `jaxpr`, loops and calls included.

    **Arguments:** `chip` prices what it takes to make a value again; `devices` is how
    many share the arrays.
    """
    found = Found([], collections.Counter(), set(), set())
    returned = returned_copies(jaxpr)
    _walk(jaxpr, found, _Place(1, chip, devices, returned))
    if jax.__version_info__ < (0, 12) and getattr(jax.config, "jax_remat3", False):
        found.opaque.add("this JAX's newer remat leaves no policy in the trace")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where the walk is: how often it runs there, and whether in a loop."""

    trips: int | None
    chip: Chip | None
    devices: int
    returned: frozenset[int]
    in_loop: bool = False


def _walk(jaxpr: Any, found: Found, place: _Place) -> None:
    opened = _jax.open_jaxpr(jaxpr)
    makers = {v: e for e in opened.eqns for v in e.outvars}
    read = {v for e in opened.eqns for v in e.invars if not isinstance(v, _jax.Literal)}
    read.update(v for v in opened.outvars if not isinstance(v, _jax.Literal))
    again: Callable[[Any], float | None] = _Again(jaxpr, place)
    for equation in opened.eqns:
        name = equation.primitive.name
        if name == "name":
            found.named.add(equation.params["name"])
        elif name == "device_put":
            _copies(equation, makers, read, found, place, again)
        special = equation.params.get("_prim")
        if special is not None:  # JAX's newer remat, from 0.12 on
            parameters = getattr(special, "params", {})
            if isinstance(parameters.get("name"), str):
                found.named.add(parameters["name"])
            if "policy" in parameters:
                _policy(parameters["policy"], equation, found)
        # Where nothing is differentiated a policy has nothing to decide.
        if is_checkpoint(equation) and equation.params.get("differentiated", True):
            _policy(equation.params.get("policy"), equation, found)
        for inner, times in _inside(equation):
            trips = place.trips
            if trips is not None:
                trips = None if times is None else trips * times
            loop = place.in_loop or times != 1
            _walk(inner, found, dataclasses.replace(place, trips=trips, in_loop=loop))


def _inside(equation: Any) -> Iterator[tuple[Any, int | None]]:
    """The jaxprs of an equation, and how often each runs."""
    name, params = equation.primitive.name, equation.params
    times: int | None = 1
    if name == "scan":
        times = int(params["length"])
    elif name == "while":
        times = trip_count(equation)
    special = getattr(params.get("_prim"), "params", {})
    for inner in (*_jax.jaxprs_in(params), *_jax.jaxprs_in(special)):
        yield inner, times


def _policy(policy: Any, equation: Any, found: Found) -> None:
    names = names_of(policy)
    source = _checkpointed(equation)
    if names.opaque:
        found.opaque.add(f"the policy at {source} does not say what it names")
    if names.names:
        found.policies[names, source] += 1


def _checkpointed(equation: Any) -> str:
    """The line of the function that is checkpointed.

    What a derivative makes of the equation has lost its own line; the function's is
    kept beside its jaxpr (JAX 0.10 to 0.12), and its operations have theirs: where the
    function is one of a library's (`nn.remat`, JAX's newer remat), theirs say more.
    """
    special = getattr(equation.params.get("_prim"), "params", {})
    inner = equation.params.get("jaxpr", special.get("jaxpr"))
    inner = None if inner is None else _jax.open_jaxpr(inner)
    info = getattr(getattr(inner, "debug_info", None), "func_src_info", None) or ""
    _, found, line = info.rpartition(" at ")
    if found and not line.startswith(_LIBRARIES):
        return line
    lines = map(_jax.source_text, getattr(inner, "eqns", ()))
    return next((inside for inside in lines if inside), "") or _jax.source_text(
        equation
    )


def policies_of(found: Found) -> tuple[PolicyAsked, ...]:
    """The policies with names, each with the places that it stands in."""
    return tuple(
        PolicyAsked(
            names=tuple(sorted(names.names)),
            others=names.others or names.opaque,
            source=source,
            times=times,
        )
        for (names, source), times in found.policies.items()
    )


def _copies(
    equation: Any,
    makers: dict[Any, Any],
    read: set[Any],
    found: Found,
    place: _Place,
    again: Callable[[Any], float | None],
) -> None:
    """What one `device_put` sends to the host, if anything reads it there."""
    for source, result, where in zip(
        equation.invars, equation.outvars, equation.params["devices"], strict=True
    ):
        if isinstance(source, _jax.Literal) or result not in read:
            continue
        if not _to_host(result, where) or _jax.is_host_type(source.aval):
            continue
        maker = makers.get(source)
        if maker is not None and maker.primitive.name in _MADE_IN_PLACE:
            continue
        aval = result.aval
        stack = _jax.name_stack(equation)
        scopes = [part for part in stack.split("/") if part.startswith("stowax.")]
        made = maker.primitive.name if maker is not None else "an argument"
        if maker is not None and made == "name":
            made = str(maker.params["name"])
        found.copies.append(
            CopyAsked(
                bytes=-(-aval.size * aval.dtype.itemsize // place.devices),
                trips=place.trips,
                shape=tuple(aval.shape),
                item_bytes=aval.dtype.itemsize,
                name=scopes[-1] if scopes else made,
                source=_jax.source_text(equation)
                or (_jax.source_text(maker) if maker else ""),
                seconds_again=again(source),
                returned=id(equation) in place.returned,
            )
        )


def _to_host(result: Any, where: Any) -> bool:
    kind = getattr(where, "memory_kind", None)
    return _jax.is_host_type(result.aval) or kind in HOST_KINDS


class _Again:
    """What it takes to make a value of a loop's body again, from the body's inputs.

    Outside of loops nobody can say where one layer ends, so nothing is said there.
    """

    def __init__(self, jaxpr: Any, place: _Place):
        self.jaxpr, self.place = jaxpr, place
        self.program: Program | None = None
        self.seconds: list[tuple[float, bool]] = []

    def __call__(self, value: Any) -> float | None:
        if self.place.chip is None or not self.place.in_loop:
            return None
        if self.program is None:
            self.program = Program(self.jaxpr)
            self.seconds = operation_seconds(self.program, self.place.chip)
        number = self.program.numbers.get(value)
        at_hand = range(self.program.input_count + self.program.const_count)
        if number is None or number in at_hand:
            return None
        run = self.program.closure([number], at_hand)
        if not all(self.seconds[k][1] for k in run):
            return None  # something has no price
        equations = [self.program.nodes[k].equation for k in run]
        if any(_jax.has_effects(e) for e in equations):
            return None
        if any(_jax.is_host_type(v.aval) for e in equations for v in e.invars):
            return None  # made of what crosses the link itself
        return sum(self.seconds[k][0] for k in run)
