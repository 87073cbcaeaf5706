"""Rules that may be no derivatives, in gradients that `jax.jvp` differentiates.

Products with the Hessian are taken in the other order under a plan. That is right where
second derivatives are symmetric, and a rule of the user's need not have such.
"""

import jax
import jax.numpy as jnp
import pytest

from layered import WEIGHTS, X, run_layers
from stowax._records._stages import Options
from stowax._step._trace import trace_step


@jax.custom_jvp
def scaled(x):
    return x * jnp.sum(x)


# A rule of the user's for a function of JAX's.
sinc, silu = jax.custom_jvp(jnp.sinc), jax.custom_jvp(jax.nn.silu)
scaled.defjvp(lambda x, t: (scaled(x[0]), t[0] * jnp.sum(x[0])))
sinc.defjvp(lambda x, t: (sinc(x[0]), t[0] * jnp.sum(x[0])))
silu.defjvps(lambda t, _, x: t * jnp.sum(x))


def nearly_root(x):
    """The rule holds at the root, and this is one step from the guess."""
    step = lambda f, y: y - 0.5 * f(y)
    linear = lambda f, y: y / f(jnp.ones_like(y))
    return jax.lax.custom_root(lambda y: y - jnp.tanh(y / 2 + x), x, step, linear)


def left(function):
    def loss(weights, x):
        return jnp.mean(run_layers(lambda x, p: function(x @ p["w"]), x, weights))

    def step(weights, x):
        return jax.jvp(lambda w: jax.grad(loss)(w, x), (weights,), (weights,))

    return trace_step(step, (WEIGHTS, X), Options()).recording.left


FORWARDS = "the gradient is differentiated forwards (by jax.jvp), and a "
JVP = "jax.custom_jvp inside of it may have a rule that is no derivative"
VJP = "jax.custom_vjp inside of it has a rule for reverse alone"


@pytest.mark.parametrize("function", [scaled, sinc, silu])
def test_a_rule_of_the_users_runs_as_it_is_written(function):
    assert left(function) == (FORWARDS + JVP,)


def test_a_root_that_was_not_found_has_no_derivative():
    (why,) = left(nearly_root)
    assert why in {FORWARDS + JVP, FORWARDS + VJP}  # the latter on JAX 0.12


@pytest.mark.parametrize("function", [jax.nn.relu, jax.nn.relu6, jnp.sinc, jax.nn.silu])
def test_rules_of_jaxs_own_are_derivatives(function):
    assert left(function) == ()


def test_what_does_not_move_beside_what_does_is_not_multiplied_by_infinity():
    """JAX knows of the tangent that is zero, so `0 * inf` is nowhere."""

    def step(weights, x):
        def loss(bias, x):
            return jnp.mean(run_layers(layer, x * (1 + bias**1.5), weights))

        layer = lambda x, p: jnp.tanh(x @ p["w"])
        bias = jnp.zeros(x.shape[-1])[None]
        grads = jax.grad(loss, argnums=(0, 1))
        return jax.jvp(lambda x: grads(bias, x), (x,), (x,))

    (why,) = trace_step(step, (WEIGHTS, X), Options()).recording.left
    assert why == FORWARDS.removesuffix("a ") + "not all that it is by moves"
