"""What the loops of a traced step stack, and who reads the stacks.

A `scan` hands out one array per result and iteration, stacked. Three kinds of stacks
need not be there: what the loop reads itself and returns as it is; what is only summed
afterwards; what a loss over microbatches keeps of each for a backward pass that comes
after all of them. `stowax._inspect._intent` is the caller; whether the compiled
program holds such a stack `stowax._hazards._stacks` finds out.

What goes silently wrong with less care: JAX itself takes a result that is a loop's own
input out of the loop, but not one that comes out of a `jax.checkpoint` or `jax.jit`
there; and what nothing reads JAX leaves out, so only what is needed counts.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _jax
from .._jaxprs._reach import reach
from .._records._intent import StackAsked, StackKind

# What hands its operands on as they are.
_SAME = frozenset(
    {"copy", "copy_p", "name", "optimization_barrier", "sharding_constraint"}
)
# What may as well be done to each part of a sum, if the other operand is a number.
_LINEAR = _SAME | {"convert_element_type", "div", "mul", "neg"}
# What runs its one jaxpr once, on its own operands. `checkpoint`'s name is `remat2`.
_CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    }
)
# What the compiler makes the same of as of a stack.
_IN_PLACE = frozenset({"dynamic_update_slice", "scatter"})

_SUM, _OTHER = "sum", "other"
_Tags = frozenset[int]
_NONE: _Tags = frozenset()


def find_stacks(jaxpr: Any) -> tuple[StackAsked, ...]:
    """Every stack of a loop whose result the step needs, with its kind.

    **Arguments:** `jaxpr` is the step's.
    """
    walk = _Walk()
    needed = _jax.needed_part(jaxpr)
    for tags in walk.run(needed, [_NONE] * len(needed.invars)):
        walk.read(tags, _OTHER)
    asked = [_asked(stack, walk) for stack in walk.stacks]
    return (*asked, *(_written(equation) for equation in walk.written))


def passed_on(jaxpr: Any) -> list[int | None]:
    """Which input each output of a jaxpr is, unchanged; `None` where it is none."""
    opened = _jax.open_jaxpr(jaxpr)
    same = {variable: i for i, variable in enumerate(opened.invars)}
    for equation in opened.eqns:
        for result, operand in zip(equation.outvars, _handed_on(equation), strict=True):
            if operand is not None and not isinstance(operand, _jax.Literal):
                number = same.get(operand)
                if number is not None:
                    same[result] = number
    return [
        None if isinstance(v, _jax.Literal) else same.get(v) for v in opened.outvars
    ]


def _handed_on(equation: Any) -> Sequence[Any]:
    """For each result the operand that it is, or `None`."""
    operands = equation.invars
    if equation.primitive.name in _SAME and len(operands) == len(equation.outvars):
        return operands
    if equation.primitive.name == "scan":
        # What each iteration returns of its own part is, stacked, the whole of it.
        consts, carried = _jax.scan_counts(equation)
        found = passed_on(equation.params["jaxpr"])
        parts = [k is not None and k >= consts + carried for k in found[carried:]]
        return [
            *[None] * carried,
            *(
                operands[k] if part else None
                for k, part in zip(found[carried:], parts, strict=True)
            ),
        ]
    inner = _called(equation)
    if inner is None:
        return [None] * len(equation.outvars)
    return [None if k is None else operands[k] for k in passed_on(inner)]


def _called(equation: Any) -> Any | None:
    """The jaxpr that an equation runs once on its operands, if it is such a call."""
    if equation.primitive.name not in _CALLS and "_prim" not in equation.params:
        return None
    inside = list(_inside(equation))
    if len(inside) != 1:
        return None
    sizes = len(inside[0].invars), len(inside[0].outvars)
    called = sizes == (len(equation.invars), len(equation.outvars))
    return inside[0] if called else None


def _inside(equation: Any) -> Iterator[Any]:
    special = getattr(equation.params.get("_prim"), "params", {})  # JAX's newer remat
    yield from _jax.jaxprs_in(equation.params)
    yield from _jax.jaxprs_in(special)


@dataclasses.dataclass(slots=True)
class _Stack:
    """One result of a loop, `position` among its results; `reads` is who reads it."""

    loop: Any
    position: int
    from_carry: bool
    own: int | None
    reads: list[Any] = dataclasses.field(default_factory=list)

    @property
    def aval(self) -> Any:
        return self.loop.outvars[self.position].aval


class _Walk:
    """Follows stacks through calls; loops and branches are looked into on their own."""

    def __init__(self) -> None:
        self.stacks: list[_Stack] = []
        self.written: list[Any] = []

    def read(self, tags: _Tags, reader: Any) -> None:
        for number in tags:
            self.stacks[number].reads.append(reader)

    def run(self, jaxpr: Any, inputs: Sequence[_Tags]) -> list[_Tags]:
        opened = _jax.open_jaxpr(jaxpr)
        env: dict[Any, _Tags] = dict.fromkeys(opened.constvars, _NONE)
        env.update(zip(opened.invars, inputs, strict=True))

        def tags_of(atom: Any) -> _Tags:
            return _NONE if isinstance(atom, _jax.Literal) else env[atom]

        for equation in opened.eqns:
            out = self._equation(equation, [tags_of(v) for v in equation.invars])
            env.update(zip(equation.outvars, out, strict=True))
        return [tags_of(v) for v in opened.outvars]

    def _equation(self, equation: Any, values: list[_Tags]) -> list[_Tags]:
        if equation.primitive.name == "scan":
            return self._scan(equation, values)
        if (inner := _called(equation)) is not None:
            return self.run(inner, values)
        self._look_inside(equation)
        if equation.primitive.name in _IN_PLACE:
            self.written.append(equation)
        name, results = equation.primitive.name, len(equation.outvars)
        variable = [v for v in equation.invars if not isinstance(v, _jax.Literal)]
        if name in _LINEAR and len(variable) == results == 1:
            return [_NONE.union(*values)]
        summed = name == "reduce_sum" and 0 in equation.params["axes"]
        self.read(_NONE.union(*values), _SUM if summed else _OTHER)
        return [_NONE] * results

    def _scan(self, equation: Any, values: list[_Tags]) -> list[_Tags]:
        consts, carried = _jax.scan_counts(equation)
        for position, tags in enumerate(values):
            self.read(tags, equation if position >= consts + carried else _OTHER)
        self._look_inside(equation)
        body, results = equation.params["jaxpr"], equation.outvars
        if equation.params["length"] < 2:
            return [_NONE] * len(results)
        bits = [1 << i for i in range(len(values))]
        own, made_of = passed_on(body), reach(body, bits)
        # A loop's counter is made of itself alone.
        pairs = zip(bits[consts : consts + carried], made_of[:carried], strict=True)
        carry = sum(bit for bit, made in pairs if made != bit)
        out = [_NONE] * carried
        for position in range(carried, len(results)):
            changing = bool(made_of[position] & carry)
            out.append(frozenset({len(self.stacks)}))
            self.stacks.append(_Stack(equation, position, changing, own[position]))
        return out

    def _look_inside(self, equation: Any) -> None:
        for inner in _inside(equation):
            self.run(inner, [_NONE] * len(inner.invars))


def _written(equation: Any) -> StackAsked:
    return _record(equation.outvars[0].aval, 1, "", equation)


def _asked(stack: _Stack, walk: _Walk) -> StackAsked:
    trips = int(stack.loop.params["length"])
    return _record(stack.aval, trips, _kind(stack, walk), stack.loop)


def _record(aval: Any, trips: int, kind: StackKind, equation: Any) -> StackAsked:
    return StackAsked(
        bytes=_bytes(aval),
        trips=trips,
        what=f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]",
        kind=kind,
        source=_jax.source_text(equation),
    )


def _kind(stack: _Stack, walk: _Walk) -> StackKind:
    if _jax.is_host_type(stack.aval):
        return ""
    consts, carried = _jax.scan_counts(stack.loop)
    if stack.own is not None and stack.own < consts:
        return "shared"
    if stack.own is not None and stack.own >= consts + carried:
        return "own"
    if stack.reads and all(reader is _SUM for reader in stack.reads):
        return "summed"
    return "kept" if _kept(stack) and _is_sum(stack.loop, walk) else ""


def _kept(stack: _Stack) -> bool:
    """Whether only the loop of the backward pass reads it."""
    if stack.from_carry or not stack.reads:
        return False
    return all(
        reader not in (_SUM, _OTHER)
        and reader.params["reverse"] != stack.loop.params["reverse"]
        and reader.params["length"] == stack.loop.params["length"]
        for reader in stack.reads
    )


def _is_sum(loop: Any, walk: _Walk) -> bool:
    """Whether a loop's iterations are independent, and each makes numbers alone.

    That is a loss over microbatches. A loop over layers leaves activations behind, and
    one over time carries what the next iteration needs.
    """
    _, carried = _jax.scan_counts(loop)
    stacks = [stack for stack in walk.stacks if stack.loop is loop]
    if any(stack.from_carry for stack in stacks):
        return False
    numbers = [s.aval.size == loop.params["length"] for s in stacks if not _kept(s)]
    return all(numbers) and all(v.aval.size == 1 for v in loop.outvars[:carried])


def _bytes(aval: Any) -> int:
    return int(aval.size * getattr(aval.dtype, "itemsize", 0))
