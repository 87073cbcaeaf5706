"""Running jaxprs equation by equation: inlining, pruning, asking what depends on what.

Everything that stowax does to a program it does by evaluating its jaxpr again under a
new trace: `inline` opens the calls that hide equations (`jit`, `jax.checkpoint`),
`Program` runs just the equations that given results need, starting from whatever is at
hand. That last rule is the whole of rematerialization here: what is stored is at hand,
what is not gets computed again, what nobody reads does not run.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ._canonical import digest, says_nothing
from ._control_flow import is_control_flow, rebuild

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint"})
_REMAT = frozenset({"remat", "remat2", "checkpoint"})


def is_checkpoint(equation: Any) -> bool:
    """Whether the equation is a `jax.checkpoint` of the user's."""
    return equation.primitive.name in _REMAT


def is_loop(equation: Any) -> bool:
    """Whether the equation is a scan that runs its body more than once."""
    return equation.primitive.name == "scan" and equation.params["length"] > 1


def holds_loop(equation: Any) -> bool:
    """Whether a scan stands in the equation's call, not inside of anything else."""
    inner = _inner(equation)
    return inner is not None and any(loops_in(inner))


def loops_in(jaxpr: Any) -> Iterator[Any]:
    """The scans of a jaxpr, those of its calls and of `jax.shard_map` in it too."""
    for equation in _jax.open_jaxpr(jaxpr).eqns:
        mapped = equation.primitive.name == "shard_map"
        inner = equation.params["jaxpr"] if mapped else _inner(equation)
        if is_loop(equation):
            yield equation
        elif inner is not None:
            yield from loops_in(inner)


def _inner(equation: Any) -> Any | None:
    if equation.primitive.name in _CALLS | _REMAT:
        params = equation.params
        return params.get("jaxpr", params.get("call_jaxpr"))
    return None


def _constrain(values: list[Any], equation: Any) -> list[Any]:
    """A nested `jit` may carry output shardings: they stay, as constraints.

    Not where types say how arrays are spread: JAX heeds the types there.
    """
    shardings = equation.params.get("out_shardings")
    if shardings is None:
        return values
    return [
        v
        if not isinstance(s, jax.sharding.Sharding)
        or _jax.explicit_sharding(_jax.aval_of(v)) is not None
        else jax.lax.with_sharding_constraint(v, s)
        for v, s in zip(values, shardings, strict=True)
    ]


