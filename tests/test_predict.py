"""Predicted memory: rules in symbols, and whole steps against the compilers."""

import dataclasses
import gc
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stowax import _mlir
from stowax._hlo._program import read_program
from stowax._predict import _predict
from stowax._survey import _survey
from stowax._survey._programs import Programs
from stowax._target import _target

F32 = 4
needs = {
    "v5p-8": pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
    ),
    "h200": pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None, reason="needs jax's plugin"
    ),
}


def predict(function, *specs, platform="gpu", **options):
    traced = jax.jit(function, **options).trace(*specs)
    lowered = traced.lower(lowering_platforms=("cuda",))
    graph = _mlir.read_graph(lowered.compiler_ir())
    return _predict.predict_memory(graph, platform)


def total(figures):
    return (
        figures.argument_size_in_bytes
        + figures.output_size_in_bytes
        - figures.alias_size_in_bytes
        + figures.temp_size_in_bytes
    )


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


N = 256
MATRIX = N * N * F32


def test_a_donated_argument_is_the_output():
    plain = predict(lambda x: x * 2, spec(N, N))
    donated = predict(lambda x: x * 2, spec(N, N), donate_argnums=0)
    assert (plain.argument, plain.output, plain.alias) == (MATRIX, MATRIX, 0)
    assert donated.alias == MATRIX
    assert plain.temp == donated.temp == 0
    assert donated.device_total == plain.device_total - MATRIX == MATRIX


def test_a_spread_argument_is_the_output_behind_a_reshape():
    # JAX leaves it to the compiler which of them it is, and one may be known by the
    # shape in which it was made.
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    spread = NamedSharding(mesh, PartitionSpec(None, None, "x"))

    def step(weights):
        return (weights.reshape(2 * N, N) * 2).reshape(2, N, N)

    given = jax.ShapeDtypeStruct((2, N, N), jnp.float32, sharding=spread)
    donated = predict(step, given, donate_argnums=0)
    assert donated.alias == donated.argument == 2 * MATRIX // 4


def test_elementwise_chains_take_no_bytes_products_do():
    chain = predict(lambda x: jnp.sum(jnp.cos(x * 2) + 1), spec(N, N))
    assert chain.temp <= 4 * F32
    product = predict(lambda x: jnp.sum((x @ x) @ x), spec(N, N))
    assert 2 * MATRIX <= product.temp <= 2 * MATRIX + 4 * F32


@pytest.mark.parametrize("name", ["square", "erf_inv", "erfc", "lgamma", "asinh"])
def test_functions_outside_of_stablehlo_are_elementwise_too(name):
    function = getattr(jax.lax, name)
    result = predict(lambda x: jnp.sum(function(x * 2) + 1), spec(N, N))
    assert result.temp <= 4 * F32


def test_an_expensive_function_is_an_array_where_several_kernels_read_it():
    def one(x):  # the derivative of an activation function
        y = jnp.tanh(x)
        return jnp.sum(x + y * (1 - y * y))

    def two(x):
        y = jnp.tanh(x)
        return y @ x, jnp.sum(y)

    assert predict(one, spec(N, N)).temp <= 4 * F32
    assert predict(two, spec(N, N)).temp >= MATRIX


def test_a_wide_function_of_narrow_values_is_computed_again():
    """As XLA does with the softmax of bfloat16 scores: one array of them, narrow."""

    def step(x, dtype):
        scores = (x @ x).astype(dtype)
        most = jnp.exp(scores.astype(jnp.float32))
        sums = most.sum(axis=1, keepdims=True)
        return (most / sums).astype(dtype) @ x.astype(dtype) + sums.astype(dtype)

    narrow = predict(lambda x: step(x, jnp.bfloat16), spec(N, N, dtype=jnp.bfloat16))
    wide = predict(lambda x: step(x, jnp.float32), spec(N, N))
    # Scores that are as wide are replaced by what is made of them.
    assert wide.temp == MATRIX + N * F32
    assert narrow.temp <= wide.temp


@pytest.mark.parametrize("layers", [4, 32])
def test_a_loop_works_in_place_and_its_stack_is_one_buffer(layers):
    def stacked(x):
        def body(carry, _):
            carry = carry + 1
            return carry, carry

        _, stack = jax.lax.scan(body, x, None, length=layers)
        return jnp.sum(stack[::-1] @ x)

    result = predict(stacked, spec(N, N))
    # The carry, the stack, its reversal and the product with it, and nothing per layer.
    assert result.temp >= 2 * layers * MATRIX
    assert result.temp <= (3 * layers + 2) * MATRIX


