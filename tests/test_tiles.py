"""Losses over large vocabularies in blocks of tokens: where, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planned_steps import assert_close
from stowax._jaxprs._narrowed import narrowed
from stowax._jaxprs._tile_region import find_tiling
from stowax._jaxprs._tiles import all_tiled, tiled
from tiled_losses import (
    LOSSES,
    B,
    D,
    T,
    V,
    by_index,
    distilled,
    inputs,
    mixed_tokens,
    over_tokens,
    program_of,
    results,
    shifted,
)

pytestmark = [pytest.mark.usefixtures("usual_promotion")]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)],
    ids=["f32", "bf16"],
)
def test_losses_in_blocks_are_the_losses(loss, dtype):
    args = inputs(dtype)
    program = program_of(loss, *args)
    narrow = narrowed(program)
    found = find_tiling(narrow, 8)
    assert found.count == {shifted: 7, distilled: 7}.get(loss, 8)
    assert found.left == (3 if loss in (shifted, distilled) else 0)  # of 255 tokens
    blocks = tiled(narrow, found)
    largest = B * T * V // 2
    assert not any(
        aval.size > largest
        for node in blocks.nodes
        for aval in (blocks.avals[o] for o in node.outputs)
    )
    assert [str(v.aval) for v in blocks.jaxpr.jaxpr.outvars] == [
        str(v.aval) for v in program.jaxpr.jaxpr.outvars
    ]
    if dtype == jnp.float32:
        assert_close(results(blocks, args), results(program, args))
    else:  # sums of eight roundings
        got, expected = results(blocks, args), results(program, args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            a, b = (np.asarray(v, np.float32) for v in (a, b))
            np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())


@pytest.mark.parametrize("loss", [over_tokens, mixed_tokens], ids=lambda f: f.__name__)
def test_blocks_of_words_where_tokens_are_not_by_themselves(loss):
    args = inputs()
    program = program_of(loss, *args)
    found = find_tiling(program, 8)
    assert {number for number, _ in found.cut} == {1}
    assert_close(results(tiled(program, found), args), results(program, args))


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def contrastive(x, w):
    """SimCLR's: one array is both operands, cut in one and whole in the other."""
    z = x @ w
    z = z / jnp.sqrt((z * z).sum(-1, keepdims=True))
    return jax.nn.logsumexp(jnp.einsum("id,jd->ij", z, z), axis=1).mean()


def one_cast_for_both(x, w):
    y = (x @ w).astype(jnp.bfloat16)
    return jax.nn.logsumexp((y @ y.T).astype(jnp.float32), axis=1).mean()


def distances(x, w):
    y = x @ w
    sizes = (y * y).sum(-1)
    squares = sizes[:, None] + jnp.broadcast_to(sizes, (512, 512)) - 2 * y @ y.T
    return jnp.exp(-squares).mean()


def symmetric(x, w):
    products = x @ x.T
    return ((products + products.T) * (x @ w).sum()).mean()


def centred(x, w):
    products = (x @ w) @ x.T
    return jnp.abs(products - products.max(0)[:, None]).mean()


@pytest.mark.parametrize(
    "loss",
    [contrastive, one_cast_for_both, distances, symmetric, centred],
    ids=lambda loss: loss.__name__,
)
@pytest.mark.parametrize("width", [32, 192])
def test_values_that_are_needed_cut_and_whole(loss, width):
    args = normal(512, width), normal(width, width, seed=1) / width**0.5
    program = program_of(loss, *args)
    found = find_tiling(program, 8)
    blocks = tiled(program, found) if found else program
    if loss is one_cast_for_both:  # bfloat16, added up in float32
        grads = [results(p, args)[0] for p in (blocks, program)]
        for got, expected in zip(*map(jax.tree.leaves, grads), strict=True):
            assert jnp.abs(got - expected).max() < 0.01 * jnp.abs(expected).max()
    else:
        assert_close(results(blocks, args), results(program, args), roundings=4096)


