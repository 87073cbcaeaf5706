"""The numbers of a plain run, kept to hold others against.

Kept are the first and the last step whole, and what is small (the loss, a norm) of
every step: the first step has no chaos in it yet and shows a wrong gradient best, the
last shows what takes steps to come up. Two states lie in host memory for it.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._records._plan import ArgumentRecord, ProgramRecord
from .._records._verification import LeafCheck
from ._bias import Direction, Lean, direction, flattened, has_direction
from ._run import on_host
from ._tolerance import Rounding, tolerance

STATE_ROLES = ("parameter", "optimizer state")

_SMALL_BYTES = 1 << 16
"""Up to here a leaf is looked at after every step."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Kept:
    """A leaf of the plain run after one step, and how large what it says is."""

    value: np.ndarray
    largest: float
    change: float
    direction: Direction | None
    shaken_by: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a leaf is off after a step: by sizes, or in a way that has none.

    `error` is that of single elements, `lean` what they share.
    """

    error: float | None
    lean: Lean | None = None
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state among a step's arguments, by their flat numbers.

    `pairs` says which result takes the place of which of them; `starts` are the
    caller's arrays.
    """

    records: Sequence[ArgumentRecord] = ()
    starts: Sequence[Any] = ()
    pairs: Mapping[int, int] = dataclasses.field(default_factory=dict)
    objects: int = 0


