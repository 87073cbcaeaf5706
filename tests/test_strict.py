"""Implicit transfers under `stowax.strict` are errors that name the line; others pass.

All of it on the CPU, where JAX's own transfer guard lets every read pass.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._errors import TransferError

step = jax.jit(lambda state, rate: {"w": state["w"] * rate})
scaled = jax.jit(lambda w, times: w * jnp.float32(times), static_argnames="times")
STATE = {"w": jnp.ones(4, jnp.float32)}
W = STATE["w"]
HALF = jnp.float32(0.5)


@pytest.mark.parametrize(
    ("offends", "said"),
    [
        (lambda: step(STATE, 0.5), r"rate, an argument of <lambda>, is a float"),
        (lambda: step(STATE, rate=np.float32(1)), r"rate, .* is a float32"),
        (
            lambda: step({"w": np.ones(4, np.float32)}, HALF),
            r"state\['w'\], .* is a NumPy array of float32\[4\]",
        ),
        (lambda: W + np.ones(4, np.float32), r"is a NumPy array of float32\[4\]"),
        (lambda: float(HALF), r"an array of 4 B is read .* jax.device_get"),
        (lambda: np.asarray(W), r"an array of 16 B is read"),
        (lambda: HALF.item(), r"is read"),
        (lambda: f"{HALF:.1f}", r"is read"),
        (lambda: 1 if W[0] > 0 else 2, r"is read"),
        (lambda: W.tolist(), r"is read"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_an_implicit_transfer_names_its_line(offends, said, warm):
    if warm:
        offends()
    with pytest.raises(RuntimeError, match=said) as caught, stowax.strict():
        offends()
    error = caught.value
    assert isinstance(error, TransferError)
    assert (error.file, error.line) == (__file__, offends.__code__.co_firstlineno)
    assert str(error).startswith(f"{__file__}:{error.line}: ")


@pytest.mark.parametrize("warm", [False, True])
def test_what_nobody_calls_a_transfer_passes(warm):
    """JAX's own guard refuses most of these."""

    def explicit():
        placed = jax.device_put({"w": np.ones(4, np.float32)})
        step(placed, HALF)
        jax.device_get(step(jax.device_put(STATE), jnp.asarray(np.float32(2))))
        scaled(W, times=3)
        _ = W + 1, W[0], jnp.zeros(3), jnp.arange(4), W.at[0].set(1.0)
        _ = jax.random.normal(jax.random.key(0), (3,)), jnp.where(W > 0, W, 0.0)
        jax.jit(lambda x: x + np.ones(4, np.float32))(W)  # a constant of the program
        jax.block_until_ready(W)
        for batch in stowax.prefetch([np.ones(4, np.float32)]):
            step({"w": batch}, HALF)

    if warm:
        explicit()
    with stowax.strict():
        explicit()


def test_it_ends_with_the_context_and_holds_for_one_thread():
    done = []

    def other():
        done.append(float(step(STATE, 0.5)["w"][0]))

    with stowax.strict():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(stowax.StowaxError), stowax.strict():
            float(HALF)
        with pytest.raises(stowax.StowaxError):
            float(HALF)
    assert done == [0.5]
    assert float(step(STATE, 0.5)["w"][0]) == 0.5
    assert np.asarray.__module__ == "numpy"
    assert type(W).item.__module__ != "stowax._jax_hooks"


def test_jaxs_own_check_for_nans_stays_and_hides_nothing():
    """JAX clears the hook of a thread whenever it leaves a context without checks."""
    divided = jax.jit(lambda x, y: x / y)
    zero = jnp.float32(0)
    divided(zero, HALF), step(STATE, 0.5)
    with stowax.strict():
        with jax.debug_nans(False):
            pass
        with pytest.raises(stowax.StowaxError):
            step(STATE, 0.5)
    with jax.debug_nans(True), stowax.strict(), pytest.raises(FloatingPointError):
        divided(zero, zero)
    with stowax.strict(), jax.debug_nans(True), pytest.raises(FloatingPointError):
        divided(zero, zero)
    assert jnp.isnan(divided(zero, zero))
