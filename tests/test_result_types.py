"""A planned step's results have the types of the step's own, weak ones too.

What a weakly typed number meets next decides the dtype: `bfloat16 * weak float32` is
`bfloat16`, and `bfloat16 * float32` is `float32`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH = 4, 48
jit = functools.partial(stowax.jit, target="h200", progress=False)
MOVING = {"pin": {"optimizer state": "offload"}, "budget": "150%"}
COMPUTED_AGAIN = {"forbid": ("offload",), "budget": "80%"}


def loss_fn(params, x, scale):
    out, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)
    return (out.astype(jnp.bfloat16) * scale).astype(jnp.float32).mean()


def train_step(params, momentum, scale, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, scale)
    momentum = 0.9 * momentum + grads
    strong = jnp.asarray(scale, jnp.float32)
    return params - 0.1 * momentum, momentum, strong, loss, 2 * scale


def started():
    params = 0.2 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    return params, jnp.full(params.shape, 0.0), 1.7


def steps(step):
    params, momentum, scale = started()
    x = np.random.default_rng(0).normal(size=(64, WIDTH)).astype("float32")
    found = []
    for _ in range(3):
        params, momentum, scale, *rest = out = step(params, momentum, scale, x)
        found.append([(a.dtype, a.weak_type) for a in out])
    return found, float(rest[0])


@pytest.mark.slow
@pytest.mark.parametrize("wishes", [MOVING, COMPUTED_AGAIN])
def test_results_are_typed_as_the_steps_own(wishes):
    planned = jit(train_step, **wishes)
    types, loss = steps(planned)
    expected, last = steps(jax.jit(train_step))
    assert any(d.decision != "keep" for d in planned.plan.decisions)
    assert types == expected
    np.testing.assert_allclose(loss, last, rtol=1e-5)


@pytest.mark.slow
def test_a_result_that_is_weakly_typed_stays_so():
    (first, *_), _ = steps(jit(train_step, **MOVING))
    assert first[-1] == (jnp.float32, True)