def test_a_region_of_which_nothing_is_cut():
    def loss(x, head):
        places = jax.lax.broadcasted_iota(jnp.float32, (2048, D), 1)
        return jnp.tanh(places @ head).sum() + x.sum()

    args = normal(4, 4), normal(D, 4 * D)
    program = program_of(loss, *args)
    found = find_tiling(program, 8)
    assert not found.cut
    assert_close(results(tiled(program, found), args), results(program, args))


def test_two_heads_have_blocks_each():
    def two(x, head, labels, mask):
        ahead = jax.nn.log_softmax(jnp.tanh(x) @ head)
        return by_index(x, head, labels, mask) - ahead[..., 0].mean()

    args = inputs()
    program = program_of(two, *args)
    blocks = all_tiled(program, 8)
    loops = [n for n in blocks.nodes if n.equation.primitive.name == "scan"]
    assert len(loops) == 2
    assert_close(results(blocks, args), results(program, args))


def test_what_nothing_reads_is_no_hindrance():
    def loss(x, head, labels, mask):
        logits = x @ head
        mean = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        jnp.sort(logits.reshape(-1)) - mean  # a metric of which nothing came
        return mean

    args = inputs()
    program = program_of(loss, *args)
    found = find_tiling(program, 8)
    assert found.count == 8
    assert_close(results(tiled(program, found), args), results(program, args))


def test_long_chains_before_the_product():
    def loss(x, head, labels, mask):
        for k in range(1, 700):
            head = head * (1 + 1 / k) if k % 3 else jnp.sin(head)
        return by_index(x, head, labels, mask)

    x, head, labels, mask = inputs()
    assert find_tiling(program_of(loss, x, head, labels, mask), 8).count == 8


def test_empty_arrays_beside_the_product():
    def loss(x, head, labels, mask):
        logits = x @ head
        return jax.nn.logsumexp(logits, -1).mean(), logits[:, :, :0]

    args = inputs()
    program = program_of(loss, *args)
    found = find_tiling(program, 8)
    assert_close(results(tiled(program, found), args), results(program, args))


def test_axes_that_are_spread_by_type_stay_whole():
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    _, head, _, mask = inputs()
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.sharding.use_abstract_mesh(mesh):
        flat = jax.ShapeDtypeStruct((B * T, D), jnp.float32, sharding=spread)
        of_rows = jax.ShapeDtypeStruct((B * T,), jnp.int32, sharding=spread)
        program = program_of(by_index, flat, head, of_rows, mask)
    assert find_tiling(program, 8) is None


# --- what stays as it is --------------------------------------------------------------


def returns_logits(x, head, labels, mask):
    logits = x @ head
    return logits.mean(), logits


def printed(x, head, labels, mask):
    logits = x @ head
    jax.debug.print("{}", logits.max())
    return jax.nn.logsumexp(logits, -1).mean()


def narrow(x, head, labels, mask):
    return jax.nn.logsumexp(x @ head[:, :D], -1).mean()


def over_all(x, head, labels, mask):
    return jax.nn.logsumexp(x @ head)


@pytest.mark.parametrize(
    "loss",
    [returns_logits, over_all, printed, narrow],
    ids=lambda loss: loss.__name__,
)
def test_what_is_no_such_loss_is_left_alone(loss):
    assert find_tiling(program_of(loss, *inputs()), 8) is None


def test_few_rows_are_left_alone():
    x, head, labels, mask = inputs()
    args = x[:1, :64], head, labels[:1, :64], mask[:1, :64]
    assert find_tiling(program_of(by_index, *args), 8) is None


@pytest.mark.parametrize("loss", [by_index, shifted], ids=["all", "shifted"])
def test_batches_over_devices_are_cut_along_tokens(loss):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(auto,))
    args = inputs()
    with jax.sharding.use_abstract_mesh(mesh):
        program = narrowed(program_of(loss, *args))
    axes = {axis for _, axis in find_tiling(program, 8).cut}
    assert axes == {1}
