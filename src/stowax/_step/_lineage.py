"""Which outputs of a step are new state: the old one, changed element by element.

New weights are the old ones plus something, in place: there is a path of elementwise
operations of one shape from the argument to the output. A gradient has the type of its
weights and depends on them, but by way of a product. That tells a step that returns its
state from a function that returns gradients, without any mark in the code.

What is followed: elementwise operations, updates of slices (state that is changed row
by row), copies between memories, and calls and loops by their insides (`_reach`). A
scan that changes its `xs` one after the other and stacks them again hands the whole
array on.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax

from .. import _jax
from .._jax import is_host_type
from .._jaxprs._elementwise import ELEMENTWISE
from .._jaxprs._reach import everything, reach, union
from ._roles import DIFFERENTIATED

_IN_PLACE = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})
_PASSED = ELEMENTWISE | {
    "device_put",
    "optimization_barrier",
    "reshard",
    "sharding_constraint",
    "layout_constraint",
}
# What makes a part of an array, or another view of it: still the same data.
_PARTS = frozenset(
    {
        "dynamic_slice",
        "gather",
        "name",
        "optimization_barrier",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    }
)


def returned_state(jaxpr: Any) -> Mapping[int, int]:
    """Argument → the output that takes its place (flat positions).

    Where several would do, the order of the arguments decides, as it does where state
    goes in and comes out as one tree. What is made of one argument alone is no update,
    but a function of it (a copy to another memory, say).
    """
    opened = _jax.open_jaxpr(jaxpr)
    made_of = reach(jaxpr, _bits(opened), _in_place)
    reached = reach(jaxpr, _bits(opened))
    free = list(range(len(opened.outvars)))
    pairs: dict[int, int] = {}
    for i, variable in enumerate(opened.invars):
        kind = _type(variable)
        for k in free:
            others = reached[k] & ~(1 << i)
            if _type(opened.outvars[k]) == kind and made_of[k] & 1 << i and others:
                pairs[i] = k
                free.remove(k)
                break
    return pairs


def dead_updates(jaxpr: Any, arguments: Collection[int]) -> bool:
    """Whether something takes the place of one of `arguments` and reaches no output.

    Weights may be moved to look at the gradient there (SAM). Of those that the loss is
    linear in the moved value is needed by nothing: then it has to be most of them. What
    no gradient went into is no update: of the gradient by a step's input (`argnums=1`)
    the loss itself is needed by nothing, and a residual stream is of its input's type.
    """
    opened = _jax.open_jaxpr(jaxpr)
    _, unneeded = parted(jaxpr)
    learned_from = _made_of_gradients(opened)
    dead = [variable for equation in unneeded for variable in equation.outvars]
    kinds = {_type(opened.invars[i]): 1 << i for i in arguments}
    wanted = [v for v in dead if _type(v) in kinds and v in learned_from]
    if not wanted:
        return False
    differentiated = [
        e.invars[0] for e in opened.eqns if e.params.get("name") == DIFFERENTIATED
    ]
    found = _jax.with_outputs(jaxpr, [*wanted, *differentiated])
    learned = 1 << len(opened.invars)  # of what is made of something differentiated

    def rule(equation: Any, values: list[int]) -> list[int]:
        more = learned * (equation.params.get("name") == DIFFERENTIATED)
        return [value | more for value in everything(equation, values)]

    made_of = reach(found, _bits(opened), _in_place)
    reached = reach(found, _bits(opened), rule)
    pairs = list(zip(made_of, reached, strict=True))
    lost = {
        i
        for made, others in pairs[: len(wanted)]
        for i in arguments
        if made & 1 << i and others & ~(learned | 1 << i)
    }
    trained = union([1 << i for i in arguments])
    looked_at = any(m & trained and r & learned for m, r in pairs[len(wanted) :])
    return 2 * len(lost) > len(arguments) if looked_at else bool(lost)


def _made_of_gradients(opened: Any) -> set[Any]:
    """The variables that a backward pass makes, and all that is made of them."""
    found: set[Any] = set()
    for equation in opened.eqns:
        read = (v for v in equation.invars if not isinstance(v, _jax.Literal))
        if is_backward(equation) or not found.isdisjoint(read):
            found.update(equation.outvars)
    return found


def is_backward(equation: Any) -> bool:
    """Whether an equation, or one inside of it, is one of a backward pass.

    JAX writes `transpose(` into the name stack of what a backward pass does. One inside
    is that of a loop over microbatches.
    """
    if "transpose(" in _jax.name_stack(equation):
        return True
    inner = _jax.jaxprs_in(equation.params)
    return any(is_backward(e) for jaxpr in inner for e in jaxpr.eqns)


def parted(jaxpr: Any) -> tuple[list[Any], list[Any]]:
    """The equations that an output needs or that have effects; and all others."""
    opened = _jax.open_jaxpr(jaxpr)
    read = {v for v in opened.outvars if not isinstance(v, _jax.Literal)}
    needed, others = [], []
    for equation in reversed(opened.eqns):
        if _jax.has_effects(equation) or not read.isdisjoint(equation.outvars):
            read.update(v for v in equation.invars if not isinstance(v, _jax.Literal))
            needed.append(equation)
        else:
            others.append(equation)
    return needed, others


def fetched_in_vain(jaxpr: Any) -> frozenset[int]:
    """Arguments that the step brings to device memory, where they are already.

    Somebody meant them to be in host memory, and what the step was traced with does not
    say so: `jax.eval_shape` and `ShapeDtypeStruct` drop memory kinds.
    """
    found = 0

    def part(equation: Any, values: list[int]) -> list[int]:
        nonlocal found
        if equation.primitive.name == "device_put":
            for value, atom, where in zip(
                values, equation.invars, equation.params["devices"], strict=True
            ):
                space = getattr(atom.aval, "memory_space", None)
                if where == space == jax.memory.Space.Device:
                    found |= value
            return values
        if equation.primitive.name not in _PARTS:
            return [0] * len(equation.outvars)
        return values[: len(equation.outvars)]

    opened = _jax.open_jaxpr(jaxpr)
    reach(jaxpr, _bits(opened), part)
    return frozenset(i for i in range(len(opened.invars)) if found & 1 << i)


def returned_copies(jaxpr: Any) -> frozenset[int]:
    """Which `device_put` equations, by `id`, send to host memory what is returned.

    That is state or gradients, and not something that comes back.
    """
    bits: dict[int, int] = {}

    def move(equation: Any, values: list[int]) -> list[int]:
        name = equation.primitive.name
        if name == "device_put":
            out = []
            for value, before, after in zip(
                values, equation.invars, equation.outvars, strict=True
            ):
                if is_host_type(after.aval) and not is_host_type(before.aval):
                    value = bits.setdefault(id(equation), 1 << len(bits))
                out.append(value if is_host_type(after.aval) else 0)
            return out
        if name in _IN_PLACE or name == "concatenate":
            return [union(values)]
        if name not in _PARTS:
            return [0] * len(equation.outvars)
        return values[: len(equation.outvars)]

    opened = _jax.open_jaxpr(jaxpr)
    returned = union(reach(jaxpr, [0] * len(opened.invars), move))
    return frozenset(number for number, bit in bits.items() if returned & bit)


def _bits(opened: Any) -> list[int]:
    return [1 << i for i in range(len(opened.invars))]


def _type(atom: Any) -> tuple[Any, ...]:
    return tuple(getattr(atom.aval, "shape", ())), str(getattr(atom.aval, "dtype", ""))


def _in_place(equation: Any, values: list[int]) -> list[int]:
    """What the results of one operation are made of, element by element."""
    name = equation.primitive.name
    if name in _IN_PLACE:
        return [values[0]]
    if name not in _PASSED:
        return [0] * len(equation.outvars)
    if len(equation.outvars) == len(values):  # one by one, such as a barrier
        return values
    shape = _type(equation.outvars[0])[0]
    kept = [
        value
        for value, atom in zip(values, equation.invars, strict=True)
        if _type(atom)[0] == shape
    ]
    return [union(kept)] * len(equation.outvars)
