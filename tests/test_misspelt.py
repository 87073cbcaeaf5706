"""An option that is misspelt in Python: the nearest one is named."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from stowax._errors import ArgumentError, CallError


def step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


ARGS = jnp.ones((4, 4)), jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("call", "name", "near"),
    [
        (lambda: stowax.plan(step, *ARGS, budgt="1GiB"), "budgt", "budget"),
        (lambda: stowax.plan(step, budgt="1GiB"), "budgt", "budget"),
        (lambda: stowax.plan(step, x=ARGS[1], targt="cpu"), "targt", "target"),
        (lambda: stowax.plans(step, *ARGS, budgets=(1,), pinn={}), "pinn", "pin"),
        (lambda: stowax.jit(step, buget="1GiB"), "buget", "budget"),
        (lambda: stowax.jit(buget="1GiB"), "buget", "budget"),
        (lambda: stowax.jit(step, donate_argnum=0), "donate_argnum", "donate_argnums"),
        (lambda: stowax.jit(step, in_sharding=None), "in_sharding", "in_shardings"),
        (lambda: stowax.inspect(jax.jit(step), *ARGS, targt="cpu"), "targt", "target"),
        (lambda: stowax.verify(step, *ARGS, stepps=2), "stepps", "steps"),
        (lambda: stowax.fit(step, budgt="1GiB"), "budgt", "budget"),
        (lambda: stowax.audit(alow=()), "alow", "allow"),
        (lambda: stowax.measure(step, *ARGS, stps=2), "stps", "steps"),
        (
            lambda: stowax.load_plan("x", compiler_option={}),
            "compiler_option",
            "compiler_options",
        ),
    ],
)
def test_the_nearest_option_is_named(call, name, near):
    with pytest.raises(CallError, match=rf"^{name}: got .*Did you mean {near}=\? "):
        call()


def test_a_block_names_it_too_and_what_is_like_nothing_is_not_guessed_at():
    with (
        pytest.raises(ArgumentError, match=r"^buget: .*Did you mean budget=\?"),
        stowax.planning(buget="1GiB"),
    ):
        pass
    with pytest.raises(CallError, match=r"^qqq: got ") as caught:
        stowax.plan(step, *ARGS, qqq=1)
    assert "Did you mean" not in str(caught.value)
