"""What looks like a stack and is none is left alone; what is rolled keeps every bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolled import WIDTH, X, check, flat, matrix
from stowax import _jax
from stowax._jaxprs._repeats import find_repeats


def needed(function, *args):
    return _jax.needed_part(flat(function, *args))


def test_no_repetition():
    def model(x, a, b, c):
        return jnp.sin(jnp.tanh(x @ a) @ b) @ c

    args = (X, matrix(0), matrix(1, WIDTH, 3), matrix(2, 3, 5))
    assert check(model, *args) == ()
    assert find_repeats(flat(lambda x: x, X)) == ()


def test_heads_side_by_side_are_no_chain():
    def model(x, ws):
        return jnp.concatenate([jnp.tanh(x @ w) * 2 for w in ws])

    assert check(model, X, [matrix(i) for i in range(6)]) == ()


def test_heads_joined_only_by_a_random_key_are_no_chain():
    def model(x, ws, key):
        heads = []
        for w in ws:
            key, mine = jax.random.split(key)
            heads.append(x @ w * jax.random.normal(mine, x.shape))
        return jnp.concatenate(heads)

    args = (X, [matrix(i) for i in range(4)], jax.random.key(0))
    assert check(model, *args) == ()


def test_blocks_that_read_all_earlier_blocks_are_no_chain():
    def model(x, ws):
        seen = [x]
        for w in ws:
            seen.append(jnp.tanh(seen[-1] @ w) * seen[len(seen) // 2])
        return seen[-1]

    ws = [matrix(i) for i in range(6)]
    assert all(r.count < 6 for r in check(model, X, ws))


def test_effects_are_refused():
    def model(x, ws):
        for w in ws:
            x = x + jnp.tanh(x @ w)
            jax.debug.print("{}", x[0, 0])
        return x

    jaxpr = flat(model, X, [matrix(i) for i in range(4)])
    assert find_repeats(jaxpr) == ()


def _scaled_gradient(scale):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        return x @ w, (x, w)

    def backward(saved, g):
        x, w = saved
        return scale * (g @ w.T), x.T @ g

    product.defvjp(forward, backward)
    return product


def _scaled_tangent(scale):
    @jax.custom_jvp
    def product(x, w):
        return x @ w

    @product.defjvp
    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return x @ w, scale * (dx @ w) + x @ dw

    return product


@pytest.mark.parametrize("read", [flat, needed], ids=["whole", "what is needed"])
@pytest.mark.parametrize("ruled", [_scaled_gradient, _scaled_tangent])
def test_rules_of_custom_derivatives_count(ruled, read):
    """Also of a program without what nobody reads: JAX wraps the rules that stay."""

    def model(x, ws, scales):
        for w, scale in zip(ws, scales, strict=True):
            x = x + ruled(scale)(x, w)
        jnp.sin(x)
        return x

    ws = [matrix(i) for i in range(4)]
    same = functools.partial(model, scales=[0.5] * 4)
    (repeat,) = find_repeats(read(same, X, ws))
    assert repeat.count == 4
    # the forward jaxprs are equal here too: only the other rules differ
    different = functools.partial(model, scales=[0.5, 0.25, 0.125, 0.75])
    assert find_repeats(read(different, X, ws)) == ()


def test_constants_inside_of_calls_count():
    tables = [np.arange(WIDTH, dtype=np.float32) * k for k in range(4)]

    def model(x, ws):
        for k, w in enumerate(ws):
            x, _ = jax.lax.scan(
                lambda c, _, w=w, k=k: (jnp.tanh(c @ w) * tables[k][None], None),
                x,
                None,
                2,
            )
        return x

    check(model, X, [matrix(i) for i in range(4)])  # rolled or not: the same bits


# --- anything at all ------------------------------------------------------------------


@st.composite
def programs(draw):
    """A loop over layers with random equations, wiring, state and outside reads."""
    state, constants, own = draw(st.tuples(*[st.integers(1, 3)] * 3))
    given_count = state + constants + own
    operations = [
        (
            draw(st.sampled_from(["product", "add", "tanh", "number", "cut"])),
            draw(st.integers(0, given_count + 1 + k)),
            draw(st.integers(0, given_count + 1 + k)),
        )
        for k in range(draw(st.integers(1, 8)))
    ]
    reach = given_count + 2 + len(operations)
    following = [draw(st.integers(0, reach - 1)) for _ in range(state - 1)]
    count = draw(st.integers(2, 7))
    shared = draw(st.booleans())
    peeks = draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, reach - 1)))
    )
    return state, constants, own, operations, following, count, shared, peeks


def _run_program(program, initial, constants, layers):
    _, _, _, operations, following, _, shared, peeks = program
    state = list(initial)
    history = []
    for k, own in enumerate(layers):
        own = layers[k % 2] if shared else own
        values = [*state, *constants, *own]
        values.append(state[0] @ own[0])
        values.append(jnp.tanh(values[-1]) + state[0])
        first = values[-1]
        for kind, a, b in operations:
            x, y = values[a], values[b]
            if kind == "product":
                values.append(x @ y)
            elif kind == "add":
                values.append(x + y)
            elif kind == "tanh":
                values.append(jnp.tanh(x))
            elif kind == "number":
                values.append(x * (0.5 + k))
            else:
                outside = [*constants, *own][b % (len(constants) + len(own))]
                values.append(x - outside[k % 2 : k % 2 + 1])
        history.append(values)
        state = [values[-1] * 0.5 + first, *(values[i] for i in following)]
    return [*state, *(history[k][i] for k, i in peeks)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(programs())
def test_rolling_any_loop_changes_no_bit(program):
    state, constants, own, *_, count, _, _ = program
    numbers = iter(range(1000))
    args = (
        [_square(next(numbers)) for _ in range(state)],
        [_square(next(numbers)) for _ in range(constants)],
        [[_square(next(numbers)) for _ in range(own)] for _ in range(count)],
    )
    run = functools.partial(_run_program, program)
    repeats = check(run, *args)
    assert repeats  # the first product and the state that it feeds are always a chain


@functools.cache
def _square(seed):
    return matrix(seed, 3, 3)
