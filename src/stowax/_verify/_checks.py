"""Errors of `checkify` among a step's results, as they compare from trace to trace."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax


def comparable(out: Any) -> Any:
    """A step's results, each `checkify.Error` as the tuple of its arrays.

    An error's tree holds tracebacks and the numbers of checks, which JAX gives anew
    when it traces a step: no two traces return the same tree. What tells them apart
    goes, the arrays stay; those of these numbers are zeros.

    >>> from jax.experimental import checkify
    >>> error, _ = checkify.checkify(lambda x: checkify.check(x > 0, "no"))(1.0)
    >>> [leaf.dtype.name for leaf in comparable(error)]
    ['bool', 'int32']
    """
    checkify = sys.modules.get("jax.experimental.checkify")
    if checkify is None:
        return out
    is_error = lambda x: isinstance(x, checkify.Error)
    arrays = lambda x: _arrays(x) if is_error(x) else x
    return jax.tree.map(arrays, out, is_leaf=is_error)


def _arrays(error: Any) -> tuple[Any, ...]:
    numbers = {id(number) for number in _jax.numbers_of_checks(error)}
    return tuple(
        jnp.zeros_like(leaf) if id(leaf) in numbers else leaf
        for leaf in jax.tree.leaves(error)
    )
