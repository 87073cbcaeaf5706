"""The rules: primitive name to what the operation takes, and how it joins with others.

`_cost` looks names up here and does all counting of bytes; a rule says only how many
operations there are, how much of each operand is touched, and the `kind`:

- `view`: moves nothing (a reshape, a name, a barrier);
- `fusible`: elementwise, and the movement that XLA folds into elementwise loops;
- `reduction`: joins with what makes its operands, its result starts a new loop;
- `kernel`: reads its operands from memory and writes its results there.

A name that is in no table becomes a kernel that is *listed*: its bytes are counted and
its name is reported. So is everything in `LISTED`, whose work cannot be known from the
jaxpr. Adding a rule is adding a line here; of matrix products, solvers and transforms
in `LINEAR_FLOPS` (`_linear`), of control flow in `LOOPS` and in `_cost`, which also
makes seconds of operations and bytes, by the chip.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ._linear import LINEAR_FLOPS, Flops
from ._record import bytes_of, size_of

Kind = Literal["view", "fusible", "reduction", "kernel"]

TRANSCENDENTAL = 10
"""Vector operations per exponential, logarithm, sine, …: assumed (a range reduction and
a polynomial of degree 5 to 8)."""

SPECIAL = 200
"""Vector operations per gamma, beta, Bessel or zeta function: assumed (series with tens
of terms)."""

HASH_PAIR = 115
"""Vector operations per Threefry-2x32 block of two words: 20 rounds of an addition, a
rotation (three operations) and an exclusive or, and five key injections of three
additions (Salmon and others, *Parallel random numbers: as easy as 1, 2, 3*, 2011)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one primitive is priced.

    `flops(equation)` gives `(matrix_flops, vector_flops)`; `reads(equation)` and
    `writes(equation)` give bytes touched where that is not all of it: a number for each
    operand, and for each result.
    """

    kind: Kind
    flops: Callable[[Any], Flops] = lambda equation: ((), 0)
    reads: Callable[[Any], Sequence[int]] | None = None
    writes: Callable[[Any], Sequence[int]] | None = None


def operand_bytes(equation: Any) -> list[int]:
    """Bytes of every operand."""
    return [bytes_of(v.aval) for v in equation.invars]


def result_bytes(equation: Any) -> list[int]:
    """Bytes of every result."""
    return [bytes_of(v.aval) for v in equation.outvars]


def _results(equation: Any) -> int:
    return sum(size_of(v.aval) for v in equation.outvars)


def _operands(equation: Any) -> int:
    return sum(size_of(v.aval) for v in equation.invars)


def _each(weight: int) -> Callable[[Any], Flops]:
    """`weight` vector operations per element of the results."""
    return lambda equation: ((), weight * _results(equation))


def _integer_pow(equation: Any) -> Flops:
    """Repeated squaring: one product per bit, one more per set bit after the first."""
    power = abs(int(equation.params["y"]))
    products = max(1, power.bit_length() + power.bit_count() - 2)
    return (), products * _results(equation)


def _polynomial(equation: Any) -> Flops:
    """Horner's rule: a product and an addition per coefficient."""
    terms = len(equation.params.get("coeffs", ())) or TRANSCENDENTAL
    return (), 2 * terms * _results(equation)


def _reduction(weight: int) -> Callable[[Any], Flops]:
    """A tree over n elements has n - 1 inner nodes."""

    def rule(equation: Any) -> Flops:
        elements = size_of(equation.invars[0].aval)
        return (), weight * max(1, elements - size_of(equation.outvars[0].aval))

    return rule


def _window(equation: Any) -> Flops:
    """Every result looks at a whole window."""
    return (), _results(equation) * math.prod(equation.params["window_dimensions"])


def _window_gradient(equation: Any) -> Flops:
    """Each cotangent looks through its window and adds one element."""
    window = math.prod(equation.params["window_dimensions"])
    return (), size_of(equation.invars[0].aval) * (window + 1)


def _scan_along_axis(equation: Any) -> Flops:
    """A work-efficient parallel prefix takes two operations per element."""
    return (), 2 * _operands(equation)


def _sort(equation: Any) -> Flops:
    """n·log2 n comparisons along the sorted axis, each moving all operands."""
    axis = equation.params.get("dimension", equation.params.get("axis", -1))
    shape = equation.invars[0].aval.shape
    length = shape[axis] if shape else 1
    return (), _operands(equation) * max(1, math.ceil(math.log2(max(2, length))))


