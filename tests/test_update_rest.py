"""Arrays that even blocks do not fill: where the rest is, and what becomes of it.

Their rows are a prime number, or one more or less than a multiple of eight, as those of
vocabularies are. On the CPU rests are written in the same parts as on a TPU.
"""

import dataclasses
import math
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings

import random_updates
import stowax
from random_updates import arrays, recipes
from stowax._update._blocks import BlockSize, Cut, cut_leaf
from stowax._update._proof import prove
from updates import SMALL, StreamedStep, streamed_step

pytestmark = pytest.mark.usefixtures("usual_promotion")

ON_TPU = BlockSize.least(2**20, "tpu", "TPU v5")
COLUMNS = 32
FEW = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
ODD = st.integers(17, 90)
"""Rows of arrays that `SMALL` blocks of eight rows cut, most of them with a rest."""


def cut_of(rows: int, itemsize: int = 4, size: BlockSize = ON_TPU) -> Cut | str:
    return cut_leaf((rows, 768), (rows, 768), [itemsize], size)


@pytest.mark.parametrize("rows", [50257, 30522, 28996, 51865, 250002, 1021, 32003])
def test_vocabularies_on_a_tpu_are_cut_in_whole_tiles_and_a_rest(rows):
    """Those of GPT-2, BERT, BERT with cases, Whisper, XLM-R; a prime; Llama and 3."""
    size = dataclasses.replace(ON_TPU, leaf_bytes=0)
    cut = cut_of(rows, size=size)
    assert isinstance(cut, Cut)
    height, width = cut.block
    assert height % 8 == 0
    assert width == 768
    assert height * width * 4 <= size.target(rows * width * 4)
    assert cut.count * height + sum(cut.ends) == rows
    assert sum(cut.ends) < height


@pytest.mark.parametrize("itemsize", [4, 2, 1])
def test_a_rest_is_written_as_a_tpu_can(itemsize):
    """Whole eights first, then falling powers of two; packed rows at once."""
    packed, size = 4 // itemsize, BlockSize(count=16, smallest_bytes=1, leaf_bytes=1)
    for rows in range(1000, 1100):
        cut = cut_of(rows, itemsize, size)
        if rows % packed:
            assert cut == (
                f"it cannot be cut into blocks: it has {rows} rows, and a TPU copies "
                f"rows of {itemsize}-byte numbers by {packed}"
            )
            continue
        assert isinstance(cut, Cut)
        done = cut.count * cut.block[0]
        for part in cut.ends:
            assert part % 8 == 0 or (part in (4, 2, 1) and part % packed == 0)
            assert done % min(part, 8) == 0  # within one of the buffer's tiles
            done += part
        assert done == rows


def test_even_blocks_come_before_a_rest():
    assert cut_of(30528).ends == ()  # pyright: ignore[reportAttributeAccessIssue]


def test_blocks_far_smaller_than_wanted_do_not():
    """51864 rows are 2161 × 24: copies of 72 KiB."""
    cut = cut_of(51864)
    assert isinstance(cut, Cut)
    assert cut.block[0] > 100


@pytest.mark.parametrize("device", [("tpu", "TPU v4"), ("gpu", "NVIDIA H200")])
def test_what_cannot_copy_a_part_of_a_tile_has_no_rest(device):
    """For a TPU v4 the compiler would end the process."""
    found = cut_of(1021, size=BlockSize.least(2**18, *device))
    assert found == "its shape (1021, 768) cannot be cut evenly into small blocks"


def test_shards_are_cut_with_a_rest_each():
    cut = cut_leaf((2 * 15261, 768), (15261, 768), [4], ON_TPU)
    assert isinstance(cut, Cut)
    assert cut.shape == (2, 15261, 768)
    assert cut.block[0] == 2
    assert cut.count * cut.block[1] + sum(cut.ends) == 15261


def test_few_rows_are_cut_where_they_are_large():
    """A row of 4 MiB is larger than wanted; eight are the least that a TPU copies."""
    shape = 29, 2**20
    cut = cut_leaf(shape, shape, [4], BlockSize(smallest_bytes=1, count=64))
    assert isinstance(cut, Cut)
    assert (cut.block, cut.count, cut.ends) == ((8, 2**20), 3, (4, 1))


def same(expected: object, got: object) -> None:
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
@FEW
@given(rows=ODD, recipe=recipes())
def test_random_optimizers_give_the_same_bits(rows, recipe):
    # XLA multiplies several rows by the inverse of what all are divided by; one row
    # alone it divides.
    divides = any(name == "rows" for name, *_ in recipe.operations)
    rows += rows % 2 if divides else 0
    with mock.patch.object(random_updates, "SHAPE", (rows, COLUMNS)):
        args = (), arrays(recipe.leaves, 0), arrays(recipe.leaves, 1)
        step = streamed_step(recipe.step, *args)
        with jax.disable_jit():
            same(recipe.step(*args), step.run(*args))


