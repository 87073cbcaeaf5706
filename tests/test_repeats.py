"""The repeating block of unrolled models is found, and wired right.

Every model that is rolled here is also run: the flat jaxpr and the rolled one, both
evaluated equation by equation, agree to the bit (`rolled.check`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolled import (
    WIDTH,
    X,
    attention,
    check,
    dense_stack,
    flat,
    layer,
    matrix,
    norm,
    run_rolled,
    weights,
)
from stowax._jaxprs import _periods
from stowax._jaxprs._repeats import find_repeats


@pytest.mark.parametrize("count", [2, 3, 12])
def test_transformer_loop_is_one_stack_of_single_layers(count):
    def model(x, layers):
        for p in layers:
            x = layer(x, p)
        return norm(x, layers[0]["scale"]).sum()

    (repeat,) = check(model, X, [weights(i) for i in range(count)])
    assert repeat.count == count
    # only the residual stream goes from layer to layer, and only weights are per layer
    assert [c.place.equation for c in repeat.carry] == [len(repeat.blocks[0]) - 1]
    assert len(repeat.per_layer) == len(weights(0))
    assert repeat.constants == ()
    assert repeat.outputs == ()


def test_two_equal_products_in_a_large_program_are_no_stack(monkeypatch):
    def model(x, w, big):
        return jnp.tanh(x @ w @ w) @ big

    big = matrix(1, WIDTH, 50 * 2 * WIDTH)
    assert check(model, X, matrix(0), big) == ()
    monkeypatch.setattr(_periods, "_LEAST_SHARE", 0)
    assert check(model, X, matrix(0), big)[0].count == 2


@pytest.fixture
def lax_promotion():
    """Libraries promote as JAX does by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _is_shape(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


@pytest.mark.usefixtures("lax_promotion")
def test_equinox_loop():
    equinox = pytest.importorskip("equinox")

    class Block(equinox.Module):
        attention: equinox.nn.MultiheadAttention
        mlp: equinox.nn.MLP
        norm: equinox.nn.LayerNorm

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.attention = equinox.nn.MultiheadAttention(2, WIDTH, key=one)
            self.mlp = equinox.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=two)
            self.norm = equinox.nn.LayerNorm(WIDTH)

        def __call__(self, x):
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h)
            return x + jax.vmap(self.mlp)(x)

    def make():
        return [Block(k) for k in jax.random.split(jax.random.key(0), 5)]

    shapes, static = equinox.partition(equinox.filter_eval_shape(make), _is_shape)
    fill = np.random.default_rng(0).normal
    arrays = jax.tree.map(lambda s: jnp.asarray(fill(size=s.shape), s.dtype), shapes)

    def model(x, arrays):
        for block in equinox.combine(arrays, static):
            x = block(x)
        return x.sum()

    (repeat,) = check(model, X, arrays)
    assert repeat.count == 5
    assert len(repeat.carry) == 1
    assert len(repeat.per_layer) == len(jax.tree.leaves(arrays)) // 5


@pytest.mark.slow
@pytest.mark.usefixtures("lax_promotion")
def test_flax_nnx_loop_with_dropout():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(6)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum()

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def model(x, state):
        return nnx.merge(graph, state)(x)

    (repeat,) = check(model, X, state)
    assert repeat.count == 6


def test_alternating_layers_are_blocks_of_two():
    def model(x, ws):
        for k, w in enumerate(ws):
            x = x + (jnp.sin(x @ w) if k % 2 else jnp.tanh(x @ w) * 2)
        return x

    (repeat,) = check(model, X, [matrix(i) for i in range(8)])
    assert repeat.count == 4


def test_every_fourth_layer_different_is_blocks_of_four():
    def model(x, ws):
        for k, w in enumerate(ws):
            x = x + (jnp.sin(x @ w) * 3 if k % 4 == 3 else jnp.tanh(x @ w))
        return x

    (repeat,) = check(model, X, [matrix(i) for i in range(12)])
    assert repeat.count == 3