def _hash(words_per_pair: int) -> Callable[[Any], Flops]:
    def rule(equation: Any) -> Flops:
        words = max(1, sum(result_bytes(equation)) // 4)
        return (), HASH_PAIR * math.ceil(words / words_per_pair)

    return rule


def _only_results(equation: Any) -> list[int]:
    """Of the first operand no more is read than comes out; the rest are indices."""
    first, *rest = operand_bytes(equation)
    return [min(first, sum(result_bytes(equation))), *rest]


def _update_reads(equation: Any) -> list[int]:
    """In place: the operand is not read; the update and its indices are."""
    _, *rest = operand_bytes(equation)
    return [0, *rest]


def _update_writes(equation: Any) -> list[int]:
    return [operand_bytes(equation)[1]]


def _scatter_reads(equation: Any) -> list[int]:
    """Operands are (operand, indices, updates); combining reads what it changes."""
    _, indices, updates = operand_bytes(equation)[:3]
    return [0 if equation.primitive.name == "scatter" else updates, indices, updates]


def _scatter_writes(equation: Any) -> list[int]:
    return [operand_bytes(equation)[2]]


def _scatter_flops(equation: Any) -> Flops:
    return (), size_of(equation.invars[2].aval)


def _device_put_kind(equation: Any) -> Kind:
    """Without a place to go to it is the identity; otherwise a copy."""
    places = equation.params.get("devices", (None,))
    return "view" if all(p is None for p in places) else "kernel"


def _names(text: str) -> list[str]:
    return text.split()


_VIEWS = _names("""
    reshape broadcast_in_dim broadcast_to squeeze bitcast_convert_type stop_gradient
    name shard_alike sharding_constraint layout_constraint optimization_barrier
    with_memory_space_constraint pvary preduced reduced_vary_cast reduced_vary_cast_p
    vary_unreduced_cast vary_unreduced_cast_p random_wrap random_unwrap random_clone
    axis_index platform_index program_id num_programs create_token after_all
    dimension_size dim_as_value multiple_of shape_assertion to_edtype from_edtype pin
    unpin tie dce_sink zeros_like empty empty2 empty_ref new_ref free_ref freeze
    get_global create_linear stage xla_metadata_value unreachable inspect_sharding check
    delay
""")

_SIMPLE = _names("""
    add add_any sub mul neg abs sign max min and or xor not eq ne lt le gt ge eq_to
    lt_to le_to select_n clamp convert_element_type reduce_precision is_finite floor
    ceil round shift_left shift_right_logical shift_right_arithmetic square
    one_minus_square complex conj real imag iota nextafter population_count clz mulhi
    iota_2x32_shape
""")

_ROOTS = _names("div rem sqrt rsqrt reciprocal")

_TRANSCENDENTALS = _names("""
    exp exp2 expm1 log log1p log2 logistic tanh sin cos tan asin acos atan atan2 sinh
    cosh asinh acosh atanh pow cbrt erf erfc erf_inv
""")

_SPECIALS = _names("""
    lgamma digamma polygamma igamma igammac igamma_grad_a zeta bessel_i0e bessel_i1e
    regularized_incomplete_beta
""")

_MOVES = _names("slice split unstack rev dynamic_slice")
_JOINS = _names("transpose concatenate stack pad tile")

_REDUCTIONS = _names("""
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce
""")

_WINDOWS = _names("""
    reduce_window reduce_window_sum reduce_window_max reduce_window_min
    select_and_gather_add
""")

_PREFIXES = _names("cumsum cumprod cummax cummin cumlogsumexp")

_SCATTERS = _names("scatter-add scatter-sub scatter-mul scatter-min scatter-max")

_COPIES = _names("copy get swap masked_load masked_swap")

_HASHES = _names("""
    threefry2x32 random_seed random_split random_fold_in threefry4x32 philox2x32
    philox4x32 rng_bit_generator rng_uniform
""")


def _table() -> dict[str, Rule]:
    rules = dict.fromkeys(_VIEWS, Rule(kind="view"))
    rules |= dict.fromkeys(_SIMPLE, Rule(kind="fusible", flops=_each(1)))
    rules |= dict.fromkeys(_ROOTS, Rule(kind="fusible", flops=_each(4)))
    rules |= dict.fromkeys(
        _TRANSCENDENTALS, Rule(kind="fusible", flops=_each(TRANSCENDENTAL))
    )
    rules |= dict.fromkeys(_SPECIALS, Rule(kind="fusible", flops=_each(SPECIAL)))
    rules |= dict.fromkeys(_MOVES, Rule(kind="fusible", reads=_only_results))
    rules |= dict.fromkeys(_JOINS, Rule(kind="fusible"))
    rules |= dict.fromkeys(_REDUCTIONS, Rule(kind="reduction", flops=_reduction(1)))
    arg = Rule(kind="reduction", flops=_reduction(2))
    rules |= dict.fromkeys(("argmax", "argmin"), arg)
    rules |= dict.fromkeys(_WINDOWS, Rule(kind="kernel", flops=_window))
    rules |= dict.fromkeys(_PREFIXES, Rule(kind="kernel", flops=_scan_along_axis))
    combine = Rule(
        kind="kernel",
        flops=_scatter_flops,
        reads=_scatter_reads,
        writes=_scatter_writes,
    )
    rules |= dict.fromkeys(_SCATTERS, combine)
    rules |= dict.fromkeys(_COPIES, Rule(kind="kernel"))
    rules |= dict.fromkeys(_HASHES, Rule(kind="fusible", flops=_hash(2)))
    rules |= {n: Rule(kind="kernel", flops=f) for n, f in LINEAR_FLOPS.items()}
    update = Rule(kind="kernel", reads=_update_reads, writes=_update_writes)
    sort = Rule(kind="kernel", flops=_sort)
    return rules | {
        "integer_pow": Rule(kind="fusible", flops=_integer_pow),
        "polynomial": Rule(kind="fusible", flops=_polynomial),
        # Partitionable Threefry hashes a counter of its own for every word.
        "random_bits": Rule(kind="fusible", flops=_hash(1)),
        "select_and_scatter": Rule(kind="kernel", flops=_window_gradient),
        "select_and_scatter_add": Rule(kind="kernel", flops=_window_gradient),
        "scatter": dataclasses.replace(combine, flops=lambda equation: ((), 0)),
        "gather": Rule(kind="kernel", reads=_only_results),
        "dynamic_update_slice": update,
        "addupdate": Rule(kind="kernel", flops=_each(1)),
        "accum_grad_in_ref": Rule(kind="kernel", flops=_each(1)),
        "sort": sort,
        "top_k": sort,
        "approx_top_k": Rule(kind="kernel", flops=lambda e: ((), 2 * _operands(e))),
    }


RULES: dict[str, Rule] = _table()
"""Every primitive with a rule of its own."""

CALLS = frozenset(
    _names("""
    jit pjit closed_call core_call call jaxpr_call remat remat2 checkpoint remat_opt
    custom_jvp_call custom_jvp_call_jaxpr custom_vjp_call custom_vjp_call_jaxpr
    custom_vmap_call custom_partitioning linear_call composite xla_metadata_call
    eval_jaxpr cudnn_fusion compute_on
    """)
)
"""Calls whose inner equations are priced in their place."""

LOOPS = frozenset(("scan", "while", "cond", "shard_map", "custom_linear_solve"))
"""Control flow: the inner program times how often it runs."""

LISTED = frozenset(
    _names("""
    pallas_call ffi_call pure_callback io_callback debug_callback debug_print
    call_exported call_hi_primitive call_hi_primitive_linearized core_map mpmd_map
    run_state run_scoped custom_lin random_gamma psend precv semaphore_read
    semaphore_signal semaphore_wait box_get box_set new_box log_extend log_read new_log
    relayout
    """)
)
"""Listed on purpose: what they do stands in no jaxpr, or depends on the data."""

_COLLECTIVE_KINDS = {
    "all-reduce": "psum pmax pmin psum_invariant unreduced_psum unreduced_pmax "
    "unreduced_pmin",
    "gather": "all_gather all_gather_invariant all_gather_reduced reshard",
    "scatter": "reduce_scatter unreduced_reduce_scatter all_to_all ragged_all_to_all",
    "send": "ppermute pbroadcast pbroadcast_dynamic",
}

COLLECTIVES = {
    name: kind for kind, names in _COLLECTIVE_KINDS.items() for name in names.split()
}
"""Primitives that talk to other devices; a `_start` variant costs, a `_done` does
not."""


def collective_bytes(equation: Any, kind: str, devices: int | None) -> int:
    """Bytes that one device sends, for `devices` in the group (`None`: unknown, many).

    Ring algorithms: an all-gather and a reduce-scatter send all parts but one's own, an
    all-reduce is one of each (Thakur, Rabenseifner and Gropp, *Optimization of
    collective communication operations in MPICH*, 2005).
    """
    sent, received = sum(operand_bytes(equation)), sum(result_bytes(equation))

    def others(size: int) -> int:
        return size if devices is None else math.ceil(size * (devices - 1) / devices)

    return {
        "all-reduce": 2 * others(sent),
        "gather": others(received),
        "scatter": others(sent),
        "send": sent,
    }[kind]


def rule_of(equation: Any) -> Rule | None:
    """The rule of an equation's primitive, or `None` where there is none."""
    name = equation.primitive.name
    if name == "device_put":
        return Rule(kind=_device_put_kind(equation))
    if name.endswith("_done") and name.removesuffix("_done") in COLLECTIVES:
        return Rule(kind="view")
    return RULES.get(name)
