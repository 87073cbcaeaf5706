"""What a program is, apart from how it was traced: the text that a plan knows it by.

A plan is made in one process and applied in another, where the same step is traced
again. A printed jaxpr is no good to compare: whether a number stands in it as a literal
or comes in as an operand depends on what JAX has traced before, parameters name meshes
and devices, functions have addresses. `outline` leaves out all of that. What stays is
what decisions depend on: the operations in their order, what each reads, the types of
what it makes.

The values of numbers and of constant arrays have no part in it either: a step with
another learning rate is the same step to a plan.
"""

import dataclasses
import enum
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax

# Names, places and rules, which say nothing of what is computed; how `scan` counts its
# inputs, of which literals are left out.
_LEFT_OUT = frozenset(
    {
        *("bwd", "compiler_options_kvs", "ctx_mesh", "debug", "debug_info"),
        *("donated_invars", "ft_in", "ft_out", "fwd", "fwd_jaxpr_thunk", "in_layouts"),
        *("in_shardings", "inline", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "keep_unused"),
        *("linear", "name", "name_and_src_info", "num_consts", "num_carry"),
        *("out_layouts", "out_shardings", "out_trees", "source_info", "bwd_ft"),
        *("sharding", "out_sharding", "num_consts_out", "call_name", "fun"),
    }
)
# Where arrays are to lie: nothing to a decision that is there, all to one to be made.
_PLACES = frozenset(
    {
        *("in_shardings", "out_shardings", "sharding", "out_sharding"),
        *("in_layouts", "out_layouts", "ctx_mesh", "context_mesh"),
    }
)
# Of which devices they are made says nothing: an abstract mesh knows what kind, too.
_PLACED = jax.sharding.Sharding | jax.sharding.Mesh | jax.sharding.AbstractMesh
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]+")
_LITERAL = "number"


def outline(jaxpr: Any) -> list[str]:
    """The program, a line an equation: what it is, what it reads, what it makes."""
    lines: list[str] = []
    _write(jaxpr, {}, lines)
    return lines


