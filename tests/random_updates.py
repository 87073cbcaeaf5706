"""Hand-written element-wise optimizers at random, for the tests of `_update_*`.

A recipe is a list of small operations over values: the leaves of the state, one
gradient for each leaf, and what earlier operations made. Its results become the leaves'
new values, in any order, so old and new state are read around norms, one leaf becomes
another one, gradients are delayed, averages kept. All numbers stay near one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp

SHAPE = (32, 32)
"""Square: rows taken for columns give other numbers, and no error."""
_ONE = ("decay", "tanh", "sign", "sorted", "rows")
_TWO = ("mean", "product", "normed", "clipped", "guarded", "chosen", "finite", "spread")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """`operations` has names and two operands each, `results` the leaves' new values.

    Operands and results are places in the list of all values: leaves, gradients, then
    what the operations made. `returned` are values that the step returns besides.
    """

    leaves: int
    operations: tuple[tuple[str, int, int], ...]
    results: tuple[int, ...]
    returned: tuple[int, ...]

    def step(self, params: Any, state: Sequence[Any], batch: Sequence[Any]) -> Any:
        """The step as users write it, with everything on the device."""
        values = [*state, *batch]
        for name, first, second in self.operations:
            values.append(operation(name, values[first], values[second]))
        returned = [values[k] for k in self.returned]
        norms = sum((jnp.sum(v) for v in returned), jnp.float32(0))
        return params, [values[k] for k in self.results], (norms, returned)


def norm(a: Any) -> Any:
    return jnp.sqrt(jnp.mean(a * a))


def operation(name: str, a: Any, b: Any) -> Any:
    """One of `_ONE` or `_TWO`; `b` is not read by the former."""
    if name == "decay":
        return 0.9 * a
    if name == "tanh":
        return jnp.tanh(a)
    if name == "sign":
        return jnp.sign(a)
    if name == "sorted":
        return jnp.sort(a, axis=0)
    if name == "rows":
        return a / (1 + jnp.exp(-jnp.mean(a, axis=0)))
    if name == "mean":
        return 0.75 * a + 0.25 * b
    if name == "product":
        return jnp.tanh(a * b)
    if name == "normed":
        return a / (0.5 + norm(b))
    if name == "clipped":
        return a * jnp.minimum(1.0, 1.0 / (0.1 + jnp.max(jnp.abs(b))))
    if name == "guarded":
        return jnp.where(norm(b) < 0.6, a, 0.5 * b)
    if name == "chosen":
        return jax.lax.cond(norm(b) < 0.6, lambda: 0.5 * a, lambda: a - 0.5 * b)
    if name == "finite":
        return jax.lax.cond(jnp.all(jnp.isfinite(b)), lambda: a + 0.1 * b, lambda: a)
    assert name == "spread"
    return a * jnp.tanh(b[:, :1])


@st.composite
def recipes(draw: Any) -> Recipe:
    """Recipes over one to four leaves."""
    leaves = draw(st.integers(1, 4))
    names = st.sampled_from((*_ONE, *_TWO, *_TWO))
    operations = []
    for made in range(draw(st.integers(1, 7))):
        known = st.integers(0, 2 * leaves + made - 1)
        operations.append((draw(names), draw(known), draw(known)))
    every = st.integers(0, 2 * leaves + len(operations) - 1)
    made = st.integers(2 * leaves, 2 * leaves + len(operations) - 1)
    results = st.one_of(every, made, made)
    return Recipe(
        leaves=leaves,
        operations=tuple(operations),
        results=tuple(draw(results) for _ in range(leaves)),
        returned=tuple(draw(st.lists(every, max_size=1))),
    )


def arrays(count: int, seed: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(seed), count)
    return [jax.random.normal(key, SHAPE) for key in keys]
