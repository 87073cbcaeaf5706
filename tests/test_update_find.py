"""What is found to be done element by element, and what is said of the rest."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stowax._update._blocks import BlockSize, Cut, cut_leaf
from updates import SMALL, streamed_step

pytestmark = pytest.mark.usefixtures("usual_promotion")

PARAMS = {"w": jnp.ones((64, 128))}
BATCH = jnp.ones((4, 64))


def gradient(params, batch):
    return jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)


def optimized(optimizer, params=None):
    params = params or PARAMS

    def step(params, state, batch):
        updates, state = optimizer.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return streamed_step(step, params, optimizer.init(params), BATCH)


def one_leaf(update, state=None):
    def step(params, state, batch):
        change, state = update(state, gradient(params, batch)["w"])
        return {"w": params["w"] - change}, state

    return streamed_step(step, PARAMS, jnp.ones((64, 128)), BATCH)


def test_moments_gradient_and_parameter_of_a_leaf_are_one_loop():
    found = optimized(optax.adam(1e-2))
    (group,) = found.groups
    (count, mu, nu) = found.leaves
    assert (mu.way, nu.way, count.way) == ("streamed", "streamed", "device")
    assert group.reads == (mu.input, nu.input)
    assert {leaf for _, leaf in group.writes} == {mu.input, nu.input}
    # the new parameter is written where the old one was, which is input 0
    ((_, place),) = group.gives
    assert place == 0


def test_the_clip_factor_is_outside_and_clipping_inside():
    plain = optimized(optax.adam(1e-2)).groups[0]
    clipped = optimized(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    (group,) = clipped.groups
    assert len(group.sliced) == len(plain.sliced) == 2  # gradient and parameter
    assert len(group.nodes) > len(plain.nodes)
    assert (
        len(group.others) == len(plain.others) + 2
    )  # the norm, and whether it is small


def test_leaves_alone_in_their_loops_go_two_by_two():
    """One buffer goes in or out; with two, blocks go both ways at once."""
    params = {k: jnp.ones((64, 128)) for k in "abc"} | {
        "w": PARAMS["w"].T.reshape(32, 256)
    }

    def step(params, state, batch):
        state = jax.tree.map(lambda s, p: 0.9 * s + p, state, params)
        return jax.tree.map(lambda p, s: p - s, params, state), state

    found = streamed_step(step, params, params, BATCH)
    assert sorted(len(group.reads) for group in found.groups) == [1, 1, 2]
    got, expected = found.compiled(params, params, BATCH), step(params, params, BATCH)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(new), np.asarray(old))


def test_what_stays_on_the_device_is_named_with_the_reason():
    params = {"w": PARAMS["w"], "odd": jnp.ones((13, 256)), "b": jnp.ones(4096)}

    def step(params, state, batch):
        return jax.tree.map(lambda p, s: p - s, params, state), state

    found = streamed_step(step, params, params, BATCH)
    reasons = {leaf.shape: (leaf.way, leaf.reason) for leaf in found.leaves}
    assert reasons[(4096,)] == ("device", "it has no rows to cut between")
    assert reasons[(13, 256)] == (
        "device",
        "its shape (13, 256) cannot be cut into small blocks",
    )
    assert reasons[(64, 128)] == ("streamed", "")
    assert optimized(optax.adam(1e-2)).leaves[0].reason == "it is small (4 B)"


def test_empty_leaves_stay_on_the_device():
    params = {"w": PARAMS["w"], "none": jnp.ones((0, 128))}
    found = streamed_step(lambda p, s, b: (p, s), params, params, BATCH)
    assert found.leaves[0].reason == "it has no elements"


@pytest.mark.parametrize(
    ("update", "primitive"),
    [
        (lambda s, g: (g, jnp.sort(s, axis=0)), "sort"),
        (lambda s, g: (g, (s + g).T.reshape(64, 128)), "reshape"),
        (lambda s, g: (g, s + jnp.cumsum(s, axis=0)), "cumsum"),
    ],
)
def test_what_cannot_be_split_goes_whole_and_says_why(update, primitive):
    (leaf,) = one_leaf(update).leaves
    assert leaf.way == "whole"
    assert leaf.reason.startswith(f"{primitive} ")
    assert leaf.reason.endswith("works on it as a whole")


def test_the_reason_has_the_users_line():
    (leaf,) = one_leaf(lambda s, g: (g, (s + g).T.reshape(64, 128))).leaves
    assert f"reshape ({__file__}:" in leaf.reason


def test_leaves_that_go_whole_go_one_after_the_other():
    def step(params, state, batch):
        state = {k: jnp.sort(s, axis=0) for k, s in state.items()}
        return {"w": params["w"] - sum(state.values())}, state

    state = {k: jnp.ones((64, 128)) for k in "abc"}
    found = streamed_step(step, PARAMS, state, BATCH)
    moved = [
        (*group.reads, *(leaf for _, leaf in group.writes)) for group in found.groups
    ]
    # each is fetched, and written back before the next is fetched
    assert moved == [(1,), (1,), (2,), (2,), (3,), (3,)]


def test_a_norm_of_the_update_parts_the_loops():
    """LAMB: what is made of moments is scaled by its own norm, then the parameter."""
    (group,) = optimized(optax.lamb(1e-2)).groups
    assert len(group.reads) == len(group.writes) == 2
    # what is given is no new parameter yet: that one is not written over
    assert all(place != 0 for _, place in group.gives)


def test_muon_streams_momentum_and_gives_it_whole_to_its_products():
    found = optimized(optax.contrib.muon(1e-2))
    (group,) = found.groups
    assert len(group.reads) == 1
    assert len(group.gives) == 1
    assert [leaf.way for leaf in found.leaves if leaf.shape == (64, 128)] == [
        "streamed"
    ]


def test_branches_on_state_become_choices():
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 2)
    (group,) = optimized(optimizer).groups
    names = {
        n.equation.primitive.name for n in optimized(optimizer).found.program.nodes
    }
    assert "cond" not in names
    assert len(group.reads) == len(group.writes) == 2


def test_branches_with_loops_stay_branches():
    def update(state, grad):
        def often(s):
            return jax.lax.fori_loop(0, 3, lambda _, x: x * 0.9, s)

        return grad, jax.lax.cond(grad[0, 0] > 0, often, lambda s: s, state)

    (leaf,) = one_leaf(update).leaves
    assert leaf.way == "whole"
    assert leaf.reason.startswith("cond ")


def test_sizes_of_blocks():
    rows, columns, itemsize = 7168, 7168, 4
    size = BlockSize()
    cut = cut_leaf((rows, columns), (rows, columns), [itemsize], size)
    assert isinstance(cut, Cut)
    (height, width) = cut.block
    assert width == columns
    assert rows % height == 0
    assert height % 8 == 0  # a TPU's tile
    assert cut.count >= size.count
    assert height * width * itemsize <= rows * columns * itemsize / size.count


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [(50257, 29), (30522, 6), (28996, 44), (51865, 115), (250002, 102)],
)
def test_vocabularies_are_cut_evenly_where_blocks_need_be_no_tiles(rows, blocks):
    """Those of GPT-2, BERT, BERT with cases, Whisper and XLM-R."""
    size = BlockSize.least(2**20, "gpu")
    cut = cut_leaf((rows, 768), (rows, 768), [4], size)
    assert isinstance(cut, Cut)
    assert cut.count == blocks
    assert size.smallest_bytes <= math.prod(cut.block) * 4 <= size.largest_bytes
    assert not cut.ends


def test_larger_blocks_are_none_that_are_too_large():
    """Of 48 × 40009 rows 48 are few, and 40009 more than a block may be."""
    shape = 48 * 40009, 512
    cut = cut_leaf(shape, shape, [4], BlockSize(tiled=False, rest=False))
    assert isinstance(cut, Cut)
    assert cut.block == (48, 512)


def test_a_prime_number_of_rows_is_not_cut_in_single_ones():
    shape = 1021, 2048
    found = cut_leaf(shape, shape, [4], BlockSize.least(2**20, "gpu"))
    assert found == f"its shape {shape} cannot be cut evenly into small blocks"


def test_layers_are_cut_first_and_then_their_rows():
    size = BlockSize(count=64)
    cut = cut_leaf((40, 5120, 13824), (40, 5120, 13824), [4], size)
    assert isinstance(cut, Cut)
    assert cut.block[0] == 1
    assert cut.block[2] == 13824
    assert 5120 % cut.block[1] == 0


def test_an_axis_over_a_mesh_is_cut_within_the_shards():
    shards = 4
    cut = cut_leaf((1024, 256), (1024 // shards, 256), [4], SMALL)
    assert isinstance(cut, Cut)
    assert cut.view == ((shards, 1024 // shards), (256,))
    assert cut.block[0] == shards  # every device has a part of every block
    assert cut.viewed((1024, 1)) == (shards, 1024 // shards, 1)
    assert cut.viewed((1, 256)) == (1, 1, 256)
