"""Costs of whole models, and the seconds made of them; see also test_cost.py."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stowax._cost import _cost
from stowax._cost._cost import OperationCost, cost_of_jaxpr
from stowax._hardware._figures import MATRIX_EFFICIENCY, MEMORY_EFFICIENCY
from stowax._hardware._hardware import CHIPS
from stowax._jaxprs._jaxpr import Program, inline

FLOAT = 4  # bytes


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def cost(function, *specs) -> OperationCost:
    return cost_of_jaxpr(jax.make_jaxpr(function)(*specs))


def program_of(function, *specs) -> Program:
    return Program(inline(jax.make_jaxpr(function)(*specs)))


# --- models -------------------------------------------------------------------------


def llama_layer(params, x):
    """One layer as in Llama: grouped heads, SwiGLU, plain causal attention."""
    length, heads, groups, depth = 16, 4, 2, 8

    def norm(x):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    batch = x.shape[0]
    h = norm(x)
    q = (h @ params["q"]).reshape(batch, length, groups, heads // groups, depth)
    k = (h @ params["k"]).reshape(batch, length, groups, depth)
    v = (h @ params["v"]).reshape(batch, length, groups, depth)
    scores = jnp.einsum("btgrd,bsgd->bgrts", q, k) / depth**0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    mixed = jnp.einsum("bgrts,bsgd->btgrd", weights, v)
    x = x + mixed.reshape(batch, length, heads * depth) @ params["o"]
    h = norm(x)
    return x + (jax.nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"]


def llama_specs():
    batch, length, heads, groups, depth, hidden = 3, 16, 4, 2, 8, 80
    width = heads * depth
    params = {
        "q": array(width, width),
        "k": array(width, groups * depth),
        "v": array(width, groups * depth),
        "o": array(width, width),
        "gate": array(width, hidden),
        "up": array(width, hidden),
        "down": array(hidden, width),
    }
    tokens = batch * length
    attention = 2 * 2 * tokens * length * width  # scores and mixing, per token and key
    return params, array(batch, length, width), tokens, attention


def test_a_llama_layer_takes_two_operations_per_parameter_and_token():
    params, x, tokens, attention = llama_specs()
    count = sum(math.prod(p.shape) for p in params.values())
    got = cost(llama_layer, params, x)
    assert got.matrix_flops == (("float32", 2 * count * tokens + attention),)
    assert got.unpriced == ()


def test_the_backward_pass_has_twice_the_products():
    params, x, *_ = llama_specs()

    def both(params, x):
        out, back = jax.vjp(llama_layer, params, x)
        return back(out)

    forward = cost(llama_layer, params, x).total_matrix_flops
    assert cost(both, params, x).total_matrix_flops == 3 * forward


PROGRAMS = {
    "product": (lambda x, w: x @ w, array(8, 16), array(16, 4)),
    "batched": (
        lambda x, w: jnp.einsum("bij,bjk->bik", x, w),
        array(2, 8, 16),
        array(2, 16, 4),
    ),
    "two": (lambda x, w: (x @ w) @ (x @ w).T, array(8, 16), array(16, 4)),
    "convolution": (
        lambda x, k: lax.conv(x, k, (1, 1), "VALID"),
        array(2, 3, 8, 8),
        array(4, 3, 3, 3),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_agree_with_xla_exactly(name):
    function, *specs = PROGRAMS[name]
    xla = jax.jit(function).lower(*specs).cost_analysis()
    assert cost(function, *specs).total_matrix_flops == xla["flops"]


def test_elementwise_operations_agree_with_xla():
    def function(x):
        return jnp.sum((x * x + x) * (x - 1))

    n = 1000
    xla = jax.jit(function).lower(array(n)).cost_analysis()
    assert cost(function, array(n)).vector_flops == xla["flops"] == 4 * n + n - 1


# --- seconds ------------------------------------------------------------------------


def test_seconds_are_the_larger_of_arithmetic_and_memory():
    chip = CHIPS["h100"]
    flops, size = 10**15, 10**9
    matrix = flops / (chip.matrix_rate("bfloat16") * MATRIX_EFFICIENCY)
    memory = size / (chip.memory_rate() * MEMORY_EFFICIENCY)
    product = OperationCost(matrix_flops=(("bfloat16", flops),))
    copy = OperationCost(bytes_read=size // 2, bytes_written=size // 2)
    assert _cost.seconds(product, chip) == pytest.approx(matrix)
    assert _cost.seconds(copy, chip) == pytest.approx(memory)
    assert _cost.seconds(product + copy, chip) == pytest.approx(max(matrix, memory))


@pytest.mark.parametrize("key", sorted(CHIPS))
def test_nothing_is_free_on_any_chip(key):
    chip = CHIPS[key]
    for work in (
        OperationCost(matrix_flops=(("float64", 10**9),)),
        OperationCost(vector_flops=10**9),
        OperationCost(bytes_written=10**9),
        OperationCost(collective_bytes=10**9),
    ):
        assert _cost.seconds(work, chip) > 0


def test_operation_seconds_follow_shards_and_sum_to_the_program():
    chip = CHIPS["v5p"]
    params, x, *_ = llama_specs()

    def flat(*leaves):
        return llama_layer(
            jax.tree.unflatten(jax.tree.structure(params), leaves[1:]), leaves[0]
        )

    program = program_of(flat, x, *jax.tree.leaves(params))
    whole = _cost.operation_seconds(program, chip)
    assert len(whole) == len(program.nodes)
    assert all(priced for _, priced in whole)
    total = sum(spent for spent, _ in whole)
    assert total == pytest.approx(_cost.program_seconds(program.jaxpr, chip))
    quarter = _cost.operation_seconds(program, chip, lambda number: 4)
    assert sum(spent for spent, _ in quarter) == pytest.approx(total / 4)


def test_an_operation_that_only_its_own_pass_reads_pays_no_memory():
    n = 1 << 20
    program = program_of(lambda x: jnp.sin(x * 2 + 1) * 3, array(n))
    chip = CHIPS["h100"]
    times = [spent for spent, _ in _cost.operation_seconds(program, chip)]
    one_way = FLOAT * n / (chip.memory_rate() * MEMORY_EFFICIENCY)
    assert times[0] == pytest.approx(one_way)  # reads x
    # Writes the result, and is the one kernel that has to be started.
    assert times[-1] == pytest.approx(one_way + chip.launch_seconds)
    assert sum(times[1:-1]) < 0.5 * one_way


def test_what_a_gpu_starts_is_what_leaves_results_in_memory():
    def layer(x):
        return jnp.tanh(jnp.sin(x @ x) + 1) @ x  # two products, a loop between them

    program = program_of(layer, array(8, 8))
    gpu, tpu = CHIPS["h200"], CHIPS["v5p"]
    assert (gpu.launch_seconds > 0, tpu.launch_seconds) == (True, 0)
    spent = _cost.program_seconds(program.jaxpr, gpu)
    # Every device starts its own; the arithmetic of 8 × 8 numbers is nothing beside.
    shared = _cost.operation_seconds(program, gpu, lambda number: 4)
    for seconds in (spent, sum(time for time, _ in shared)):
        assert seconds == pytest.approx(3 * gpu.launch_seconds, rel=1e-2)
    assert _cost.program_seconds(program.jaxpr, tpu) < gpu.launch_seconds


def test_a_scan_costs_its_length_in_seconds():
    n, length = 64, 7
    chip = CHIPS["h100"]

    def loop(x):
        return lax.scan(lambda c, _: (c @ c, None), x, None, length=length)[0]

    ((spent, priced),) = _cost.operation_seconds(program_of(loop, array(n, n)), chip)
    ((once, _),) = _cost.operation_seconds(
        program_of(lambda x: x @ x, array(n, n)), chip
    )
    assert priced
    assert spent == pytest.approx(length * once)