@pytest.mark.slow
def test_encoder_and_decoder_are_two_stacks():
    def model(x, y, encoder, decoder):
        for p in encoder:
            x = layer(x, p)
        for p in decoder:
            y = layer(y + attention(y, x, p), p)
        return y.sum()

    first, second = check(
        model,
        X,
        matrix(1001, 3),
        [weights(i) for i in range(4)],
        [weights(i) for i in range(4, 9)],
    )
    assert (first.count, second.count) == (4, 5)
    # what the encoder hands over is read by every decoder layer alike
    assert second.constants == (first.carry[0].final,)


def test_different_first_and_last_layers_are_left_outside():
    def model(x, ws):
        x = jnp.sin(x @ ws[0])
        x = dense_stack(x, ws[1:-1])
        return jnp.exp(x @ ws[-1])

    (repeat,) = check(model, X, [matrix(i) for i in range(6)])
    assert repeat.count == 4


def test_numbers_that_differ_per_layer_are_handed_in():
    def model(x, ws):
        for k, w in enumerate(ws):
            x = x + jnp.tanh(x @ w) * (0.9**k) + 1.5
        return x

    (repeat,) = check(model, X, [matrix(i) for i in range(4)])
    literals = [atoms for atoms in repeat.per_layer if hasattr(atoms[0], "val")]
    (values,) = [[float(a.val) for a in atoms] for atoms in literals]
    np.testing.assert_allclose(values, [0.9**k for k in range(4)], rtol=1e-6)
    assert repeat.count == 4


def test_tied_weights_and_alternating_masks():
    def model(x, ws, tied, masks):
        for k, w in enumerate(ws):
            x = x + (masks[k % 2] * jnp.tanh(x @ w)) @ tied
        return x

    masks = [jnp.ones((4, WIDTH)), jnp.zeros((4, WIDTH))]
    (repeat,) = check(model, X, [matrix(i) for i in range(6)], matrix(9), masks)
    assert repeat.count == 6
    assert len(repeat.constants) == 1
    shared = [atoms for atoms in repeat.per_layer if len(set(map(id, atoms))) == 2]
    ((one, two, *rest),) = shared
    assert rest == [one, two, one, two]


def test_auxiliary_losses_summed_in_the_loop_are_carried():
    def model(x, ws):
        auxiliary = jnp.float32(0)
        for w in ws:
            h = jnp.tanh(x @ w)
            auxiliary = auxiliary + jnp.mean(h * h)
            x = x + h
        return x.sum() + auxiliary

    (repeat,) = check(model, X, [matrix(i) for i in range(5)])
    assert repeat.count == 5
    assert len(repeat.carry) == 2


def test_outputs_of_single_blocks():
    def model(x, ws):
        outs = []
        for w in ws:
            h = jnp.tanh(x @ w)
            outs.append(h)
            x = x + h
        return x, outs[0], outs[2].sum()

    (repeat,) = check(model, X, [matrix(i) for i in range(4)])
    assert repeat.count == 4
    (output,) = repeat.outputs
    assert [v is not None for v in output.variables] == [True, False, True, False]


def test_skips_from_one_stack_into_another():
    def model(x, down, up):
        skips = []
        for w in down:
            x = jnp.tanh(x @ w)
            skips.append(x)
        for w in up:
            x = jnp.sin((x + skips.pop()) @ w)
        return x

    first, second = check(
        model, X, [matrix(i) for i in range(4)], [matrix(i) for i in range(4, 8)]
    )
    assert (first.count, second.count) == (4, 4)
    (output,) = [o for o in first.outputs if all(o.variables)]
    assert tuple(reversed(output.variables)) in second.per_layer


def test_rows_of_stacked_weights_are_taken_outside_of_the_blocks():
    def model(x, stacked):
        for k in range(5):
            x = x + jnp.tanh(x @ stacked[k])
        return x

    stacked = jnp.stack([matrix(i) for i in range(5)])
    (repeat,) = check(model, X, stacked)
    assert repeat.count == 5
    assert [len(positions) for positions in repeat.apart] == [1] * 5


