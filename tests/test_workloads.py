"""The published models of `benchmarks/models` have the published sizes, and train.

Tables that compare plans with policies are about these models: a wrong shape would
make every row one of another model.
"""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import (
    gemma2,
    llama,
    mixtral,
    paligemma2,
    tutorial_layers,
    vision,
)
from test_models import fake_target, types_of


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def gemma2_layers(c):
    attention = 2 * c.width * (c.heads + c.key_value_heads) * c.head_width
    return c.layers * (attention + 3 * c.width * c.feed_forward + 4 * c.width)


def encoder(c, inputs=3 * 14 * 14):
    layer = 4 * (c.width + 1) * c.width + 4 * c.width
    layer += (c.width + 1) * c.feed_forward + (c.feed_forward + 1) * c.width
    return (inputs + 1 + c.tokens + 2) * c.width + c.layers * layer


@pytest.mark.parametrize(
    ("make", "config", "embedding", "rest"),
    [  # the report's own table: embedding and other parameters
        (gemma2.gemma2_2b, gemma2.GEMMA2_2B, 590_118_912, 2_024_517_888),
        (gemma2.gemma2_9b, gemma2.GEMMA2_9B, 917_962_752, 8_324_201_984),
        (gemma2.gemma2_27b, gemma2.GEMMA2_27B, 1_180_237_824, 26_047_480_320),
    ],
)
def test_gemma2_has_the_published_number_of_parameters(make, config, embedding, rest):
    assert config.vocabulary * config.width == embedding
    assert gemma2_layers(config) + config.width == rest
    step, (state, batch) = make(fake_target())
    assert count(state["parameters"]) == embedding + rest
    after, metrics = jax.eval_shape(step, state, batch)
    assert types_of(after) == types_of(state)
    assert metrics["loss"].shape == ()


@pytest.mark.parametrize(
    ("make", "config", "published"),
    [
        (paligemma2.paligemma2_3b, paligemma2.PALIGEMMA2_3B, 3_032_242_416),
        (paligemma2.paligemma2_10b, paligemma2.PALIGEMMA2_10B, 9_662_638_832),
        (paligemma2.paligemma2_28b, paligemma2.PALIGEMMA2_28B, 27_650_487_024),
    ],
)
def test_paligemma2_trains_the_attention_of_the_published_model(
    make, config, published
):
    c, tower = config.language, config.tower
    language = gemma2_layers(c) + (1 + c.vocabulary) * c.width
    connector = (tower.width + 1) * c.width
    assert encoder(tower) == 412_442_352
    assert encoder(tower) + connector + language == published
    step, (trained, frozen, batch) = make(fake_target())
    assert count((trained, frozen)) == published
    heads = 2 * c.width * (c.heads + c.key_value_heads) * c.head_width
    assert count(trained) == c.layers * heads
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} == {np.dtype("bfloat16")}
    assert batch["inputs"].shape == (256, 256)
    assert batch["images"].shape == (256, 224, 224, 3)
    after, _ = jax.eval_shape(step, trained, frozen, batch)
    assert types_of(after) == types_of(trained)


def test_mixtral_has_the_published_number_of_parameters():
    c = mixtral.MIXTRAL_8X7B
    attention = 2 * c.width * (c.heads + c.key_value_heads) * c.head_width
    experts = c.experts * (3 * c.width * c.feed_forward + c.width)
    layers = c.layers * (attention + experts + 2 * c.width)
    assert layers + (2 * c.vocabulary + 1) * c.width == 46_702_792_704
    step, (state, batch) = mixtral.mixtral_8x7b(fake_target(), weights=jnp.bfloat16)
    assert count(state["parameters"]) == 46_702_792_704
    after, _ = jax.eval_shape(step, state, batch)
    assert types_of(after) == types_of(state)


def test_vit_g_has_the_published_number_of_parameters():
    # The table says 1011 million, without a head.
    assert round(encoder(vision.VIT_G) / 1e6) == 1011
    step, (state, batch) = vision.vit_g(fake_target())
    head = vision.VIT_G.width * vision.VIT_G.classes
    assert count(state["parameters"]) == encoder(vision.VIT_G) + head
    after, _ = jax.eval_shape(step, state, batch)
    assert types_of(after) == types_of(state)


def test_the_tutorials_layers_have_the_pages_bytes():
    (w1, w2), x = tutorial_layers.arguments()
    assert (w1.size + w2.size + x.size) * 4 == 20.25 * 2**20
    gradients = jax.eval_shape(tutorial_layers.make_step(), (w1, w2), x)
    assert types_of(gradients) == types_of((w1, w2))


@pytest.mark.slow
@pytest.mark.parametrize("model", [gemma2, vision, paligemma2, mixtral])
def test_small_form_learns(model):
    step, (state, *rest) = model.small()
    # Four steps take no time; compiling without optimization takes half as long.
    jitted = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
    losses = []
    for _ in range(4):
        state, metrics = jitted(state, *rest)
        losses.append(float(metrics["loss"]))
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_local_layers_of_gemma2_do_not_see_beyond_their_window():
    config = gemma2.SMALL
    parameters = gemma2.initial_parameters(config, jax.random.key(0))
    layers = parameters["layers"]
    x = jax.random.normal(jax.random.key(1), (1, config.sequence, config.width))
    table = gemma2._layers.rotary_table(config.sequence, config.head_width)
    masks = gemma2.masks(config, config.sequence)

    def changed(kind):
        weights = jax.tree.map(lambda leaf: leaf[0], layers[kind])
        ran = [
            gemma2.layer(config, weights, start, table, masks[kind])
            for start in (x, x.at[:, 0].add(1.0))
        ]
        return np.flatnonzero(np.any(np.asarray(ran[0] != ran[1]), axis=(0, 2)))

    assert changed("local").tolist() == list(range(config.window))
    assert changed("global").tolist() == list(range(config.sequence))


@pytest.mark.slow
def test_tokens_go_to_their_experts_as_far_as_there_is_room():
    config = mixtral.SMALL
    length, experts = config.sequence, config.experts
    assert config.capacity == math.ceil(1.25 * length * 2 / experts)
    # All tokens want expert 0 first and expert 1 second.
    router = jnp.zeros((config.width, experts)).at[0].set(jnp.array([2.0, 1, 0, 0]))
    x = jnp.ones((1, length, config.width))
    entering = mixtral.routed(config, router, x)
    tokens_of = np.asarray(jnp.sum(entering > 0, axis=(0, 1, 3)))
    assert tokens_of.tolist() == [config.capacity, config.capacity, 0, 0]
    first, second = jax.nn.softmax(jnp.array([2.0, 1.0]))
    np.testing.assert_allclose(entering[0, 0, 0, 0], first, rtol=1e-6)
    np.testing.assert_allclose(entering[0, 0, 1, 0], second, rtol=1e-6)


def test_policies_find_their_names_in_every_decoder():
    policy = jax.checkpoint_policies.save_only_these_names("query_proj", "mlpwi_0")
    for make in (llama.llama2_7b, gemma2.gemma2_2b, mixtral.mixtral_8x7b):
        step, args = make(fake_target(), policy=policy)
        text = str(jax.make_jaxpr(step)(*args))
        assert "name=query_proj" in text
        assert "name=mlpwi_0" in text
