"""How far two right programs for one step may be apart: units, reductions, and a shake.

A planned step computes the same sums as the plain one, in programs that the compiler
fuses and adds up differently. Neither is exact. How far they may be apart has three
parts, and a leaf's tolerance is their sum:

- **Storing.** Each of k steps rounds what it gives back to the leaf's dtype, in both
  runs: 2 k u V, with u the unit roundoff of the dtype and V the largest element.
- **Adding up.** A sum of n terms in another order differs by λ √n u of its size, but
  with probability below 2 n exp(-λ²/2): Higham and Mary, "A New Approach to
  Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019.
  n is the longest reduction in the step, sums are kept in float32 at the least, and
  what is summed up is the leaf's *change*: 0.001 of rounding in a gradient moves
  a parameter by 0.001 of its update, however large the parameter. λ = 8 makes the
  probability 3e-14 n, and there are up to n such sums.
- **Conditioning.** The forward error is the backward error times the condition number
  (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM 2002, section
  1.6), and steps have bad ones: Adam divides by the root of what may be rounding noise,
  a key's bias in attention has no gradient but noise, errors grow from step to step.
  Nobody knows it, so it is measured: the *plain* step runs again from arguments that
  are one rounding away (`shaken`), and four times what that changes is tolerated, too.
  It is stochastic arithmetic in its plainest form (Parker, Pierce and Eggert, "Monte
  Carlo Arithmetic", Comput. Sci. Eng. 2(4), 2000): the shake also draws all later
  roundings anew. Of state the change counts: not that it began elsewhere.

What the elements of an array have in common is held to less, see `_bias`.

Nothing of it comes from the planned run, so a wrong plan cannot widen what it is
measured by. A rounding is that of the least precise dtype that the step computes in,
and of the machine's products: TPUs multiply float32 in bfloat16 passes by default, GPUs
in TensorFloat-32 (https://docs.jax.dev/en/latest/201/precision.html).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs._canonical import all_equations
from .._jaxprs._jaxpr import is_float

CONFIDENCE = 8.0
"""λ above."""

SHAKEN = 4.0
"""How much of what a shake changes is tolerated. A small GPT with Adam, ten steps on
eight CPU devices beside one, came to a fifth of what is tolerated, in float32 and in
bfloat16."""

SHAKES = 2
"""How many runs from arguments a rounding away; the largest change counts."""

MORE_SHAKES = 6
"""As many again before an array is called wrong: two may by chance agree closely."""

SINGLE = 2.0**-24
"""The unit roundoff of float32, in which sums are kept."""

# Unit roundoff of the factors of a float32 product, by platform: bfloat16 has 8 bits of
# significand, TensorFloat-32 has 11.
_PRODUCTS = {"tpu": 2.0**-8, "gpu": 2.0**-11}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How a step rounds: the coarsest unit it computes in, and its longest sum."""

    unit: float
    terms: float


def rounding_of(jaxpr: Any, platform: str) -> Rounding:
    """How the step with this jaxpr rounds on devices of `platform`.

    **Arguments:** `platform` is `"cpu"`, `"gpu"` or `"tpu"`.
    """
    unit, terms = 0.0, 1.0
    for equation in all_equations(jaxpr):
        name = equation.primitive.name
        for variable in equation.outvars:
            if is_float(variable.aval):
                unit = max(unit, unit_of(variable.aval.dtype))
        if name in ("dot_general", "conv_general_dilated"):
            if any(v.aval.dtype == jnp.float32 for v in equation.invars):
                default = equation.params["precision"] in (None, _DEFAULT, _DEFAULTS)
                unit = max(unit, _PRODUCTS.get(platform, 0.0) if default else 0.0)
            terms = max(terms, _contracted(equation))
        elif name.startswith(("reduce_", "cumsum", "cumlogsumexp", "scatter-add")):
            whole = max(v.aval.size for v in equation.invars if hasattr(v.aval, "size"))
            parts = max(1, min(v.aval.size for v in equation.outvars))
            terms = max(terms, whole / parts if name.startswith("reduce_") else whole)
    return Rounding(unit=unit or SINGLE, terms=terms)


_DEFAULT = jax.lax.Precision.DEFAULT
_DEFAULTS = (_DEFAULT, _DEFAULT)


def unit_of(dtype: Any) -> float:
    """The unit roundoff of a floating dtype, half the distance from 1 to the next."""
    return float(jnp.finfo(dtype).eps) / 2


def tolerance(
    rounding: Rounding,
    dtype: Any,
    *,
    steps: int,
    largest: float,
    change: float,
    shaken_by: float,
) -> float:
    """What a leaf may be off by after `steps` steps, see the module.

    **Arguments:** `largest` is the largest of its elements, `change` of what the steps
    added to it (all of it, for what is no state), `shaken_by` of what runs from
    arguments a rounding away changed in it. A dtype that is not floating has but the
    last part: counts must be equal unless a rounding changes them.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return SHAKEN * shaken_by
    unit = unit_of(dtype)
    summing = math.hypot(unit, math.sqrt(rounding.terms) * min(unit, SINGLE))
    stored = 2 * steps * unit * largest
    return stored + CONFIDENCE * summing * change + SHAKEN * shaken_by


def shaken(leaf: Any, rounding: Rounding, seed: int, number: int = 0) -> Any:
    """`leaf` with an eighth of its elements moved by a unit, up or down; floats alone.

    A rounding is off by up to half a unit, with a variance of a twelfth of one squared:
    this is a half more. The shape, the dtype and the sharding stay; what was put
    nowhere still is. Of two arguments, which have different `number`s, other elements
    move.
    """
    if not hasattr(leaf, "dtype") or not is_float(leaf):
        return leaf
    by = 2 * max(rounding.unit, unit_of(leaf.dtype))
    mixed = (seed * 0x9E3779B1 + number * 0x85EBCA77 + 1) & 0xFFFFFFFF
    moved = _shake(leaf, jnp.uint32(mixed), by)
    return jax.device_put(moved, leaf.sharding) if leaf.committed else moved


@jax.jit
def _shake(x: Any, seed: Any, by: Any) -> Any:
    # Which, and where to by a hash of the position (MurmurHash3's last mixing step, per
    # axis): no random bits to compile.
    mixed = jnp.full(x.shape, seed, jnp.uint32)
    for axis in range(x.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        mixed = (mixed ^ place) * jnp.uint32(0x9E3779B1) + jnp.uint32(axis + 1)
        mixed = (mixed ^ (mixed >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
        mixed = mixed ^ (mixed >> jnp.uint32(16))
    still = mixed & jnp.uint32(14) != jnp.uint32(0)
    up = mixed & jnp.uint32(1) == jnp.uint32(1)
    # Not `jnp.promote_types`: strict promotion refuses bfloat16 beside float32.
    wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
    by = by.astype(wide)
    moved = (x.astype(wide) * jnp.where(up, 1 + by, 1 - by)).astype(x.dtype)
    return jnp.where(still, x, moved)


def _contracted(equation: Any) -> float:
    """Terms in one element of a product.

    |left| · |right| / |out| is the square of it for matrices, and no less for the rest.
    """
    left, right = (max(1, v.aval.size) for v in equation.invars[:2])
    return math.sqrt(left * right / max(1, equation.outvars[0].aval.size))