def test_equal_slices_of_each_layer_stay_in_its_block():
    def model(x, ws):
        for w in ws:
            x = x + jnp.tanh(x @ w[0] + w[1, :1])
        return x

    (repeat,) = check(model, X, [jnp.stack([matrix(i)] * 2) for i in range(4)])
    assert repeat.count == 4
    assert repeat.apart == ((),) * 4


@pytest.mark.parametrize("chained", [False, True])
def test_random_keys(chained):
    def model(x, ws, key):
        for k, w in enumerate(ws):
            if chained:
                key, mine = jax.random.split(key)
            else:
                mine = jax.random.fold_in(key, k)
            keep = jax.random.bernoulli(mine, 0.9, x.shape)
            x = x + jnp.where(keep, jnp.tanh(x @ w), 0)
        return x

    (repeat,) = check(model, X, [matrix(i) for i in range(4)], jax.random.key(0))
    assert repeat.count == 4
    assert len(repeat.carry) == 1 + chained


def test_keys_split_before_the_loop():
    def model(x, ws, key):
        for w, mine in zip(ws, jax.random.split(key, len(ws)), strict=True):
            x = x + jnp.tanh(x @ w) * jax.random.normal(mine, x.shape)
        return x

    (repeat,) = check(model, X, [matrix(i) for i in range(4)], jax.random.key(0))
    assert repeat.count == 4


def test_a_scan_inside_each_layer_stays_one_equation():
    def model(x, ws):
        for w in ws:
            x, _ = jax.lax.scan(lambda c, _, w=w: (jnp.tanh(c @ w), None), x, None, 3)
        return x

    (repeat,) = check(model, X, [matrix(i) for i in range(4)])
    assert repeat.count == 4


def test_many_blocks_are_many_blocks():
    # As many equal products as this have more distances than can be tried.
    def model(x, ws):
        return sum(jnp.tanh(x @ w) for w in ws)

    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 1000
    (repeat,) = find_repeats(flat(model, X, ws))
    assert repeat.count >= 999


def test_half_precision_casts_belong_to_the_blocks():
    def model(x, ws):
        for w in ws:
            x = x + jnp.tanh(x @ w.astype(jnp.bfloat16))
        return x

    (repeat,) = check(model, X.astype(jnp.bfloat16), [matrix(i) for i in range(4)])
    assert repeat.count == 4
    assert len(repeat.blocks[0]) == 4
    (weight,) = repeat.per_layer
    assert {str(a.aval.dtype) for a in weight} == {"float32"}
    (carry,) = repeat.carry
    assert carry.final.aval.dtype == jnp.bfloat16


def test_a_value_read_two_layers_later_doubles_the_block():
    def model(x, y, ws):
        for w in ws:
            x, y = y + jnp.tanh(x @ w), x
        # written out, the layer reads the results of the last two
        return x

    (repeat,) = check(model, X, X * 2, [matrix(i) for i in range(6)])
    assert repeat.count == 3
    assert len(repeat.carry) == 2


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit])
@pytest.mark.parametrize("rule", [product, lambda x, w: jax.nn.relu(x @ w)])
def test_layers_that_are_functions_of_their_own(around, rule):
    """A rule of a derivative holds the trace that it was met in: each layer has one."""

    def model(x, ws):
        for w in ws:
            x = around(lambda x, w: x + rule(x, w))(x, w)
        return x

    (repeat,) = check(model, X, [matrix(i) for i in range(4)])
    assert repeat.count == 4


def test_derivatives_survive_rolling():
    def model(x, layers):
        for p in layers:
            x = layer(x, p)
        return x.sum()

    args = (X, [weights(i) for i in range(3)])
    jaxpr = flat(model, *args)
    repeats = find_repeats(jaxpr)
    leaves, tree = jax.tree.flatten(args)
    want = jax.tree.leaves(jax.jit(jax.grad(model, argnums=(0, 1)))(*args))
    rolled = jax.grad(lambda leaves: run_rolled(jaxpr, repeats, leaves)[0])
    have = jax.jit(rolled)(leaves)
    assert tree == jax.tree.structure(args)
    for w, h in zip(want, have, strict=True):
        np.testing.assert_allclose(w, h, rtol=1e-4, atol=1e-5)