class Reference:
    """What the plain step returned, step by step, and what is tolerated beside it.

    **Arguments:** `role` is what is called all that is no state.
    """

    def __init__(
        self, steps: int, rounding: Rounding, state: State, role: str = "output"
    ):
        self.steps, self.rounding, self.state = steps, rounding, state
        self.role = role
        self.gradients: dict[Any, str] = {}
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.paths: list[str] = []
        self.types: list[tuple[tuple[int, ...], str]] = []
        self.arguments: dict[int, int] = {}
        self.structure: Any = None
        self.finite = True

    def store(self, step: int, out: Any) -> None:
        """Keeps a step of the plain run."""
        if self.structure is None:
            self._begin(out)
        for number, _, value in self.looked_at(step, out):
            start = self._start(number, value)
            largest = _largest(value)
            change = largest
            if start is not None:
                change = difference(value, start).error or 0.0
            way = None
            if has_direction(value.dtype):
                moved = _moved(value, start)
                way = direction(self.rounding, value, moved, step)
            self.finite &= bool(np.all(_finite(value)))
            self.kept[step, number] = _Kept(
                value=value, largest=largest, change=change, direction=way
            )

    def _begin(self, out: Any) -> None:
        leaves, self.structure = jax.tree.flatten_with_path(out)
        self.paths = [_name(path, self.role, self.state.objects) for path, _ in leaves]
        self.types = [(tuple(v.shape), str(v.dtype)) for _, v in leaves]
        self.arguments = {k: i for i, k in self.state.pairs.items()}

    def _start(self, number: int, value: np.ndarray) -> np.ndarray | None:
        """What a leaf of the state began as, in its dtype; `None` for other leaves."""
        if number not in self.arguments:
            return None
        start = self.state.starts[self.arguments[number]]
        start = on_host(start) if hasattr(start, "dtype") else np.asarray(start)
        return start.astype(value.dtype) if start.shape == value.shape else None

    def shake(
        self, step: int, out: Any, change: Callable[[int, Any], Any] = lambda i, x: x
    ) -> None:
        """Takes note of a step of the plain run from arguments that are `change`d."""
        for number, _, value in self.looked_at(step, out):
            kept = self.kept[step, number]
            start = self._start(number, kept.value)
            if start is None or kept.direction is None:
                apart = difference(value, kept.value)
                moved = _moved(value, None)
            else:
                i = self.arguments[number]
                other = on_host(change(i, jnp.asarray(start)))
                moved = _moved(value, other)
                apart = Difference(error=_largest(moved - _moved(kept.value, start)))
            kept.shaken_by = max(kept.shaken_by, apart.error or 0.0)
            if kept.direction is not None:
                before = _moved(kept.value, start)
                kept.direction.note(before, moved - before)

    def looked_at(self, step: int, out: Any) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Number, array and numbers of the leaves that count after this step."""
        for number, leaf in enumerate(jax.tree.leaves(out)):
            gone = isinstance(leaf, jax.Array) and leaf.is_deleted()
            if not gone and (step in (1, self.steps) or leaf.nbytes <= _SMALL_BYTES):
                yield number, leaf, on_host(leaf)

    def compare(
        self, step: int, out: Any, digest: "Digest | None" = None
    ) -> dict[int, Difference]:
        """How far each leaf of a planned step that is looked at is off.

        **Arguments:** `digest` takes note of the bits.
        """
        if jax.tree.structure(out) != self.structure:
            return self.all_are("the step returns another tree")
        found = {}
        for number, leaf in enumerate(jax.tree.leaves(out)):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                found[number] = Difference(error=None, problem=GONE)
        for number, leaf, value in self.looked_at(step, out):
            if digest is not None:
                digest.add(step, number, value)
            wrong = self._wrong_kind(number, leaf)
            found[number] = (
                Difference(error=None, problem=wrong)
                if wrong
                else self._difference(step, number, value)
            )
        return found

    def apart(self, step: int, out: Any, digest: "Digest") -> dict[int, Difference]:
        """How far each leaf of another plain step that is looked at is off.

        **Arguments:** `digest` takes note of the bits.
        """
        found = {}
        for number, _, value in self.looked_at(step, out):
            digest.add(step, number, value)
            found[number] = self._difference(step, number, value)
        return found

    def all_are(self, problem: str) -> dict[int, Difference]:
        """What `compare` says where nothing can be compared."""
        other = Difference(error=None, problem=problem)
        return dict.fromkeys(range(len(self.paths)), other)

    def _difference(self, step: int, number: int, value: np.ndarray) -> Difference:
        kept = self.kept[step, number]
        found = difference(value, kept.value)
        start = self._start(number, value)
        if found.error is None or kept.direction is None:
            return found
        apart = flattened(value) - flattened(kept.value)
        lean = kept.direction.lean(_moved(kept.value, start), apart)
        return dataclasses.replace(found, lean=lean)

    def under(self, program: ProgramRecord) -> "Reference":
        """The same numbers, for a plan that has the state in other memory.

        With gradients on the host also what is returned in the type of an argument in
        host memory.
        """
        other, records = copy.copy(self), program.arguments
        other.state = dataclasses.replace(self.state, records=records)
        there = records if program.streaming.gradients_on_host else ()
        hosted = [r for r in there if r.memory_kind != "device"]
        other.gradients = {(tuple(r.shape), r.dtype): r.memory_kind for r in hosted}
        return other

    def _record(self, number: int) -> ArgumentRecord | None:
        i = self.arguments.get(number)
        return None if i is None else self.state.records[i]

    def _wrong_kind(self, number: int, leaf: Any) -> str:
        shape, dtype = self.types[number]
        if (tuple(leaf.shape), str(leaf.dtype)) != (shape, dtype):
            return f"it is {leaf.dtype}{list(leaf.shape)}, plain {dtype}{list(shape)}"
        record = self._record(number)
        wanted = "device" if record is None else record.memory_kind
        # JAX says None where a backend has one memory only.
        is_in = leaf.sharding.memory_kind or "device"
        if is_in not in (wanted, self.gradients.get((shape, dtype))):
            return f"it is returned in {is_in} memory, and belongs in {wanted} memory"
        return ""

    def _kept(self, step: int, number: int) -> _Kept:
        """A leaf after a step, or after the first if it is not looked at there."""
        return self.kept.get((step, number)) or self.kept[1, number]

    def tolerance(self, step: int, number: int, measured: bool = True) -> float:
        """What an element of leaf `number` may be off by after a step.

        Without what other plain runs were apart by, if that is not `measured`.
        """
        kept = self._kept(step, number)
        return tolerance(
            self.rounding,
            kept.value.dtype,
            steps=step,
            largest=kept.largest,
            change=kept.change,
            shaken_by=kept.shaken_by if measured else 0.0,
        )

    def bias(
        self, step: int, number: int, one: Difference, measured: bool = True
    ) -> tuple[float, float]:
        """The bias of a leaf that is most of what is tolerated, and that."""
        way = self._kept(step, number).direction
        if way is None or one.lean is None:
            return 0.0, 0.0
        tolerated = way.tolerated(one.lean, measured)
        worst = int(np.argmax(np.abs(one.lean.biases) / tolerated))
        return float(one.lean.biases[worst]), float(tolerated[worst])

    def check(self, found: Mapping[int, Mapping[int, Difference]]) -> list[LeafCheck]:
        """A record per leaf, of the step where it was worst.

        **Arguments:** `found` is what `compare` returned, by step.
        """
        checks = []
        for number, path in enumerate(self.paths):
            mine = {step: d[number] for step, d in found.items() if number in d}
            step = max(mine, key=lambda s: (self._badness(s, number, mine[s]), -s))
            one, allowed = mine[step], self.tolerance(step, number)
            bias, allowed_bias = self.bias(step, number, one)
            record, role = self._record(number), self.role
            if record is not None and record.role in STATE_ROLES:
                role = record.role
            shape, dtype = self.types[number]
            checks.append(
                LeafCheck(
                    path=path,
                    role=role,
                    shape=shape,
                    dtype=dtype,
                    step=step,
                    error=one.error,
                    tolerance=allowed,
                    change=self._kept(step, number).change,
                    bias=bias,
                    bias_tolerance=allowed_bias,
                    ok=self._badness(step, number, one) <= 1.0,
                    problem=one.problem,
                )
            )
        return checks

    def _badness(
        self, step: int, number: int, one: Difference, measured: bool = True
    ) -> float:
        """How often an error is what is tolerated; right up to 1."""
        if one.error is None:
            return np.inf
        allowed = self.tolerance(step, number, measured)
        bias, allowed_bias = self.bias(step, number, one, measured)
        leaning = abs(bias) / allowed_bias if bias else 0.0
        if one.error == 0.0:
            return leaning
        return max(leaning, one.error / allowed if allowed else 1e300)

    def is_wrong(
        self, step: int, found: Mapping[int, Difference], measured: bool = True
    ) -> bool:
        """Whether any leaf is off by more than is tolerated, or otherwise."""
        return any(self._badness(step, k, d, measured) > 1.0 for k, d in found.items())

    def is_off(self, step: int, found: Mapping[int, Difference]) -> bool:
        """Whether any leaf is off by a size that is more than is tolerated."""
        sized = {k: one for k, one in found.items() if one.error is not None}
        return self.is_wrong(step, sized)


GONE = "the planned step donates it, and leaves nothing in its place"


def _name(path: Any, role: str, objects: int) -> str:
    """What a leaf is called: by its place in the result, a gradient by its name.

    What is in an object has the argument's path: the first `objects` results.
    """
    if role == "gradient":
        return path[0].key
    if not objects:
        return f"out{jax.tree_util.keystr(path)}"
    which, *below = path
    rest = jax.tree_util.keystr(tuple(below))
    return f"args[{which.idx}]{rest}" if which.idx < objects else f"out{rest}"


def _moved(value: np.ndarray, start: np.ndarray | None) -> np.ndarray:
    """What the steps changed in an array, in rows (`flattened`)."""
    return flattened(value) if start is None else flattened(value) - flattened(start)


class Digest:
    """A fingerprint of the bits that the steps of a run returned, leaf by leaf."""

    def __init__(self) -> None:
        self.leaves: dict[tuple[int, int], bytes] = {}

    def add(self, step: int, number: int, value: np.ndarray) -> None:
        """Takes note of a leaf."""
        bits = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        self.leaves[step, number] = hashlib.blake2b(bits.data, digest_size=16).digest()

    def differing(self, other: "Digest") -> list[tuple[int, int]]:
        """Steps and leaves in which two runs differ, the earliest first."""
        return sorted(k for k, v in self.leaves.items() if other.leaves.get(k) != v)


def difference(got: np.ndarray, expected: np.ndarray) -> Difference:
    """The largest element of got − expected, two arrays of one type."""
    there, here = _finite(expected), _finite(got)
    if not np.array_equal(there, here):
        lost = int(np.sum(there & ~here))
        if lost:
            problem = f"NaN or infinity in {lost} of {got.size}, plain has numbers"
        else:
            problem = f"numbers where plain has NaN or infinity, {int(np.sum(~there))}"
        return Difference(error=None, problem=problem)
    wide = _wide(got.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(got.astype(wide) - expected.astype(wide))
    return Difference(error=float(np.max(apart, initial=0.0, where=there)))


def _wide(dtype: Any) -> Any:
    """A dtype in which differences are exact enough, and no larger than need be."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return np.complex128 if dtype.itemsize > 8 else np.complex64
    if jnp.issubdtype(dtype, np.floating) and dtype.itemsize <= 4:
        return np.float32
    return np.float64


def _finite(value: np.ndarray | np.generic) -> np.ndarray | np.bool:
    if not jnp.issubdtype(value.dtype, np.inexact):
        return np.ones(value.shape, bool)
    return np.isfinite(value)


def _largest(value: np.ndarray) -> float:
    sizes = np.abs(value.astype(_wide(value.dtype)))
    return float(np.max(sizes, initial=0.0, where=_finite(value)))
