"""Operations and bytes counted by the cost rules, against symbols and against XLA."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src import core as jax_core
from jax.experimental import pallas
from jax.extend.core import primitives as jax_primitives
from jax.sharding import AxisType, PartitionSpec

from stowax._cost import _cost, _rules
from stowax._cost._cost import OperationCost, cost_of_jaxpr
from stowax._hardware._hardware import CHIPS
from stowax._jaxprs._jaxpr import Program, inline

FLOAT = 4  # bytes


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def cost(function, *specs) -> OperationCost:
    return cost_of_jaxpr(jax.make_jaxpr(function)(*specs))


def single(function, *specs) -> OperationCost:
    jaxpr = jax.make_jaxpr(function)(*specs)
    assert len(jaxpr.eqns) == 1
    return cost_of_jaxpr(jaxpr)


def program_of(function, *specs) -> Program:
    return Program(inline(jax.make_jaxpr(function)(*specs)))


# --- single operations --------------------------------------------------------------


def test_batched_product_counts_two_per_multiply_and_add():
    b, m, n, k = 2, 3, 5, 7
    got = single(
        lambda x, y: jnp.einsum(
            "bmk,bkn->bmn", x, y, preferred_element_type=jnp.float32
        ),
        array(b, m, k, dtype="bfloat16"),
        array(b, k, n, dtype="bfloat16"),
    )
    assert got.matrix_flops == (("bfloat16", 2 * b * m * n * k),)
    assert got.bytes_read == 2 * (b * m * k + b * k * n)
    assert got.bytes_written == FLOAT * b * m * n
    assert got.unpriced == ()


def test_convolution_counts_the_kernel_per_result():
    n, c, o, h, w, s, groups = 2, 4, 6, 9, 9, 3, 2
    out = h - s + 1
    got = single(
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "VALID", feature_group_count=groups
        ),
        array(n, c, h, w),
        array(o, c // groups, s, s),
    )
    flops = 2 * n * o * out * out * (c // groups) * s * s
    assert got.matrix_flops == (("float32", flops),)


@pytest.mark.parametrize("contract", [False, True])
def test_ragged_product_multiplies_each_row_with_one_group(contract):
    m, k, n, g = 8, 5, 3, 4
    sizes = array(g, dtype="int32")
    if contract:  # one (k, n) result per group, from its own rows
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        other = array(m, n)
    else:
        numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        other = array(g, k, n)
    got = single(
        functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers),
        array(m, k),
        other,
        sizes,
    )
    assert got.total_matrix_flops == 2 * m * k * n


def test_views_are_free_and_slices_touch_only_what_they_take():
    assert single(lambda x: x.reshape(4, 2), array(8)) == OperationCost()
    assert single(lambda x: lax.stop_gradient(x), array(8)) == OperationCost()
    got = single(lambda x: lax.slice(x, (0,), (16,)), array(1000))
    assert (got.bytes_read, got.bytes_written) == (16 * FLOAT, 16 * FLOAT)
    got = single(
        lambda x, u: lax.dynamic_update_slice(x, u, (3,)), array(1000), array(16)
    )
    assert got.bytes_written == 16 * FLOAT
    assert got.bytes_read == 16 * FLOAT + 4  # the update and one index


def test_a_broadcast_read_by_a_product_is_written_out_once():
    m, k = 8, 16
    got = cost(lambda v, x: jnp.broadcast_to(v, (m, k)) @ x, array(k), array(k, 4))
    assert got.bytes_written == FLOAT * (m * k + m * 4)


def test_solvers_have_textbook_operations():
    n, r = 12, 5
    a = array(n, n)
    cholesky = functools.partial(lax.linalg.cholesky, symmetrize_input=False)
    assert cost(cholesky, a).total_matrix_flops == math.ceil(n**3 / 3)
    assert single(lambda x: lax.linalg.lu(x), a).total_matrix_flops == math.ceil(
        2 * n**3 / 3
    )
    got = single(
        lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True), a, array(n, r)
    )
    assert got.total_matrix_flops == n**2 * r
    assert cost(jnp.linalg.eigh, a).vector_flops >= 9 * n**3


def test_the_sum_of_costs_keeps_dtypes_apart_and_names_once():
    one = OperationCost(matrix_flops=(("int8", 1),), bytes_read=2, unpriced=("a",))
    two = OperationCost(matrix_flops=(("float32", 5),), unpriced=("b", "a"))
    assert 3 * one + two == OperationCost(
        matrix_flops=(("float32", 5), ("int8", 3)), bytes_read=6, unpriced=("a", "b")
    )


# --- fusion -------------------------------------------------------------------------


def test_a_chain_of_elementwise_operations_is_one_pass():
    n = 1000
    got = cost(lambda x: jnp.tanh(jnp.sin(x) * x + 1) - x, array(n))
    assert (got.bytes_read, got.bytes_written) == (FLOAT * n, FLOAT * n)
    assert got.vector_flops == (10 + 1 + 1 + 10 + 1) * n


def test_a_softmax_reads_its_input_once_per_reduction_and_once_more():
    m, n = 64, 4096
    got = cost(jax.nn.softmax, array(m, n))
    assert 3 * m * n <= got.bytes_read / FLOAT <= 3.1 * m * n
    # exp(x - max) is wanted by the sum and by the division: written; then the result
    assert 2 * m * n <= got.bytes_written / FLOAT <= 2.1 * m * n


def test_a_product_reads_what_elementwise_operations_wrote():
    m = 32
    got = cost(lambda x, w: jnp.sin(x) @ w, array(m, m), array(m, m))
    assert got.bytes_read == FLOAT * (1 + 2) * m * m
    assert got.bytes_written == FLOAT * (1 + 1) * m * m


def test_what_is_no_array_is_neither_written_nor_read():
    chip = CHIPS["h100"]

    def forward(x, w):
        h = x @ w
        return jnp.sin(h), jnp.exp(h)  # the second for a backward pass

    jaxpr = jax.make_jaxpr(forward)(jnp.ones((4096, 4096)), jnp.ones((4096, 4096)))
    program = Program(jaxpr)
    _, _, exp = (node.outputs[0] for node in program.nodes)
    whole, less = (
        [spent for spent, _ in _cost.operation_seconds(program, chip, virtual=virtual)]
        for virtual in (frozenset(), {exp})
    )
    assert less[:2] == whole[:2]
    assert less[2] < 0.25 * whole[2]  # its arithmetic

    backward = jax.make_jaxpr(lambda g, e: g * e)(*jaxpr.out_avals)
    read = backward.jaxpr.invars[1:]
    one, both = (_cost.program_seconds(backward, chip, virtual=v) for v in (read, ()))
    assert one == pytest.approx(2 / 3 * both, rel=0.1)


def test_a_transposition_beside_a_product_is_free_and_elsewhere_is_not():
    m, n = 16, 48
    plain = cost(lambda x, w: x @ w, array(m, n), array(n, m))
    assert cost(lambda x, w: x @ w.T, array(m, n), array(m, n)) == plain
    alone = cost(lambda x: x.T, array(m, n))
    assert (alone.bytes_read, alone.bytes_written) == (FLOAT * m * n, FLOAT * m * n)


# --- loops and calls ----------------------------------------------------------------


def test_a_scan_counts_its_length_also_inside_a_scan():
    n, inner, outer = 8, 3, 5

    def nested(x):
        def body(c, _):
            return lax.scan(lambda c, _: (c @ c, None), c, None, length=inner)[0], None

        return lax.scan(body, x, None, length=outer)[0]

    got = cost(nested, array(n, n))
    assert got.total_matrix_flops == outer * inner * 2 * n**3
    assert got == outer * inner * cost(lambda x: x @ x, array(n, n))


@pytest.mark.parametrize(
    ("test", "step", "trips"),
    [
        (lambda i: i < 10, 3, 4),
        (lambda i: i <= 9, 3, 4),
        (lambda i: i > -10, -3, 4),
        (lambda i: i < -1, 1, 0),
    ],
)
def test_a_while_over_a_counter_is_counted(test, step, trips):
    n = 8

    def loop(x):
        return lax.while_loop(
            lambda c: test(c[0]), lambda c: (c[0] + step, c[1] @ c[1]), (0, x)
        )[1]

    got = cost(loop, array(n, n))
    assert got.total_matrix_flops == trips * 2 * n**3
    assert got.unpriced == ()


def test_a_while_over_data_is_priced_for_one_trip_and_listed():
    n = 8

    def loop(x):
        return lax.while_loop(lambda c: c.sum() < 7, lambda c: c @ c, x)

    got = cost(loop, array(n, n))
    assert got.total_matrix_flops == 2 * n**3
    assert got.unpriced == ("while (number of trips)",)


def test_a_cond_costs_its_dearest_branch():
    n = 8
    got = cost(
        lambda p, x: lax.cond(p, lambda x: x @ x @ x, lambda x: x @ x, x),
        array(dtype="bool"),
        array(n, n),
    )
    assert got.total_matrix_flops == 2 * 2 * n**3


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, "custom_vjp", "custom_jvp"])
def test_calls_cost_what_is_inside(wrap):
    def plain(x):
        return jnp.sin(x) @ x

    if wrap == "custom_vjp":
        wrapped = jax.custom_vjp(plain)
        wrapped.defvjp(lambda x: (plain(x), x), lambda x, g: (g,))
    elif wrap == "custom_jvp":
        wrapped = jax.custom_jvp(plain)
        wrapped.defjvp(lambda p, t: (plain(*p), t[0]))
    else:
        wrapped = wrap(plain)
    x = array(8, 8)
    assert cost(lambda x: wrapped(x) + 1, x) == cost(lambda x: plain(x) + 1, x)


def test_a_shard_map_counts_every_device_and_what_it_sends():
    devices = 1
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    m, n = 4, 8

    def body(x):
        return lax.psum(x @ x.T, "d")

    shard = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()
    )
    got = cost(shard, array(m, n))
    assert got.total_matrix_flops == 2 * m * m * n
    assert got.collective_bytes == 0  # alone in its group
    assert got.unpriced == ()


def test_ring_collectives_send_all_but_their_own_part():
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
    rows, columns, devices = 16, 2, 4
    local = FLOAT * rows * columns // devices

    split = PartitionSpec("d")

    def sent(body, out=split):
        shard = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=out)
        return cost(shard, array(rows, columns)).collective_bytes / devices

    assert sent(lambda x: lax.all_gather(x, "d", tiled=True)) == 3 * local
    assert sent(lambda x: lax.psum(x, "d"), PartitionSpec()) == 2 * local * 3 / 4
    assert sent(lambda x: lax.psum_scatter(x, "d", tiled=True)) == local * 3 / 4
    assert sent(lambda x: lax.ppermute(x, "d", [(0, 1)])) == local


# --- what cannot be known -----------------------------------------------------------


def test_an_unknown_primitive_is_listed_and_its_bytes_counted():
    unheard = jax_core.Primitive("unheard_of")
    unheard.def_abstract_eval(lambda x: x)
    n = 100
    got = cost(lambda x: unheard.bind(x), array(n))
    assert got.unpriced == ("unheard_of",)
    assert (got.bytes_read, got.bytes_written) == (FLOAT * n, FLOAT * n)
    ((spent, priced),) = _cost.operation_seconds(
        program_of(lambda x: unheard.bind(x), array(n)), CHIPS["h100"]
    )
    assert spent > 0
    assert not priced


def test_callbacks_and_foreign_calls_are_listed_by_name():
    x = array(8)
    call = jax.ffi.ffi_call("my_kernel", x)
    assert cost(call, x).unpriced == ("ffi_call:my_kernel",)
    back = functools.partial(jax.pure_callback, lambda x: x, x)
    assert cost(back, x).unpriced == ("pure_callback",)


def test_a_pallas_kernel_states_its_cost_or_is_listed():
    x, blocks = array(8, 8), 2

    def kernel(x, o):
        o[...] = x[...] @ x[...]

    def call(**options):
        return cost(pallas.pallas_call(kernel, out_shape=x, **options), x)

    estimate = pallas.CostEstimate(flops=50, transcendentals=3, bytes_accessed=600)
    told = call(cost_estimate=estimate)
    assert told.matrix_flops == (("float32", 50),)
    assert told.total_bytes == 600
    assert told.unpriced == ()
    untold = call(grid=(blocks,))
    assert untold.unpriced == ("pallas_call",)
    assert untold.total_matrix_flops == blocks * 2 * 8**3
    assert untold.total_bytes == 2 * FLOAT * 64


def known_primitives() -> set[str]:
    """Every primitive that JAX's own modules define."""
    prefixes = ("jax._src.lax", "jax._src.state", "jax._src.random", "jax._src.pallas")
    modules = [m for n, m in sys.modules.items() if n.startswith(prefixes)]
    extra = ("core", "ad_checkpoint", "pjit", "shard_map", "custom_derivatives", "ffi")
    modules += [sys.modules[f"jax._src.{n}"] for n in extra]
    return {
        value.name
        for module in (*modules, jax_primitives)
        for value in vars(module).values()
        if isinstance(value, jax_core.Primitive)
    }


def test_every_primitive_of_jax_is_priced_or_listed_on_purpose():
    known = known_primitives()
    assert {"dot_general", "scan", "exp", "random_bits", "shard_map"} <= known
    assert len(known) > 200
    decided = (
        set(_rules.RULES) | _rules.CALLS | _rules.LOOPS | _rules.LISTED | {"device_put"}
    )
    collectives = {
        n + suffix for n in _rules.COLLECTIVES for suffix in ("", "_start", "_done")
    }
    assert known - decided - collectives == set()


def test_no_name_is_decided_twice():
    tables = [
        set(_rules.RULES),
        _rules.CALLS,
        _rules.LOOPS,
        _rules.LISTED,
        set(_rules.COLLECTIVES),
    ]
    assert sum(map(len, tables)) == len(set().union(*tables))
