"""Cost rules of matrix products, convolutions, attention, transforms and solvers.

Every rule maps an equation to `(matrix_flops, vector_flops)`; bytes are counted by the
engine (operands read once, results written once). Multiply and add count as two.
Formulas without another source are of Golub and Van Loan, *Matrix Computations*, 4th
edition. What is written in products of blocks (LU, Cholesky, QR, triangular solves)
goes to the matrix unit; what iterates on vectors (eigenvalues, singular values) does
not.
"""

import math
from collections.abc import Callable
from typing import Any

from ._record import size_of

Flops = tuple[tuple[tuple[str, int], ...], int]
FlopRule = Callable[[Any], Flops]


def _real(dtype: Any) -> tuple[str, int]:
    """The real dtype that products of `dtype` consist of, and how many per one."""
    name = str(dtype)
    if name.startswith("complex"):
        return {"complex64": "float32", "complex128": "float64"}[name], 4
    return name, 1


def _product(equation: Any, flops: int) -> Flops:
    """`flops` of the wider of the two operands' types: the narrower is converted."""
    dtype = max(
        (v.aval.dtype for v in equation.invars[:2]), key=lambda dtype: dtype.itemsize
    )
    name, factor = _real(dtype)
    return ((name, flops * factor),), 0


def _dot_general(equation: Any) -> Flops:
    """2·(elements of the result)·(length of the contraction) = 2·B·M·N·K."""
    (contracting, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval.shape
    length = math.prod(lhs[d] for d in contracting)
    return _product(equation, 2 * size_of(equation.outvars[0].aval) * length)


def _scaled_dot(equation: Any) -> Flops:
    """As `dot_general`: the scales are applied on the way."""
    lhs = equation.invars[0].aval
    numbers = equation.params.get("dimension_numbers")
    contracting = numbers[0][0] if numbers is not None else (len(lhs.shape) - 1,)
    length = math.prod(lhs.shape[d] for d in contracting)
    return _product(equation, 2 * size_of(equation.outvars[0].aval) * length)


def _ragged_dot(equation: Any) -> Flops:
    """Every row (or every contracted element) meets one group's matrix only."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    lhs, _, groups = (v.aval for v in equation.invars[:3])
    length = math.prod(lhs.shape[d] for d in contracting)
    elements = size_of(equation.outvars[0].aval)
    if set(numbers.lhs_ragged_dimensions) & set(contracting):
        # One result per group, each over its own share of the contraction.
        elements //= max(1, groups.shape[-1])
    return _product(equation, 2 * elements * length)


def _convolution(equation: Any) -> Flops:
    """2·(elements of the result)·(elements of the kernel that one of them meets).

    Zeros inserted by `lhs_dilation` are not multiplied; padding is counted as if it
    were.
    """
    params = equation.params
    kernel = equation.invars[1].aval
    out_features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    met = size_of(kernel) // max(1, out_features)
    flops = 2 * size_of(equation.outvars[0].aval) * met
    return _product(equation, flops // math.prod(params["lhs_dilation"]))


def _attention(products: int) -> FlopRule:
    """Attention by cuDNN: `products` matrix products over queries × keys.

    Two forward (scores, values), five backward (scores again, and the gradients of
    values, scores, queries, keys). Masks are not taken off. Keys may
    have fewer heads, so the count uses the queries' elements and the keys' length.
    """

    def rule(equation: Any) -> Flops:
        query, key = (v.aval for v in equation.invars[:2])
        # Axes are (batch, length, heads, depth), or (batch, heads, length, depth) with
        # `layout` 1 (cuDNN's BNTH).
        layout = equation.params.get("layout")
        length = key.shape[2 if layout == 1 else 1]
        return _product(equation, 2 * products * size_of(query) * length)

    return rule


def _fft(equation: Any) -> Flops:
    """5·N·log2 N per complex transform, half of it for real ones (Cooley and Tukey)."""
    lengths = equation.params["fft_lengths"]
    points = math.prod(lengths)
    batch = max(size_of(v.aval) for v in (equation.invars[0], equation.outvars[0]))
    real = "IRFFT" in str(equation.params["fft_type"]) or "RFFT" in str(
        equation.params["fft_type"]
    )
    operations = 5 * max(batch, points) * math.log2(max(2, points))
    return (), math.ceil(operations / 2 if real else operations)


def _shape(equation: Any) -> tuple[int, int, int]:
    """Batch, rows and columns of the first operand."""
    shape = equation.invars[0].aval.shape
    if len(shape) < 2:
        return 1, max(1, math.prod(shape)), 1
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def _solver(formula: Callable[[int, int], float], *, matrix: bool) -> FlopRule:
    """A rule from operations as a function of rows m and columns n."""

    def rule(equation: Any) -> Flops:
        batch, m, n = _shape(equation)
        name, factor = _real(equation.invars[0].aval.dtype)
        flops = math.ceil(batch * formula(m, n) * factor)
        return (((name, flops),), 0) if matrix else ((), flops)

    return rule


def _lu(m: int, n: int) -> float:
    k = min(m, n)
    return 2 * (m * n * k - (m + n) * k**2 / 2 + k**3 / 3)


def _qr(m: int, n: int) -> float:
    k = min(m, n)
    return 4 * (m * n * k - (m + n) * k**2 / 2 + k**3 / 3)


def _form_q(m: int, n: int) -> float:
    return 4 * m * n * min(m, n)  # upper bound of 4mnk - 2(m+n)k² + 4k³/3


def _svd(m: int, n: int) -> float:
    m, n = max(m, n), min(m, n)
    return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3


def _triangular_solve(equation: Any) -> Flops:
    """n² per right-hand side."""
    triangle, sides = (v.aval for v in equation.invars[:2])
    name, factor = _real(triangle.dtype)
    return ((name, size_of(sides) * triangle.shape[-1] * factor),), 0


def _symmetric_product(equation: Any) -> Flops:
    """2·n·n·k for A·Aᵀ of an n × k matrix."""
    batch, n, k = _shape(equation)
    return _product(equation, 2 * batch * n * n * k)


LINEAR_FLOPS: dict[str, FlopRule] = {
    "dot_general": _dot_general,
    "scaled_dot": _scaled_dot,
    "scaled_matmul": _scaled_dot,
    "scaled_matmul_wrapper": _scaled_dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd": _attention(2),
    "dot_product_attention_fwd_wrapper": _attention(2),
    "dot_product_attention_fp8_fwd": _attention(2),
    "dot_product_attention_fp8_fwd_wrapper": _attention(2),
    "dot_product_attention_bwd": _attention(5),
    "dot_product_attention_bwd_wrapper": _attention(5),
    "dot_product_attention_fp8_bwd": _attention(5),
    "dot_product_attention_fp8_bwd_wrapper": _attention(5),
    "symmetric_product": _symmetric_product,
    "triangular_solve": _triangular_solve,
    "cholesky": _solver(lambda _, n: n**3 / 3, matrix=True),
    "cholesky_update": _solver(lambda _, n: 6 * n**2, matrix=False),
    "lu": _solver(_lu, matrix=True),
    "qr": _solver(lambda m, n: _qr(m, n) + _form_q(m, n), matrix=True),
    "geqrf": _solver(_qr, matrix=True),
    "geqp3": _solver(_qr, matrix=True),
    "householder_product": _solver(_form_q, matrix=True),
    "ormqr": _solver(_form_q, matrix=True),
    "eigh": _solver(lambda _, n: 9 * n**3, matrix=False),
    "eig": _solver(lambda _, n: 25 * n**3, matrix=False),
    "schur": _solver(lambda _, n: 25 * n**3, matrix=False),
    "hessenberg": _solver(lambda _, n: 10 * n**3 / 3, matrix=False),
    "tridiagonal": _solver(lambda _, n: 4 * n**3 / 3, matrix=False),
    "svd": _solver(_svd, matrix=False),
    "tridiagonal_solve": lambda e: ((), 8 * size_of(e.outvars[0].aval)),
    "lu_pivots_to_permutation": lambda e: ((), 2 * size_of(e.outvars[0].aval)),
    "fft": _fft,
}
"""Primitive to `(matrix_flops, vector_flops)`, over all devices together."""
