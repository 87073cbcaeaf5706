"""Whether two runs of a step are the same but for rounding.

What rounding does is seen, not guessed: the plain step runs again with its state moved
by as much as the narrowest floating type in it rounds. Where such runs part by more
than some tens of roundings, so may the planned one; where they are no longer alike (a
sort near a tie), later steps say nothing and are not compared.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .meshes import is_typed_key

_ROUNDINGS = 64
_NARROW_ROUNDINGS = 4  # a type of eight bits has few more
_SPREADS = 8
_PARTED = 0.03

_NARROW = {"f8_e4m3": 2.0**-3, "bf16": 2.0**-7, "f16": 2.0**-10, "f32": 2.0**-22}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first leaf that differs, and by how much beside what was allowed."""

    step: int
    leaf: str
    error: float
    allowed: float
    largest: float

    def __str__(self):
        return (
            f"step {self.step}, {self.leaf}: off by {self.error:.3g} where "
            f"{self.allowed:.3g} is rounding (largest {self.largest:.3g})"
        )


def rounding_of(jaxpr_text):
    """The relative rounding of the narrowest floating type in a printed jaxpr."""
    for name, size in _NARROW.items():
        if re.search(rf"\b{name}\w*\[", jaxpr_text):
            return size
    return 2.0**-50


def moved(tree, size, seed):
    """Every floating value moved up or down by `size` of itself."""
    random = np.random.default_rng(seed)

    def move(leaf):
        if not isinstance(leaf, jax.Array) or is_typed_key(leaf):
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        signs = random.choice([-1.0, 1.0], leaf.shape)
        values = np.asarray(leaf).astype(np.float64) * (1 + size * signs)
        values = values.astype(leaf.dtype)
        # Committed as it was: else the step is compiled once more.
        if leaf.committed:
            return jax.device_put(values, leaf.sharding)
        return jnp.asarray(values)

    return jax.tree.map(move, tree)


class Weak(np.ndarray):
    """An array that JAX types weakly: what it meets next decides its dtype."""


def on_host(tree):
    """Leaves as numpy arrays, keys as their numbers."""

    def get(leaf):
        got = np.asarray(jax.random.key_data(leaf) if is_typed_key(leaf) else leaf)
        return got.view(Weak) if getattr(leaf, "weak_type", False) else got

    return jax.tree.map(get, tree)


def _wide(a):
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)


def _gap(a, b):
    """The largest difference of two arrays; infinite where only one is finite."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return float(not np.array_equal(a, b)) * np.inf if a.size else 0.0
    a, b = _wide(a), _wide(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(a - b))
    gaps = np.where(np.isnan(gaps), np.inf, gaps)
    return float(np.max(gaps, initial=0.0))


def _largest(a):
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0
    finite = np.abs(_wide(a))
    return float(np.max(finite[np.isfinite(finite)], initial=0.0))


def _unlike(a, b):
    """Why two leaves cannot be compared; nothing if they can."""
    if a.shape != b.shape:
        return f"shape {b.shape} where it is {a.shape}"
    (mine, wanted) = (f"{'weak ' * isinstance(x, Weak)}{x.dtype}" for x in (b, a))
    return f"{mine} where it is {wanted}" if mine != wanted else ""


def difference(expected, got, variants):
    """`(difference, steps)`: the first one, and how many steps could be compared.

    **Arguments:** runs are lists of what each step returned, on the host; `variants`
    are runs of the plain step that differ by rounding.
    """
    for step, wanted in enumerate(expected):
        if jax.tree.structure(wanted) != jax.tree.structure(got[step]):
            return _structure(step), step
        parted = False
        leaves = jax.tree.leaves_with_path(wanted)
        others = [jax.tree.leaves(run[step]) for run in variants]
        overall = max((_largest(a) for _, a in leaves), default=0.0)
        for number, (path, a) in enumerate(leaves):
            name, b = jax.tree_util.keystr(path), jax.tree.leaves(got[step])[number]
            if why := _unlike(a, b):
                found = Difference(
                    step=step,
                    leaf=f"{name} ({why})",
                    error=np.inf,
                    allowed=0.0,
                    largest=0.0,
                )
                return found, step
            spread = max((_gap(a, run[number]) for run in others), default=0.0)
            allowed = _base(a, overall) + _SPREADS * spread
            error = _gap(a, b)
            if error > allowed:
                found = Difference(
                    step=step,
                    leaf=name,
                    error=error,
                    allowed=allowed,
                    largest=_largest(a),
                )
                return found, step
            parted |= spread > _PARTED * _largest(a) + _base(a, overall)
        if parted:
            return None, step + 1
    return None, len(expected)


def _structure(step):
    leaf = "the result has another structure"
    return Difference(step=step, leaf=leaf, error=np.inf, allowed=0.0, largest=0.0)


def _base(a: Any, overall: float) -> float:
    """What is rounding in any case: of the leaf's sums, and of what is zero but for
    rounding beside the largest leaf."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0
    unit = float(jnp.finfo(a.dtype).eps)
    if unit > 1e-4:
        return unit * _NARROW_ROUNDINGS * _largest(a)
    return unit * (_ROUNDINGS * _largest(a) + 8 * min(overall, 1.0))