def digest(jaxpr: Any) -> str:
    """A digest of `outline`."""
    text = "\n".join(outline(jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def outline_with_places(jaxpr: Any) -> list[str]:
    """`outline`, then where the program's equations want their results."""
    lines = outline(jaxpr)
    for at, equation in enumerate(all_equations(jaxpr)):
        for name in sorted(_PLACES & equation.params.keys()):
            if (place := place_of(equation.params[name])) != "()":
                lines.append(f"{at} {name} {place}")
    return lines


def place_of(thing: Any) -> str:
    """A sharding, or a tree of them, as text that is the same in every process."""
    if isinstance(thing, tuple | list):
        parts = [place_of(part) for part in thing]
        return f"({','.join(parts)})" if any(p != "()" for p in parts) else "()"
    if isinstance(thing, jax.sharding.NamedSharding):
        return f"{thing.spec} of {place_of(thing.mesh)} in {thing.memory_kind}"
    if isinstance(thing, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return f"{dict(thing.shape)} {thing.axis_types}"
    if isinstance(thing, jax.sharding.Sharding):
        devices, kind = len(thing.device_set), thing.memory_kind
        return f"{type(thing).__name__} of {devices} in {kind}"
    if thing is None or type(thing).__name__ == "UnspecifiedValue":
        return "()"
    return without_addresses(thing)


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of `jaxpr`, each followed by those inside of it."""
    for equation in _jax.open_jaxpr(jaxpr).eqns:
        yield equation
        for inner, _ in _jaxprs_in(equation):
            yield from all_equations(inner)


def says_nothing(equation: Any) -> bool:
    """Whether an equation changes no element, but only what JAX knows of an array.

    Derivative rules put a scalar onto the mesh, where there is one; others reshard over
    axes that the compiler partitions, or constrain what is on one device. Weak types
    are made strong: those of a state are in its first step, and are not in the second.
    Left in, the same step would be another program.
    """
    name, params = equation.primitive.name, equation.params
    if name == "reshard":
        given = equation.invars[0].aval
        meshes = given.sharding.mesh, params["dst_sharding"].mesh
        return given.ndim == 0 or not any(mesh.explicit_axes for mesh in meshes)
    if name == "convert_element_type" and params.get("sharding") is None:
        return equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype
    return name == "sharding_constraint" and params["sharding"].num_devices == 1


def _write(jaxpr: Any, given: Mapping[int, str], lines: list[str]) -> None:
    """Writes `jaxpr`; `given` has the inputs that are known to be literals."""
    opened = _jax.open_jaxpr(jaxpr)
    names: dict[Any, str] = {}
    numbers = itertools.count()

    def name_all(variables: Sequence[Any]) -> str:
        for v in variables:
            names[v] = str(next(numbers))
        return " ".join(_type(v.aval) for v in variables)

    def read(atom: Any) -> str:
        return _LITERAL if isinstance(atom, _jax.Literal) else names[atom]

    inputs = [v for k, v in enumerate(opened.invars) if k not in given]
    names.update({opened.invars[k]: word for k, word in given.items()})
    consts = dict(zip(opened.constvars, _jax.consts_of(jaxpr), strict=False))
    names.update({v: _LITERAL for v in consts if v.aval.shape == ()})
    inputs += [v for v in opened.constvars if v not in names]
    lines.append(f"({name_all(inputs)})")
    for equation in opened.eqns:
        operands = [read(v) for v in equation.invars]
        if says_nothing(equation):
            names[equation.outvars[0]] = operands[0]
            continue
        literals = {k: w for k, w in enumerate(operands) if w == _LITERAL}
        shown = operands
        if _jaxprs_in(equation):
            shown = [w for w in operands if w != _LITERAL]
        primitive, params = equation.primitive.name, _parameters(equation)
        made = name_all(equation.outvars)
        lines.append(f"{primitive} [{params}] {' '.join(shown)} -> {made}")
        for inner, first in _jaxprs_in(equation):
            own = {k - first: w for k, w in literals.items()}
            count = len(_jax.open_jaxpr(inner).invars)
            _write(inner, {k: w for k, w in own.items() if 0 <= k < count}, lines)
    lines.append(f"= {' '.join(read(v) for v in opened.outvars)}")


def _jaxprs_in(equation: Any) -> list[tuple[Any, int]]:
    """The jaxprs of an equation, and which of its operands is the first of each."""
    found = []
    for key in sorted(equation.params):
        parts = equation.params[key]
        parts = parts if isinstance(parts, tuple | list) else (parts,)
        for part in parts:
            opened = _jax.open_jaxpr(part)
            if hasattr(opened, "eqns") and hasattr(opened, "invars"):
                inputs, operands = len(opened.invars), len(equation.invars)
                found.append((part, max(0, operands - inputs)))
    return found


def _parameters(equation: Any) -> str:
    items = sorted(equation.params.items())
    shown = [f"{k}={_word(v)}" for k, v in items if k not in _LEFT_OUT]
    return " ".join(shown)


def _type(aval: Any) -> str:
    shape = getattr(aval, "shape", None)
    if shape is None:
        return type(aval).__name__
    return f"{aval.dtype}[{','.join(map(str, shape))}]"


def without_addresses(thing: Any) -> str:
    """What `str` makes of a thing, but for where it lies in memory."""
    return _ADDRESS.sub("", str(thing))


def _word(thing: Any) -> str:
    """A parameter as text that is the same in every process."""
    if isinstance(thing, tuple | list):
        return f"({','.join(_word(x) for x in thing)})"
    if isinstance(thing, Mapping):
        items = sorted((str(k), _word(v)) for k, v in thing.items())
        return f"{{{','.join(f'{k}:{v}' for k, v in items)}}}"
    if isinstance(thing, bool | int | float | complex | str | bytes | type(None)):
        return repr(thing)
    if isinstance(thing, enum.Enum):
        return thing.name
    if isinstance(thing, _PLACED):
        return "placed"
    if isinstance(thing, np.ndarray | np.generic | jax.Array):
        return f"{thing.dtype}{thing.shape}"
    if hasattr(_jax.open_jaxpr(thing), "eqns"):
        return "jaxpr"
    if isinstance(thing, type | np.dtype):
        return getattr(thing, "__name__", str(thing))
    if dataclasses.is_dataclass(thing):
        fields = [f.name for f in dataclasses.fields(thing)]
        return _word([getattr(thing, f, None) for f in fields if f not in _LEFT_OUT])
    if callable(thing):
        return getattr(thing, "__name__", type(thing).__name__)
    return _ADDRESS.sub("", repr(thing))
