"""Flat programs and what they read and write once XLA has fused them.

`flatten` opens nested calls so that fusion is seen across them; every step remembers
the top-level equation that it came from. `Passes` implements the rule that `_cost`
explains. Values are numbers; `None` stands for a literal.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _jax
from ._rules import CALLS, Kind, operand_bytes, result_bytes, rule_of

_PRODUCTS = frozenset(
    ("dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_dot")
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One equation that is no call; `owner` is the top-level equation it stands in."""

    owner: int
    equation: Any
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A program without calls; `outputs` are the numbers of the values it returns.

    `numbers` are those of the variables outside of calls.
    """

    steps: tuple[Step, ...]
    outputs: frozenset[int]
    numbers: Mapping[Any, int | None]


def flatten(inputs: Sequence[Any], equations: Sequence[Any], results: Any) -> Flat:
    """The equations with calls opened; `inputs` and `results` are their variables."""
    steps: list[Step] = []
    count = 0

    def number(variables: Sequence[Any], env: dict[Any, int | None]) -> tuple[int, ...]:
        nonlocal count
        numbers = tuple(range(count, count + len(variables)))
        count += len(variables)
        env.update(zip(variables, numbers, strict=True))
        return numbers

    def walk(equation: Any, owner: int, env: dict[Any, int | None]) -> None:
        read = tuple(_read(v, env) for v in equation.invars)
        inner = inner_jaxpr(equation)
        if inner is None:
            made = number(equation.outvars, env)
            steps.append(
                Step(owner=owner, equation=equation, inputs=read, outputs=made)
            )
            return
        inside: dict[Any, int | None] = dict(zip(inner.invars, read, strict=True))
        number(inner.constvars, inside)
        for nested in inner.eqns:
            walk(nested, owner, inside)
        outputs = (_read(v, inside) for v in inner.outvars)
        env.update(zip(equation.outvars, outputs, strict=True))

    env: dict[Any, int | None] = {}
    number(inputs, env)
    for owner, equation in enumerate(equations):
        walk(equation, owner, env)
    returned = (_read(v, env) for v in results)
    outputs = frozenset(n for n in returned if n is not None)
    return Flat(steps=tuple(steps), outputs=outputs, numbers=env)


def _read(atom: Any, env: Mapping[Any, int | None]) -> int | None:
    return None if isinstance(atom, _jax.Literal) else env[atom]


def inner_jaxpr(equation: Any) -> Any | None:
    """The open jaxpr that a call runs on its operands as they are, or `None`."""
    if equation.primitive.name not in CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "call", "callee", "fwd_jaxpr", "fun_jaxpr"):
        inner = _jax.open_jaxpr(equation.params.get(key))
        if getattr(inner, "eqns", None) is None:
            continue
        if len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(
            equation.outvars
        ):
            return inner
    return None


class Passes:
    """Bytes that each step of a flat program reads and writes after fusion.

    `virtual` are values that are known to be no arrays: each reader computes them.
    """

    def __init__(self, flat: Flat, virtual: frozenset[int] = frozenset()):
        self._flat = flat
        self._virtual = virtual
        self._users: dict[int, list[int]] = {}
        self._maker: dict[int, int] = {}
        for position, step in enumerate(flat.steps):
            for value in step.inputs:
                if value is not None:
                    self._users.setdefault(value, []).append(position)
            self._maker.update(dict.fromkeys(step.outputs, position))
        self._kinds = [self._kind(p) for p in range(len(flat.steps))]
        self._root: dict[int, int | None] = {}
        self._root_bytes: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}
        self._number: list[int] = []
        self._seen: set[tuple[int, int]] = set()
        for position in range(len(flat.steps)):
            self._place(position)
        self._returned = {self._rooted(v) for v in flat.outputs}
        self._bytes = [self._count(p) for p in range(len(flat.steps))]

    def bytes_of(self, position: int) -> tuple[int, int]:
        """Bytes that the step at `position` reads and writes."""
        return self._bytes[position]

    def _kind(self, position: int) -> Kind:
        step = self._flat.steps[position]
        name = step.equation.primitive.name
        rule = rule_of(step.equation)
        if rule is None:
            return "kernel"
        if name == "transpose":
            # XLA folds a transposition beside a matrix product into the product.
            users = self._users.get(step.outputs[0], [])
            names = {self._name(u) for u in users}
            source = step.inputs[0]
            maker = None if source is None else self._maker.get(source)
            if maker is not None:
                names = names if names and names <= _PRODUCTS else {self._name(maker)}
            if names and names <= _PRODUCTS:
                return "view"
        return rule.kind

    def _name(self, position: int) -> str:
        return self._flat.steps[position].equation.primitive.name

    def _place(self, position: int) -> None:
        """Finds what a view looks at, and the pass of everything else."""
        step, kind = self._flat.steps[position], self._kinds[position]
        if kind == "view":
            self._look_through(step)
            self._number.append(0)
            return
        number = 0
        for value in step.inputs:
            root = self._rooted(value)
            if root is None:
                continue
            self._readers.setdefault(root, []).append(position)
            maker = self._maker.get(root)
            if maker is not None:
                ends = self._kinds[maker] != "fusible"
                number = max(number, self._number[maker] + ends)
        self._number.append(number)

    def _look_through(self, step: Step) -> None:
        """The results of a view stand for the values that it looks at."""
        sizes = operand_bytes(step.equation)
        paired = len(step.inputs) == len(step.outputs)
        for k, output in enumerate(step.outputs):
            source = step.inputs[k if paired else 0] if step.inputs else None
            self._root[output] = self._rooted(source)
            if source is None or self._root[output] is None:
                self._root_bytes[output] = 0
            else:
                size = sizes[k if paired else 0]
                self._root_bytes[output] = self._root_bytes.get(source, size)

    def _rooted(self, value: int | None) -> int | None:
        """The value behind views; `None` for literals and what views make of them."""
        return None if value is None else self._root.get(value, value)

    def _count(self, position: int) -> tuple[int, int]:
        step, kind = self._flat.steps[position], self._kinds[position]
        if kind == "view":
            return 0, 0
        rule = rule_of(step.equation)
        sizes = operand_bytes(step.equation)
        reads = rule.reads(step.equation) if rule and rule.reads else sizes
        results = result_bytes(step.equation)
        writes = rule.writes(step.equation) if rule and rule.writes else results
        if kind == "kernel":
            spread = sum(
                self._spread(value, size)
                for value, size in zip(step.inputs, sizes, strict=True)
            )
            return sum(reads), sum(writes) + spread
        read = sum(
            self._fused_read(position, value, part, size)
            for value, part, size in zip(step.inputs, reads, sizes, strict=True)
        )
        written = sum(
            size
            for value, size in zip(step.outputs, writes, strict=True)
            if kind == "reduction" or self._leaves_pass(position, value)
        )
        return read, written

    def _spread(self, value: int | None, size: int) -> int:
        """Bytes to write a broadcast out, which a kernel reads from memory."""
        if value is None or value not in self._root:
            return 0
        return size if self._root_bytes.get(value, 0) < size else 0

    def _fused_read(
        self, position: int, value: int | None, part: int, size: int
    ) -> int:
        root = self._rooted(value)
        if value is None or root is None or root in self._virtual:
            return 0
        number, maker = self._number[position], self._maker.get(root)
        if (
            maker is not None
            and self._kinds[maker] == "fusible"
            and self._number[maker] == number
        ):
            return 0
        if (root, number) in self._seen:
            return 0
        if part == size:
            self._seen.add((root, number))
        return min(part, self._root_bytes.get(value, part))

    def _leaves_pass(self, position: int, value: int) -> bool:
        """Whether a fusible step's result has to be in memory for somebody."""
        readers = self._readers.get(value, [])
        if value in self._virtual:
            return False
        if value in self._returned or not readers:
            return True
        number = self._number[position]
        return any(
            self._kinds[r] == "kernel" or self._number[r] != number for r in readers
        )
