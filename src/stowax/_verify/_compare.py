"""The numbers of a plain run, kept to hold others against.

Kept are the first and the last step whole, and what is small (the loss, a norm) of
every step: the first step has no chaos in it yet and shows a wrong gradient best, the
last shows what takes steps to come up. Two states lie in host memory for it.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._records._plan import ArgumentRecord
from .._records._verification import LeafCheck
from ._run import on_host
from ._tolerance import Rounding, tolerance

_SMALL_BYTES = 1 << 16
"""Up to here a leaf is looked at after every step."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Kept:
    """A leaf of the plain run after one step, and how large what it says is."""

    value: np.ndarray
    largest: float
    change: float
    shaken_by: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a leaf is off after a step: by a size, or in a way that has none."""

    error: float | None
    problem: str = ""


class Reference:
    """What the plain step returned, step by step, and what is tolerated beside it.

    **Arguments:** `state` has, by output, the argument that it replaces: its record and
    its first numbers; `role` is what all other outputs are.
    """

    def __init__(
        self,
        steps: int,
        rounding: Rounding,
        state: Mapping[int, tuple[ArgumentRecord, Any]],
        role: str = "output",
    ):
        self.steps, self.rounding, self.state = steps, rounding, state
        self.role = role
        self.gradients: dict[Any, str] = {}
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.paths: list[str] = []
        self.types: list[tuple[tuple[int, ...], str]] = []
        self.structure: Any = None
        self.finite = True

    def store(self, step: int, out: Any) -> None:
        """Keeps a step of the plain run."""
        if self.structure is None:
            leaves, self.structure = jax.tree.flatten_with_path(out)
            self.paths = [_name(path, self.role) for path, _ in leaves]
            self.types = [(tuple(v.shape), str(v.dtype)) for _, v in leaves]
        for number, _, value in self.looked_at(step, out):
            largest = _largest(value)
            change = largest
            if number in self.state:
                change = _change(value, self.state[number][1], largest)
            self.finite &= bool(np.all(_finite(value)))
            self.kept[step, number] = _Kept(value=value, largest=largest, change=change)

    def shake(self, step: int, out: Any) -> None:
        """Takes note of a step of the plain run from other arguments."""
        for number, _, value in self.looked_at(step, out):
            kept = self.kept[step, number]
            found = difference(value, kept.value).error
            kept.shaken_by = max(kept.shaken_by, found or 0.0)

    def looked_at(self, step: int, out: Any) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Number, array and numbers of the leaves that count after this step."""
        for number, leaf in enumerate(jax.tree.leaves(out)):
            if step in (1, self.steps) or leaf.nbytes <= _SMALL_BYTES:
                yield number, leaf, on_host(leaf)

    def compare(
        self, step: int, out: Any, digest: "Digest | None" = None
    ) -> dict[int, Difference]:
        """How far each leaf of a planned step that is looked at is off.

        **Arguments:** `digest` takes note of the bits.
        """
        if jax.tree.structure(out) != self.structure:
            other = Difference(error=None, problem="the step returns another tree")
            return dict.fromkeys(range(len(self.paths)), other)
        found = {}
        for number, leaf, value in self.looked_at(step, out):
            if digest is not None:
                digest.add(step, number, value)
            wrong = self._wrong_kind(number, leaf)
            found[number] = (
                Difference(error=None, problem=wrong)
                if wrong
                else difference(value, self.kept[step, number].value)
            )
        return found

    def under(
        self,
        records: Sequence[ArgumentRecord],
        updates: Mapping[int, int],
        gradients_on_host: bool,
    ) -> "Reference":
        """The same numbers, for a plan that has the state in other memory.

        With `gradients_on_host` also what is returned in the type of an argument there.
        """
        other = copy.copy(self)
        other.state = {k: (records[i], self.state[k][1]) for i, k in updates.items()}
        hosted = [r for r in records if gradients_on_host and r.memory_kind != "device"]
        other.gradients = {(tuple(r.shape), r.dtype): r.memory_kind for r in hosted}
        return other

    def _wrong_kind(self, number: int, leaf: Any) -> str:
        shape, dtype = self.types[number]
        if (tuple(leaf.shape), str(leaf.dtype)) != (shape, dtype):
            return f"it is {leaf.dtype}{list(leaf.shape)}, plain {dtype}{list(shape)}"
        wanted = "device"
        if number in self.state:
            wanted = self.state[number][0].memory_kind
        # JAX says None where a backend has one memory only.
        is_in = leaf.sharding.memory_kind or "device"
        if is_in not in (wanted, self.gradients.get((shape, dtype))):
            return f"it is returned in {is_in} memory, and belongs in {wanted} memory"
        return ""

    def tolerance(self, step: int, number: int) -> float:
        """What leaf `number` may be off by after a step."""
        kept = self.kept[step, number]
        return tolerance(
            self.rounding,
            kept.value.dtype,
            steps=step,
            largest=kept.largest,
            change=kept.change,
            shaken_by=kept.shaken_by,
        )

    def check(self, found: Mapping[int, Mapping[int, Difference]]) -> list[LeafCheck]:
        """A record per leaf, of the step where it was worst.

        **Arguments:** `found` is what `compare` returned, by step.
        """
        checks = []
        for number, path in enumerate(self.paths):
            mine = {step: d[number] for step, d in found.items() if number in d}
            step = max(mine, key=lambda s: (self._badness(s, number, mine[s]), -s))
            one, allowed = mine[step], self.tolerance(step, number)
            role = self.role
            if number in self.state:
                role = self.state[number][0].role
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
                    change=self.kept[step, number].change,
                    ok=one.error is not None and one.error <= allowed,
                    problem=one.problem,
                )
            )
        return checks

    def _badness(self, step: int, number: int, one: Difference) -> float:
        if one.error is None:
            return np.inf
        allowed = self.tolerance(step, number)
        if one.error == 0.0:
            return 0.0
        return one.error / allowed if allowed else 1e300

    def is_wrong(self, step: int, found: Mapping[int, Difference]) -> bool:
        """Whether any leaf is off by more than is tolerated."""
        return any(
            one.error is None or one.error > self.tolerance(step, number)
            for number, one in found.items()
        )


def _name(path: Any, role: str) -> str:
    """What a leaf is called: by its place in the result, a gradient by its name."""
    return path[0].key if role == "gradient" else f"out{jax.tree_util.keystr(path)}"


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


def _finite(value: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(value.dtype, np.inexact):
        return np.ones(value.shape, bool)
    return np.isfinite(value)


def _largest(value: np.ndarray) -> float:
    sizes = np.abs(value.astype(_wide(value.dtype)))
    return float(np.max(sizes, initial=0.0, where=_finite(value)))


def _change(value: np.ndarray, start: Any, largest: float) -> float:
    """How far the steps have moved a leaf of the state."""
    first = on_host(start) if hasattr(start, "dtype") else np.asarray(start)
    if first.shape != value.shape:
        return largest
    return difference(value, first.astype(value.dtype)).error or 0.0