def test_a_loop_does_not_grow_with_its_length():
    def looped(x, length):
        return jax.lax.fori_loop(0, length, lambda _, y: jnp.sin(y) + 1, x)

    few, many = (predict(lambda x, n=n: looped(x, n), spec(N, N)) for n in (2, 2000))
    assert few.device_total == many.device_total


def test_the_dearer_branch_counts():
    def branch(flag, x):
        return jax.lax.cond(flag, lambda y: (y @ y) @ y, lambda y: y, x)

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    both = predict(branch, flag, spec(N, N))
    assert both.temp >= MATRIX  # the first product; the second is the output


# --- against the compilers ----------------------------------------------------------

LAYERS, WIDTH, TOKENS = 4, 1024, 16384


def layer(x, weights):
    up, down = (w.astype(x.dtype) for w in weights)
    return x + jax.nn.gelu(x @ up) @ down


def loss(weights, x, remat, stacked):
    one = jax.checkpoint(layer) if remat else layer
    if stacked:
        x = jax.lax.scan(lambda x, w: (one(x, w), None), x, weights)[0]
    else:
        for pair in weights:
            x = one(x, pair)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def training_step(remat, stacked):
    def step(state, x):
        weights, momentum = state
        grads = jax.grad(loss)(weights, x, remat, stacked)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum)
        return weights, momentum

    return jax.jit(step, donate_argnums=0)


STEPS = [
    ("h200", True, True),
    ("h200", True, False),
    ("h200", False, True),
    ("h200", False, False),
    ("v5p-8", True, True),
    ("v5p-8", True, False),
    ("v5p-8", False, True),
]


@needs["h200"]
@pytest.mark.parametrize(("axis", "turned"), [(1, 0), (2, 1)])
def test_a_stack_that_is_gathered_within_rows_lies_turned_as_well(
    axis, turned, monkeypatch
):
    """What GPUs gather has to be outermost: the whole stack is laid out anew for it."""
    layers, width, rows = 8, 1024, 4096
    target = _target.target("h200x8")
    mesh = target.mesh((8,), ("fsdp",))
    stack = layers * width * width * F32 // 8

    def loss(weights, x):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return jnp.mean(y**2)

    def spread(shape, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    weights = spread((layers, width, width), *[None] * axis, "fsdp")
    x = spread((rows, width), "fsdp")
    lowered = target.lower(jax.jit(jax.grad(loss)), weights, x)
    program = read_program(lowered.compile().hlo_module_protos()[0])
    made = [
        item
        for item in program.computations[program.entry].instructions
        if item.opcode == "fusion" and item.result_bytes == stack
    ]
    assert len(made) == turned
    graph = _mlir.read_graph(lowered.compiler_ir())
    predicted = _predict.predict_memory(graph, "gpu").temp
    blind = dataclasses.replace(_predict.GPU_RULES, turns_stacks=False)
    monkeypatch.setattr(_predict, "GPU_RULES", blind)
    unknowing = _predict.predict_memory(graph, "gpu").temp
    assert predicted - unknowing == turned * stack


@pytest.mark.slow
@needs["v5p-8"]
@pytest.mark.parametrize("vocabulary", [1024, 32768])
def test_what_loops_carry_is_counted_as_libtpu_counts_it(vocabulary, monkeypatch):
    """The most is needed in the backward loop with few words, else at the logits."""
    layers, width, hidden, rows = 16, 1024, 4096, 8192
    policy = jax.checkpoint_policies.save_only_these_names("input", "hidden")
    target = _target.target("v5p-8")

    def layer(x, weights):
        x = checkpoint_name(x, "input")
        y = jnp.tanh(checkpoint_name(x @ weights[0], "hidden"))
        return x + y @ weights[1], None

    def loss(weights, head, x):
        remat = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        y, _ = jax.lax.scan(remat, x, weights)
        logits = 30 * jnp.tanh((y @ head).astype(jnp.float32) / 30)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])

    def sums(*args):
        return jax.tree.map(jnp.sum, jax.grad(loss)(*args))

    shapes = (layers, width, hidden), (layers, hidden, width)
    specs = target.specs(
        tuple(spec(*shape, dtype=jnp.bfloat16) for shape in shapes),
        spec(width, vocabulary, dtype=jnp.bfloat16),
        spec(rows, width, dtype=jnp.bfloat16),
    )
    lowered = target.lower(jax.jit(sums), *specs)
    graph = _mlir.read_graph(lowered.compiler_ir())
    compiled = lowered.compile().memory_analysis().temp_size_in_bytes
    assert _predict.predict_memory(graph, "tpu").temp == pytest.approx(
        compiled, rel=0.02
    )
    once = dataclasses.replace(_predict.TPU_RULES, counts_carries_again=False)
    monkeypatch.setattr(_predict, "TPU_RULES", once)
    heap = _predict.predict_memory(graph, "tpu").temp
    inputs, values = (layers * rows * n * 2 for n in (width, hidden))
    gradients = 2 * layers * width * hidden * 2
    assert heap >= inputs + values + min(gradients, rows * vocabulary * 2)
    assert compiled > 1.1 * heap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stacked", "remat"),
    [
        pytest.param(
            *case,
            marks=needs[case[0]],
            id=f"{case[0]}-{'scan' if case[1] else 'loop'}"
            f"-{'recompute' if case[2] else 'store'}",
        )
        for case in STEPS
    ],
)
def test_within_a_quarter_of_what_is_compiled(name, stacked, remat, usual_promotion):
    target = _target.target(name)
    sharding = NamedSharding(
        Mesh(np.array(target.devices[:1]), ("x",)), PartitionSpec()
    )
    shapes = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    lead = (LAYERS,) if stacked else ()
    weights = [
        jax.ShapeDtypeStruct((*lead, *shape), jnp.float32, sharding=sharding)
        for shape in shapes
    ]
    if not stacked:
        weights = [weights] * LAYERS
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16, sharding=sharding)
    lowered = target.lower(training_step(remat, stacked), (weights, weights), x)
    graph = _mlir.read_graph(lowered.compiler_ir())
    platform = "tpu" if name == "v5p-8" else "gpu"
    predicted = _predict.predict_memory(graph, platform)
    figures = lowered.compile().memory_analysis()
    compiled = total(figures)
    assert predicted.argument == pytest.approx(figures.argument_size_in_bytes, rel=0.01)
    assert predicted.device_total == pytest.approx(compiled, rel=0.25)


