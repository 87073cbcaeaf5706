"""When two equations of a jaxpr are the same operation: a key that tells.

`_repeats` looks for the block that a Python loop over layers has written many times.
For that it needs to know which equations do the same to other values: same primitive,
same parameters, same types. `equation_key` makes a hashable value of all that, so that
equal keys mean equal operations; nothing is hashed down to a digest, so there are no
collisions.

What goes silently wrong elsewhere and is the reason for the length of this file: two
`custom_vjp` calls may run the same forward jaxpr and differ only in a number that their
backward rule closes over. Sharing one body between them would give wrong gradients and
no error. Functions are therefore compared by their code *and* by what they close over.
What cannot be compared by value (arrays, tracers, objects of unknown kind) counts as
equal only to itself: the price of doubt is a block that is not rolled, never one rolled
wrongly.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .. import _jax

_PLAIN = (str, bytes, int, complex, type(None), type(Ellipsis), np.dtype)
_NOT_SEMANTIC = frozenset({"debug_info", "debug", "name_and_src_info", "source_info"})
_WRITTEN_ONCE = ("Store", "EqualStore")  # where JAX's wrappers leave their results
_CONTEXT = ("compute_type", "threefry_partitionable", "xla_metadata")


class Keys:
    """Makes the keys of one search; remembers what it has described already.

    Descriptions are kept by object, together with the object, so that an address is not
    given to another one meanwhile.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._types: dict[int, tuple[Any, Any]] = {}
        self._numbers: dict[Any, int] = {}
        self._open: set[int] = set()

    def number(self, key: Any) -> int:
        """A small number for a key; equal keys have equal numbers."""
        return self._numbers.setdefault(key, len(self._numbers))

    def type_key(self, aval: Any, *, weak: bool) -> Any:
        """Key of an abstract value. Without `weak`, weak and strong types are equal.

        Operands are compared without: a primitive that accepts both gives the same
        result up to the weakness of the *output* type, and that one is compared.
        """
        found = self._types.get(id(aval))
        if found is None:
            names = ("memory_space", "manual_axis_type")
            rest = tuple(self.describe(getattr(aval, name, None)) for name in names)
            # On which mesh the compiler partitions an array says nothing of its layer.
            spread = _jax.explicit_sharding(aval) if hasattr(aval, "sharding") else None
            rest += (self.describe(spread),)
            shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
            if shape is None:
                key = (self.describe(aval), None)
            else:
                key = (type(aval).__name__, shape, dtype, *rest)
            found = (aval, (key, (key, bool(getattr(aval, "weak_type", False)))))
            self._types[id(aval)] = found
        return found[1][weak]

    def literal_key(self, literal: Any) -> Any:
        """Key of a literal's value: dtype, shape and bits."""
        value = np.asarray(literal.val)
        return ("literal", value.dtype, value.shape, value.tobytes())

    def equation_key(self, equation: Any) -> tuple[Any, Any]:
        """Key of an equation, and a looser one that leaves out *which* row is sliced.

        `weights[i]`, for a Python int i, becomes a `slice` whose parameters differ from
        layer to layer. Such equations share the second key; the search takes them out
        of the block again and hands their results in.
        """
        name = equation.primitive.name
        params = equation.params
        if name == "name":  # the word of a `checkpoint_name` does not compute anything
            params = {}
        context = tuple(
            self.describe(getattr(equation.ctx, field, None)) for field in _CONTEXT
        )
        types_in = tuple(self.type_key(v.aval, weak=False) for v in equation.invars)
        types_out = tuple(self.type_key(v.aval, weak=True) for v in equation.outvars)
        effects = id(equation) if _jax.has_effects(equation) else None
        head = (name, types_in, types_out, context, effects)
        exact = (*head, self.describe(params))
        return exact, (*head, "one row") if _takes_one_row(equation) else exact

    def describe(self, thing: Any) -> Any:
        """A hashable value that is equal for things that mean the same."""
        kind = type(thing)
        if kind is int or kind is str or thing is None:
            return thing
        if isinstance(thing, bool | float | np.generic):
            return (type(thing).__name__, repr(thing))
        if isinstance(thing, _PLAIN):
            return thing
        if kind is tuple or kind is list:
            return (kind.__name__, *(self.describe(x) for x in thing))
        if isinstance(thing, Mapping):
            items = ((str(k), self.describe(v)) for k, v in thing.items())
            return (
                "mapping",
                *sorted((i for i in items if i[0] not in _NOT_SEMANTIC), key=_first),
            )
        found = self._known.get(id(thing))
        if found is None:
            if id(thing) in self._open:
                return ("within itself", type(thing).__name__)
            self._open.add(id(thing))
            try:
                number = self.number(self._describe_object(thing))
                found = (thing, ("described", number))  # short: tuples hash in full
            finally:
                self._open.discard(id(thing))
            self._known[id(thing)] = found
        return found[1]

    def _describe_object(self, thing: Any) -> Any:
        if hasattr(_jax.open_jaxpr(thing), "eqns"):
            return self._describe_jaxpr(thing)
        if isinstance(thing, np.ndarray):
            return ("array", thing.dtype, thing.shape, thing.tobytes())
        if isinstance(thing, jax.Array) or _jax.is_tracer(thing):
            return ("itself", id(thing))
        if isinstance(thing, type):
            return thing
        if isinstance(thing, set | frozenset):
            return ("set", frozenset(self.describe(x) for x in thing))
        if hasattr(thing, "f") and hasattr(thing, "transforms"):  # JAX's WrappedFun
            parts = (thing.f, thing.transforms, getattr(thing, "params", None))
            return ("wrapped", *(self.describe(x) for x in parts))
        if callable(thing):
            return self._describe_callable(thing)
        if dataclasses.is_dataclass(thing):
            return (type(thing), *self._fields(thing))
        if isinstance(thing, _jax.Trace):  # rules hold the one that they were met in
            return ("trace", type(thing), getattr(thing, "requires_low", None))
        if hasattr(thing, "primitive"):  # a rule from which JAX took what nobody reads
            return ("equation", self.equation_key(thing)[0])
        if type(thing).__name__ == "Unhashable":  # JAX's box for a static argument
            return ("boxed", self.describe(thing.val))
        return _by_value(thing)

    def _fields(self, thing: Any) -> list[Any]:
        names = [f.name for f in dataclasses.fields(thing)]
        return [
            self.describe(getattr(thing, name, None))
            for name in names
            if name not in _NOT_SEMANTIC
        ]

    def _describe_callable(self, thing: Any) -> Any:
        if isinstance(thing, functools.partial):
            parts = (thing.func, thing.args, thing.keywords)
            return ("partial", *(self.describe(x) for x in parts))
        if isinstance(thing, types.MethodType):
            return (
                "method",
                self.describe(thing.__func__),
                self.describe(thing.__self__),
            )
        if isinstance(thing, types.FunctionType):
            cells = tuple(_content(c) for c in thing.__closure__ or ())
            if thing.__name__ == "memoized" and thing.__module__.startswith("jax."):
                cells = tuple(c for c in cells if not isinstance(c, dict))  # its cache
            defaults = (thing.__defaults__, thing.__kwdefaults__)
            return (
                "function",
                thing.__module__,
                thing.__code__,
                *(self.describe(x) for x in (*cells, *defaults)),
            )
        inner = getattr(thing, "__wrapped__", None)
        if inner is not None:
            return ("wrapper", type(thing), self.describe(inner))
        if dataclasses.is_dataclass(thing):
            return (type(thing), *self._fields(thing))
        return _by_value(thing)

    def _describe_jaxpr(self, jaxpr: Any) -> Any:
        """Variables become numbers, so that names do not matter; constants count."""
        opened = _jax.open_jaxpr(jaxpr)
        number: dict[Any, int] = {}

        def read(atom: Any) -> Any:
            if isinstance(atom, _jax.Literal):
                return self.literal_key(atom)
            return number[atom]

        def write(variables: Any) -> tuple[Any, ...]:
            for v in variables:
                number[v] = len(number)
            return tuple(self.type_key(v.aval, weak=True) for v in variables)

        inputs = (write(opened.constvars), write(opened.invars))
        lines = []
        for equation in opened.eqns:
            operands = tuple(read(v) for v in equation.invars)
            lines.append((self.equation_key(equation)[0], operands))
            write(equation.outvars)
        outputs = tuple(read(v) for v in opened.outvars)
        consts = tuple(self.describe(c) for c in _jax.consts_of(jaxpr))
        return ("jaxpr", inputs, tuple(lines), outputs, consts)


def _by_value(thing: Any) -> Any:
    kind = type(thing)
    if kind.__module__.startswith("jax.") and kind.__name__ in _WRITTEN_ONCE:
        return kind.__name__
    if kind is object:  # a sentinel: nothing in it
        return "object"
    if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None:
        try:
            hash(thing)
        except TypeError:
            return ("itself", id(thing))
        return (kind, thing)
    return ("itself", id(thing))


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that nothing was put into yet
        return None


def _takes_one_row(equation: Any) -> bool:
    """Whether the equation is the `slice` of `array[i]`: one place on one axis."""
    if equation.primitive.name != "slice":
        return False
    shape = equation.invars[0].aval.shape
    result = equation.outvars[0].aval.shape
    cut = [(a, b) for a, b in zip(shape, result, strict=True) if a != b]
    return len(cut) == 1 and cut[0][1] == 1
