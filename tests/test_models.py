"""The models of `benchmarks/` and `examples/` are what they say they are.

Plans are judged on these models, so a model that does not learn, or two that are not
the same mathematics, would make every table wrong.
"""

import importlib.util
import itertools
import math
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import MODELS, llama, scan_transformer  # noqa: E402

SMALL = [(name, "small") for name in MODELS] + [("encoder_decoder", "unrolled_small")]
MEDIUM = [(name, "medium") for name in MODELS if name != "llama"]


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def char_gpt():
    spec = importlib.util.spec_from_file_location(
        "char_gpt", ROOT / "examples" / "char_gpt.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_gpt"] = module
    spec.loader.exec_module(module)
    return module


def types_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), SMALL)
def test_small_model_learns_and_every_leaf_moves(name, form):
    step, (state, batch) = getattr(MODELS[name], form)()
    # Five steps take no time; compiling without optimization takes half as long.
    jitted = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
    before, losses = state, []
    for number in range(5):
        state, metrics = jitted(state, batch)
        losses.append(float(metrics["loss"]))
        if number == 0:
            # Moments start at zero: one that stays was reached by no gradient.
            for old, new in zip(
                jax.tree.leaves(before), jax.tree.leaves(state), strict=True
            ):
                assert bool(jnp.any(old != new))
            assert types_of(before) == types_of(state)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_loop_is_the_scan_unrolled():
    scan, loop = (
        jax.jit(step)(*args)[1]["loss"]
        for step, args in (
            MODELS["scan_transformer"].small(),
            MODELS["loop_transformer"].small(),
        )
    )
    # The same sums in the same order, up to what fusion rearranges: float32 rounding of
    # a mean of tokens, each after 4 layers.
    np.testing.assert_allclose(scan, loop, rtol=64 * np.finfo(np.float32).eps)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), MEDIUM)
def test_medium_model_is_shapes_only_and_keeps_its_state(name, form):
    step, (state, batch) = getattr(MODELS[name], form)()
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct)
        for leaf in jax.tree.leaves((state, batch))
    )
    planned, metrics = jax.eval_shape(step, state, batch)
    assert types_of(planned) == types_of(state)
    assert metrics["loss"].shape == ()


def test_the_five_decoders_have_equal_sizes():
    c = scan_transformer.MEDIUM
    kept = c.width * c.width * 2  # query and output
    grouped = 2 * c.width * c.key_value_heads * c.head_width
    block = kept + grouped + 3 * c.width * c.feed_forward + 2 * c.width
    parameters = c.layers * block + 2 * c.vocabulary * c.width + c.width
    for name in MODELS:
        if name in ("encoder_decoder", "llama"):
            continue
        _, (state, _) = MODELS[name].medium()
        floats = [
            leaf.size
            for leaf in jax.tree.leaves(state)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        assert sum(floats) == 3 * parameters, name  # parameters and two moments


def fake_target():
    def mesh(shape, axis_names):
        return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(shape), axis_names)

    return types.SimpleNamespace(devices=jax.devices()[:1], mesh=mesh)


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (llama.llama2_7b, 6_738_415_616),
        (llama.llama2_13b, 13_015_864_320),
        (llama.llama2_70b, 68_976_648_192),
    ],
)
def test_llama_has_the_published_number_of_parameters(make, published):
    step, (parameters, batch) = make(fake_target(), update=False)
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == published
    loss, gradients = jax.eval_shape(step, parameters, batch)
    assert loss.shape == ()
    assert types_of(gradients) == types_of(parameters)


def test_llama_cuts_every_array_but_the_counter_along_its_largest_axis():
    _, (state, batch) = llama.llama2_13b(fake_target())
    for leaf in jax.tree.leaves((state, batch)):
        axes = [a for a, name in enumerate(leaf.sharding.spec) if name == llama.AXIS]
        if leaf.ndim == 0:
            assert axes == []
        else:
            (axis,) = axes
            stacked = leaf.ndim > 1 and leaf.shape[0] == llama.LLAMA2_13B.layers
            assert axis > 0 or not stacked
    query = state["parameters"]["layers"]["query"]
    assert tuple(query.sharding.spec) == (None, llama.AXIS, None, None)


def test_llama_refuses_a_batch_that_does_not_divide():
    target = fake_target()
    target.devices = target.devices * 5
    with pytest.raises(ValueError, match=r"batch: got 32 for 5 devices.*such as 35"):
        llama.llama2_13b(target)


@pytest.mark.slow
def test_char_gpt_learns_english(char_gpt):
    config = char_gpt.Config(layers=2, width=32, heads=2, sequence=32, batch=8)
    text = char_gpt.read_text()
    counts = np.bincount(text, minlength=config.vocabulary)
    shares = counts[counts > 0] / counts.sum()
    entropy = -np.sum(shares * np.log(shares))  # of single characters, in nats
    losses = char_gpt.train(
        jax.jit(char_gpt.make_train_step(config)),
        char_gpt.initial_state(config),
        char_gpt.batches(config, text),
        200,
    )
    # Below the entropy of single characters, it has learnt something of their order.
    assert np.mean(losses[-20:]) < entropy < losses[0]


def test_char_gpt_batches_follow_the_text(char_gpt):
    config = char_gpt.Config()
    first, second = itertools.islice(
        char_gpt.batches(config, np.arange(1000, dtype=np.int32)), 2
    )
    np.testing.assert_array_equal(first["inputs"] + 1, first["labels"])
    assert first["inputs"].shape == (config.batch, config.sequence)
    assert not np.array_equal(first["inputs"], second["inputs"])


def test_char_gpt_large_can_be_traced(char_gpt):
    step, (state, batch) = char_gpt.large()
    planned, _ = jax.eval_shape(step, state, batch)
    assert types_of(planned) == types_of(state)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["parameters"]))
    assert 1.2e9 < parameters < 1.25e9
