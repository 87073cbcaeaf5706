"""What each argument of a training step is for, found from the data flow alone.

The step is traced with every input of a marked function passed through an observer: an
identity that leaves a name in the jaxpr, and whose derivative rule leaves another name
when the input is differentiated. Which arguments reach which names says the rest:

- a *parameter* reaches a differentiated input, or is a weight of layers that are not
  differentiated by it (`_frozen`);
- the *batch* reaches other inputs of the marked function, and no parameter does;
- *optimizer state* reaches no marked input, but an output that parameters reach too;
- anything else is *other*.

An output takes the place of an array of the state only if it is made of that array, or
of other state, without a way through the marked function: of everything that comes
through it, gradients are made, too, and they are of their parameters' types. What a
step reads and returns nothing for is not its to give away.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from .. import _jax
from .._jaxprs._jaxpr import is_float
from .._jaxprs._reach import everything, reach
from .._layers._boundary import Emission
from .._records._stages import Role
from ._frozen import find_frozen

DIFFERENTIATED, _CONSTANT = "stowax.differentiated", "stowax.constant"
"""Names that `observe` leaves in a jaxpr."""


def observe(value: Any) -> Any:
    """`value`, with a name in the jaxpr that says whether it is differentiated."""
    if not is_float(_jax.aval_of(value)):
        return checkpoint_name(value, _CONSTANT)

    @jax.custom_jvp
    def observed(x: Any) -> Any:
        return checkpoint_name(x, _CONSTANT)

    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        zero = isinstance(t, jax.custom_derivatives.SymbolicZero)
        return checkpoint_name(x, _CONSTANT if zero else DIFFERENTIATED), t

    observed.defjvp(rule, symbolic_zeros=True)
    return observed(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the step's arguments and results stand in their trees, by flat position."""

    arguments: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[Any, ...], ...]

    def same(self, i: int, k: int) -> bool:
        """Whether a result stands where an argument does: `step(a, b) -> (a, b)`."""
        return self.arguments[i] == self.results[k]

    def inside(self, i: int, k: int) -> bool:
        """Whether it does in a tree of arguments that is a part of the results."""
        mine, there = self.arguments[i], self.results[k]
        return len(mine) > 1 and there[-len(mine) :] == mine

    def below(self, i: int, k: int) -> bool:
        """Whether it does below one of the arguments, and of the results or in all."""
        mine = self.arguments[i][1:]
        return bool(mine) and mine in (self.results[k], self.results[k][1:])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The role of every input of a step, and what becomes of its state.

    `differentiated` are the inputs that derivatives are taken by, or `None` if there
    is no derivative at all. `updates` has, for parameters and optimizer state, the
    output that takes an input's place (both flat positions).
    """

    roles: tuple[Role, ...]
    differentiated: frozenset[int] | None
    updates: Mapping[int, int]


def find_roles(jaxpr: Any, places: Places, boundary: Mapping[str, Emission]) -> Roles:
    """The roles of a step's inputs.

    The jaxpr is that of a step in which marked inputs went through `observe`, with the
    loops of `boundary` in it. What lies in one tree with a frozen weight is frozen,
    too.
    """
    positions = [path[0].idx for path in places.arguments]
    count = len(positions)
    reached = {DIFFERENTIATED: 0, _CONSTANT: 0}
    differentiated = False
    every = (1 << count) - 1

    def rule(equation: Any, values: list[int]) -> list[int]:
        """Behind a marked input, arguments do not reach anything `directly`."""
        nonlocal differentiated
        name = equation.params["name"] if equation.primitive.name == "name" else ""
        differentiated |= name == DIFFERENTIATED  # perhaps a constant, by no argument
        if name not in reached:
            return everything(equation, values)
        (arguments,) = values
        reached[name] |= arguments & every
        return [arguments & every]

    both = [1 << i | 1 << count + i for i in range(count)]
    # From the second trip of an epoch's loop on, parameters are made of everything.
    reach(jaxpr, both, rule, choices=True, first=True)
    marked = dict(reached)
    outputs = reach(jaxpr, both, rule, choices=True)
    parameters = marked[DIFFERENTIATED]
    trained = frozenset(i for i in range(count) if parameters >> i & 1)
    frozen = find_frozen(jaxpr, boundary, trained) if differentiated else frozenset()
    trees = {positions[i] for i in frozen - _counted(jaxpr, places, frozen)}
    updated = 0
    for arguments in outputs:
        if arguments & parameters:
            updated |= arguments
    roles: list[Role] = []
    for i, position in enumerate(positions):
        constant = marked[_CONSTANT] >> i & 1
        if i in trained or (constant and position in trees):
            roles.append("parameter")
        elif constant:
            roles.append("batch")
        elif updated >> i & 1:
            roles.append("optimizer state")
        else:
            roles.append("other")
    return Roles(
        roles=tuple(roles),
        differentiated=trained if differentiated else None,
        updates=_pair(jaxpr, roles, outputs, trained, places),
    )


def _counted(jaxpr: Any, places: Places, inputs: Collection[int]) -> frozenset[int]:
    """Those that count calls or draw numbers: no floats, and replaced by the step.

    Weights that are integers (quantized ones) come back as they are, or not at all.
    """
    opened = _jax.open_jaxpr(jaxpr)

    def replaced(i: int) -> bool:
        own = opened.invars[i]
        return any(
            (v.aval.shape, v.aval.dtype) == (own.aval.shape, own.aval.dtype)
            and v is not own
            and (places.same(i, k) or places.inside(i, k) or places.below(i, k))
            for k, v in enumerate(opened.outvars)
        )

    return frozenset(
        i for i in inputs if not is_float(opened.invars[i].aval) and replaced(i)
    )


def _pair(
    jaxpr: Any,
    roles: Sequence[Role],
    reached: Sequence[int],
    trained: Collection[int],
    places: Places,
) -> dict[int, int]:
    """State → the output of its type that takes its place.

    First what stands at the same place of the tree that is returned: a training loop
    hands it on as that. Of a parameter it has to be made directly: its gradient has
    such a place, too. Then what is returned as it came, and the first output that is
    made of it and not yet taken. At last parameters that are made anew of other state,
    a copy of higher precision.
    """
    opened = _jax.open_jaxpr(jaxpr)
    count = len(roles)
    state = [i for i in range(count) if roles[i] in ("parameter", "optimizer state")]
    direct = [arguments >> count for arguments in reached]
    of_state = sum(1 << i for i in state)
    free = dict.fromkeys(range(len(opened.outvars)))
    pairs: dict[int, int] = {}

    def take(i: int, fits: Callable[[int, int], Any]) -> None:
        aval = opened.invars[i].aval
        for k in free if i not in pairs else ():
            other = opened.outvars[k].aval
            if (aval.shape, aval.dtype) == (other.shape, other.dtype) and fits(i, k):
                pairs[i] = k
                del free[k]
                return

    came = _as_they_came(opened)

    def is_made_of(i: int, k: int) -> bool:
        return bool(direct[k] >> i & 1) or came.get(k) == i

    others_place = {k for k in free if any(places.same(i, k) for i in state)}

    def at_home(i: int, k: int) -> bool:
        around = places.inside(i, k) or places.below(i, k)
        return places.same(i, k) or (around and k not in others_place)

    # What has the place of an argument may be something else: a loss, a gradient. Of
    # an argument that is state, something is made of itself, or of other state.
    held = {
        places.arguments[i][0]
        for i in state
        for k in free
        if at_home(i, k) and (is_made_of(i, k) or came.get(k) in state)
    }

    def stays(i: int, k: int) -> bool:
        mine = places.arguments[i][0] in held
        return is_made_of(i, k) or (roles[i] == "optimizer state" and mine)

    def is_made_anew(i: int, k: int) -> Any:
        return reached[k] >> i & 1 and direct[k] & of_state

    ways: tuple[tuple[Collection[int], Callable[[int, int], Any]], ...] = (
        (state, lambda i, k: places.same(i, k) and stays(i, k)),
        (state, lambda i, k: places.inside(i, k) and stays(i, k)),
        (state, lambda i, k: places.below(i, k) and stays(i, k)),
        (state, lambda i, k: came.get(k) == i),
        (state, lambda i, k: direct[k] >> i & 1),
        (trained, lambda i, k: places.same(i, k) and is_made_anew(i, k)),
        (trained, is_made_anew),
    )
    for arguments, fits in ways:
        for i in arguments:
            take(i, fits)
    return dict(sorted(pairs.items()))


def _as_they_came(opened: Any) -> dict[int, int]:
    """The outputs that are inputs, perhaps under a name, and which."""
    known = {v: i for i, v in enumerate(opened.invars)}

    def which(atom: Any) -> int | None:
        return known.get(atom) if isinstance(atom, _jax.Var) else None

    for equation in opened.eqns:
        if equation.primitive.name == "name":
            (atom,) = equation.invars
            if (i := which(atom)) is not None:
                known[equation.outvars[0]] = i
    found = {k: which(v) for k, v in enumerate(opened.outvars)}
    return {k: i for k, i in found.items() if i is not None}