NAMES = {"nothing": (), "first": ("first",), "both": ("first", "second")}


@pytest.mark.slow
@needs["v5p-8"]
@pytest.mark.parametrize(
    ("donate", "update", "kept"),
    [(True, True, "nothing"), (False, False, "first"), (True, False, "both")],
)
@pytest.mark.usefixtures("full_effort")
def test_what_libtpu_counts_twice(donate, update, kept, usual_promotion):
    # Stored: at most 24 layers of 64 MiB; gradients: 384 MiB. Which of the two is less
    # is counted again where the gradients are temporaries, that is, where they are
    # neither returned nor written to a buffer of a result.
    width, tokens, layers = 1024, 6144, 24

    def layer(x, w):
        hidden = checkpoint_name(
            jax.nn.gelu(checkpoint_name(x @ w[0], "first")), "second"
        )
        return x + hidden @ w[1]

    policy = jax.checkpoint_policies.save_only_these_names(*NAMES[kept])
    layer = jax.checkpoint(layer, policy=policy)

    def loss(weights, x):
        out = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
        return out.astype(jnp.float32).mean()

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        if update:
            rate = jnp.bfloat16(1e-3)
            grads = jax.tree.map(lambda w, g: w - g * rate, weights, grads)
        return grads, value

    target = _target.target("v5p-8")
    shapes = (layers, width, 4 * width), (layers, 4 * width, width)
    weights = [spec(*shape, dtype=jnp.bfloat16) for shape in shapes]
    jitted = jax.jit(step, donate_argnums=(0,) if donate else ())
    lowered = target.lower(jitted, weights, spec(tokens, width, dtype=jnp.bfloat16))
    graph = _mlir.read_graph(lowered.compiler_ir())
    predicted = _predict.predict_memory(graph, "tpu")
    figures = lowered.compile().memory_analysis()
    compiled = total(figures)
    assert predicted.device_total == pytest.approx(compiled, rel=0.06)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_as_before_once_something_is_predicted(enabled):
    """It waits while a program is traced and read, also where that fails."""
    before = gc.isenabled()
    seen = []

    class Failing:
        options, donates, programs = None, True, Programs()

        def lower(self, plan, *, donate):
            seen.append(gc.isenabled())
            raise ValueError

    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError):
            _survey.predict(Failing(), None)
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()
