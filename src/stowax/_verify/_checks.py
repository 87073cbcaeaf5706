"""Errors of `checkify` among a step's results, as they compare from trace to trace."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp


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
    is_error = functools.partial(_is_error, checkify.Error)
    return jax.tree.map(
        lambda x: _arrays(x) if is_error(x) else x, out, is_leaf=is_error
    )


def _is_error(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def _arrays(error: Any) -> tuple[Any, ...]:
    numbers = {id(code) for code in error._code.values()}
    return tuple(
        jnp.zeros_like(leaf) if id(leaf) in numbers else leaf
        for leaf in jax.tree.leaves(error)
    )