def rest_of(step: StreamedStep) -> list[int]:
    return [sum(group.cut.ends) for group in step.groups]


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def trained(params, state, batch):
    loss = lambda p: jnp.mean(jnp.tanh(batch @ p["w"]) ** 2)
    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.slow
@pytest.mark.parametrize("rows", [61, 63, 65, 97])
def test_adam_gives_the_same_numbers(rows):
    key = jax.random.key(rows)
    params = {"w": jax.random.normal(key, (rows, 128))}
    args = params, OPTIMIZER.init(params), jnp.linspace(-1, 1, 4 * rows).reshape(4, -1)
    step = streamed_step(trained, *args)
    assert rest_of(step) == [rows % step.groups[0].cut.block[0]]
    assert rest_of(step) != [0]
    with jax.disable_jit():
        same(trained(*args), step.run(*args))
    got = step.compiled(*args)
    step.check_places(got)
    expected = jax.jit(trained)(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.quick("shape1-order1")
@pytest.mark.parametrize(
    ("shape", "order"),
    [((61, 8, 16), None), ((8, 61, 16), (1, 0, 2)), ((128, 61), (1, 0))],
)
def test_what_lies_otherwise_than_typed_has_a_rest_too(shape, order):
    state = {k: jax.random.normal(jax.random.key(n), shape) for n, k in enumerate("ab")}
    batch = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape) / 1000

    def step(params, state, batch):
        scale = jnp.tanh(batch[..., :1])
        new = {k: 0.9 * s + scale * batch for k, s in state.items()}
        return params - new["a"] * (1 + jnp.abs(new["b"])), new

    orders = {} if order is None else {1: order, 2: order}
    found = streamed_step(step, batch, state, batch, orders=orders)
    assert all(ends > 0 for ends in rest_of(found))
    with jax.disable_jit():
        same(step(batch, state, batch), found.run(batch, state, batch))


def test_rows_of_several_matrices_leave_no_rest():
    """A part of each would lie in tiles of several matrices' rows."""
    size = dataclasses.replace(SMALL, largest_bytes=8192)
    found = cut_leaf((2, 61, 61), (2, 61, 61), [4], size)
    assert found == "its shape (2, 61, 61) cannot be cut into small blocks"


def test_what_goes_whole_has_a_rest():
    """A sorted array is copied in, worked on and copied out."""
    state = jax.random.normal(jax.random.key(0), (61, 128))

    def step(params, state, batch):
        state = jnp.sort(state, axis=0)
        return params + state, state

    found = streamed_step(step, state, state, state)
    assert [leaf.way for leaf in found.leaves] == ["whole"]
    assert all(ends > 0 for ends in rest_of(found))
    with jax.disable_jit():
        same(step(state, state, state), found.run(state, state, state))


@pytest.mark.slow
def test_a_tpu_moves_blocks_and_every_rest():
    """Rests of all sizes between one row and a tile, in one program."""
    target = stowax.target("v5p-8")
    rows, columns = range(1001, 1008), 2048

    def step(w, m, x):
        loss = lambda w: sum(jnp.sum(jnp.tanh(a) * x) for a in w)
        grads = jax.grad(stowax.stow(loss))(w)
        m = [0.9 * a + g for a, g in zip(m, grads, strict=True)]
        return [a - 0.1 * b for a, b in zip(w, m, strict=True)], m

    wide = [jax.ShapeDtypeStruct((n, columns), jnp.float32) for n in rows]
    narrow = [jax.ShapeDtypeStruct((n, columns), jnp.bfloat16) for n in (2002, 2014)]
    w = [*wide, *narrow]
    x = jax.ShapeDtypeStruct((), jnp.float32)
    plan = stowax.plan(
        jax.jit(step, donate_argnums=(0, 1)),
        *(w, w, x),
        target=target,
        budget="1GiB",
        pin={"optimizer state": "offload"},
    )
    hosted = sum(math.prod(s.shape) * s.dtype.itemsize for s in w)
    assert plan.host_bytes >= hosted
    assert plan.device_bytes < 1.5 * hosted  # as written: parameters and moments


def test_rests_are_proven_to_be_all_that_is_left():
    params = {"w": jnp.ones((61, 128))}
    args = params, OPTIMIZER.init(params), jnp.ones((4, 61))
    found = streamed_step(trained, *args).found
    assert prove(found) == []
    (group,) = found.groups
    ends = group.cut.ends
    for wrong in ((), ends[:-1], (*ends, 8), (*ends, -1, 1), (sum(ends) + 1,)):
        cut = dataclasses.replace(group.cut, ends=wrong)
        schedule = [
            item if isinstance(item, int) else dataclasses.replace(item, cut=cut)
            for item in found.schedule
        ]
        broken = dataclasses.replace(found, schedule=tuple(schedule))
        said = [one.reason for one in prove(broken)]
        assert any("do not make up the whole of it" in reason for reason in said)
