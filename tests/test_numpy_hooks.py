"""NumPy functions on arrays of JAX's do under an audit what they do without."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._jax_hooks import Array, watch
from stowax._watcher import Watcher

pytestmark = pytest.mark.usefixtures("usual_promotion")

X = jnp.arange(4.0) + 1
A = np.arange(4.0, dtype=np.float32)


class Doubled:
    """A third library's type, which answers itself."""

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return "mine"

    def __array_function__(self, function, types, args, kwargs):
        return "mine"


MINE: Any = Doubled()


def added_in_place():
    a = A.copy()
    a += X
    return a


def added_to():
    out = A.copy()
    np.add(A, X, out=out)
    return out


# What is done, and how many reads of a device it is.
CASES = [
    (lambda: np.log(X), 1),
    (lambda: np.multiply(A, X), 1),
    (lambda: np.add(X, X), 1),
    (lambda: np.add.reduce(X), 1),
    (lambda: np.add.outer(X, A), 1),
    (lambda: np.isfinite(X[0]), 1),
    (added_to, 1),
    (lambda: np.linalg.norm(X), 1),
    (lambda: np.stack([X, X]), 1),
    (lambda: np.allclose(X, A), 1),
    (lambda: np.percentile(X, 50), 1),
    (lambda: np.where(X > 2, A, X), 1),
    (lambda: np.float32(2) * X, 0),
    (lambda: A * X, 0),
    (lambda: A @ X, 0),
    (lambda: A < X, 0),
    (lambda: A == X, 0),
    (lambda: A**X, 0),
    (added_in_place, 0),
    (lambda: X * A, 0),
    (lambda: sum([A, X], start=A), 0),
    (lambda: functools.reduce(operator.mul, [A, X]), 0),
    (lambda: np.mean(X), 0),
    (lambda: np.shape(X), 0),
    (lambda: np.zeros_like(X), 0),
    (lambda: np.add(X, MINE), 0),
    (lambda: np.concatenate([X, MINE]), 0),
]


class Reads(Watcher):
    def __init__(self):
        self.seen = 0

    def was_read(self, how, value, seconds, result):
        self.seen += 1


@pytest.mark.parametrize(("does", "reads"), CASES)
def test_the_result_is_numpys_and_reads_are_told(does, reads):
    plain = does()
    watcher = Reads()
    with watch(watcher):
        watched = does()
    assert type(watched) is type(plain)
    if isinstance(plain, np.ndarray | np.generic | jax.Array):
        assert watched.dtype == plain.dtype
        np.testing.assert_array_equal(np.asarray(watched), np.asarray(plain))
    else:
        assert watched == plain
    assert watcher.seen == reads


def test_nothing_is_left_behind_and_errors_are_numpys():
    with stowax.audit():
        assert "__array_ufunc__" in vars(Array)
        with pytest.raises(TypeError):
            np.bitwise_and(X, X)
    assert not {"__array_ufunc__", "__array_function__"} & set(vars(Array))


def test_strict_refuses_them():
    with pytest.raises(stowax.StowaxError, match="is read"), stowax.strict():
        np.log(X)
    with stowax.strict():
        np.mean(X)