def evaluate(
    jaxpr: Any,
    inputs: Sequence[Any],
    *,
    keep_checkpoint: Callable[[Any], bool] = lambda equation: False,
    visit: Callable[[Any, list[Any]], list[Any] | None] = lambda equation, inputs: None,
    consts: Sequence[Any] | None = None,
) -> list[Any]:
    """Runs `jaxpr` on `inputs`, opening nested calls.

    **Arguments:** `keep_checkpoint(equation)` says which `jax.checkpoint` calls stay
    calls. `visit(equation, inputs)` may return the outputs in place of running the
    equation. `consts` stand in for the jaxpr's own.
    """
    opened = _jax.open_jaxpr(jaxpr)
    own = _jax.consts_of(jaxpr) if consts is None else consts
    env = dict(zip(opened.constvars, own, strict=True))
    env.update(zip(opened.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for equation in opened.eqns:
        values = [read(v) for v in equation.invars]
        inner = _inner(equation)
        replaced = visit(equation, values)
        if replaced is not None:
            out = replaced
        elif says_nothing(equation):
            out = values
        elif inner is not None and not (
            is_checkpoint(equation) and keep_checkpoint(equation)
        ):
            with _jax.source_of(equation):
                out = evaluate(
                    inner, values, keep_checkpoint=keep_checkpoint, visit=visit
                )
            out = _constrain(out, equation)
        else:
            out = bind(equation, values)
        env.update(zip(equation.outvars, out, strict=True))
    return [read(v) for v in opened.outvars]


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Runs one equation.

    Under `jax.disable_jit` a loop or branch runs operation by operation, as it does
    where the user wrote it: bound as it is, JAX would compile it whole, and fusion
    rounds differently.
    """
    if not _jax.jit_is_disabled() or not is_control_flow(equation):
        return _jax.bind(equation, values)
    with _jax.source_of(equation):
        return rebuild(equation, values, evaluate)


def inline(
    jaxpr: Any, *, keep_checkpoint: Callable[[Any], bool] = lambda equation: False
) -> Any:
    """The same program with nested `jit` and `jax.checkpoint` calls opened."""
    opened = _jax.open_jaxpr(jaxpr)
    run = functools.partial(evaluate, jaxpr, keep_checkpoint=keep_checkpoint)
    specs = [spec_of(v.aval) for v in opened.invars]
    return trace(lambda *inputs: run(inputs), *specs)


def spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What to trace with in place of a value of this type.

    The weak type and the mesh of the type stay: without the mesh, rules traced again
    under the user's mesh would insert `reshard` equations that the plan has never seen.
    """
    sharding = getattr(aval, "sharding", None)
    if sharding is not None and sharding.mesh.empty:
        sharding = None
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=sharding,
        weak_type=getattr(aval, "weak_type", False),
        manual_axis_type=getattr(aval, "manual_axis_type", None),
    )


def typed_as(value: Any, aval: Any) -> Any:
    """`value`, weakly typed if `aval` is, and only then: promotion depends on it.

    Equations that are bound again may make another type than the user's code did.
    """
    weak = bool(getattr(aval, "weak_type", False))
    if bool(getattr(_jax.aval_of(value), "weak_type", False)) == weak:
        return value
    return jax.lax.convert_element_type_p.bind(
        value, new_dtype=aval.dtype, weak_type=weak, sharding=None
    )


def trace(function: Callable[..., Any], *specs: Any) -> Any:
    """`jax.make_jaxpr`, also under `jax.disable_jit`, where scans must stay scans."""
    return _jax.retype(jax.make_jaxpr(function))(*specs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One equation of a `Program`; inputs are value numbers or literal values."""

    equation: Any
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]

    @property
    def described(self) -> str:
        """The equation in words: its operation and the user's line."""
        where = _jax.source_text(self.equation)
        return self.equation.primitive.name + (f" ({where})" if where else "")

    @property
    def read_values(self) -> list[int]:
        """The numbers of what it reads, without literals."""
        return [number for number in self.inputs if number is not None]

    def read(self, values: Mapping[int, Any]) -> list[Any]:
        """What it reads, literals included, given values by number."""
        pairs = zip(self.inputs, self.equation.invars, strict=True)
        return [
            atom.val if number is None else values[number] for number, atom in pairs
        ]


class Program:
    """A flat jaxpr whose values are numbered: inputs first, then every output in order.

    The numbers are what a plan refers to. They depend on nothing but the user's program
    and the version of JAX, and `fingerprint` tells whether two programs agree.
    """

    def __init__(self, jaxpr: Any):
        opened = _jax.open_jaxpr(jaxpr)
        self.jaxpr = jaxpr
        self.consts = tuple(_jax.consts_of(jaxpr))
        variables = [*opened.invars, *opened.constvars]
        self.input_count = len(opened.invars)
        self.const_count = len(opened.constvars)
        number = {v: i for i, v in enumerate(variables)}
        nodes = []
        for equation in opened.eqns:
            inputs = tuple(
                None if isinstance(v, _jax.Literal) else number[v]
                for v in equation.invars
            )
            outputs = []
            for v in equation.outvars:
                outputs.append(len(variables))
                number[v] = len(variables)
                variables.append(v)
            nodes.append(Node(equation=equation, inputs=inputs, outputs=tuple(outputs)))
        self.nodes: tuple[Node, ...] = tuple(nodes)
        self.numbers: Mapping[Any, int] = number
        self.avals = tuple(v.aval for v in variables)
        self.outputs: tuple[int | Any, ...] = tuple(
            v if isinstance(v, _jax.Literal) else number[v] for v in opened.outvars
        )
        self.maker = {o: k for k, n in enumerate(self.nodes) for o in n.outputs}

    @property
    def outputs_read(self) -> set[int]:
        """The outputs that are values, and no literals."""
        return {o for o in self.outputs if isinstance(o, int)}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of what the program is, however it was traced (`_canonical`)."""
        return digest(self.jaxpr)

    def closure(
        self,
        wanted: Iterable[int],
        at_hand: Container[int],
        *,
        effects: bool = False,
        served: Mapping[int, Container[int]] | None = None,
    ) -> list[int]:
        """Positions of the nodes that must run to get `wanted` from what is `at_hand`.

        With `effects`, nodes whose running can be noticed run as well (once is right:
        the forward pass). `served` has, by position, the operands that a node gets in
        another way: nothing has to run for them.
        """
        needed, run = {w for w in wanted if w not in at_hand}, []
        for position in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[position]
            noticed = effects and _jax.has_effects(node.equation)
            if needed.isdisjoint(node.outputs) and not noticed:
                continue
            run.append(position)
            needed.difference_update(node.outputs)
            skipped = served.get(position, ()) if served else ()
            read = (i for k, i in enumerate(node.inputs) if k not in skipped)
            needed.update(i for i in read if i is not None and i not in at_hand)
        return run[::-1]

    def constants(self) -> dict[int, Any]:
        """Values of the program's own constants, by number."""
        return dict(enumerate(self.consts, start=self.input_count))

    def run(
        self,
        wanted: Sequence[int],
        at_hand: Mapping[int, Any],
        *,
        effects: bool = False,
        scope: Callable[[int], contextlib.AbstractContextManager] | None = None,
    ) -> dict[int, Any]:
        """Values of `wanted`, from the values `at_hand`, running what it takes.

        **Arguments:** `at_hand` maps numbers to values (inputs, stored values); `scope`
        gives, for the position of a node, a context to run it in.
        """
        env = {**self.constants(), **at_hand}
        stored = frozenset(env)
        for position in self.closure(wanted, stored, effects=effects):
            node = self.nodes[position]
            with scope(position) if scope else contextlib.nullcontext():
                out = bind(node.equation, node.read(env))
            for number, value in zip(node.outputs, out, strict=True):
                if number not in stored:
                    env[number] = value
        return {w: env[w] for w in wanted}

    def read_outputs(self, values: Mapping[int, Any], count: int) -> list[Any]:
        """The first `count` outputs of the program, given `values` by number."""
        return [
            o.val if isinstance(o, _jax.Literal) else values[o]
            for o in self.outputs[:count]
        ]


def is_float(aval: Any) -> bool:
    """Whether derivatives can flow through a value of this type."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def active_values(program: Program, active_inputs: Sequence[int]) -> set[int]:
    """Numbers of the values that depend, differentiably, on the given inputs.

    Conservative: an opaque equation passes activity from any input to every float
    output.
    """
    active = set(active_inputs)
    for node in program.nodes:
        if node.equation.primitive.name == "stop_gradient":
            continue
        if any(i in active for i in node.inputs if i is not None):
            active.update(o for o in node.outputs if is_float(program.avals[o]))
    return active
