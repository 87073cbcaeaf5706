"""A repeated body as two programs: forward with residuals, and backward from them.

JAX itself says what the backward pass reads: `jax.vjp` of the body, traced, gives a
forward program whose extra outputs are the residuals, and a backward program that takes
them. Both are plain first-order programs in which derivative rules have been resolved,
so the residuals of a `custom_vjp` attention kernel or of an inner scan are values like
any other: they can be kept, offloaded or computed again.
"""

import dataclasses
import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax
from .._jaxprs._jaxpr import (
    Program,
    active_values,
    evaluate,
    inline,
    is_float,
    spec_of,
    trace,
)
from .._jaxprs._tiles import InBlocks, layer_in_blocks
from ._early_gradients import with_early_gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearizedBody:
    """The two programs of one body, for one choice of differentiated inputs.

    `forward` maps the body's inputs to its outputs followed by the residuals;
    `carry` are the numbers of the inputs that are carried;
    `blocks` are the wide products of which what they make runs in blocks;
    `residuals` are the distinct value numbers that the backward program reads;
    `backward` takes residual leaves, the cotangents of `active_outputs`, and what the
    constants among the differentiated inputs have got so far, and gives the cotangents
    of `active_inputs`.

    Constants get a share from every layer. The shares are added one by one onto what is
    there already, in the order in which plain JAX adds them: rounding is the same to
    the bit, which the sum of a layer's shares, added afterwards, would not be.
    """

    forward: Program
    output_count: int
    residual_leaves: tuple[Any, ...]
    backward: Any
    active_inputs: tuple[int, ...]
    active_outputs: tuple[int, ...]
    carry: range
    blocks: tuple[InBlocks, ...] = ()

    @property
    def residuals(self) -> tuple[int, ...]:
        """Distinct numbers of the values that the backward pass reads."""
        numbers = [r for r in self.residual_leaves if isinstance(r, int)]
        return tuple(dict.fromkeys(numbers))

    @property
    def output_numbers(self) -> list[int]:
        """Distinct numbers of the body's own outputs."""
        outputs = self.forward.outputs[: self.output_count]
        return list(dict.fromkeys(o for o in outputs if isinstance(o, int)))

    def outputs(self, values: dict[int, Any]) -> list[Any]:
        """The body's outputs, given their values by number."""
        return self.forward.read_outputs(values, self.output_count)

    @functools.cached_property
    def early(self) -> "LinearizedBody":
        """The body whose backward pass computes weights' gradients where they arise."""
        inputs = enumerate(self.active_inputs)
        weights = [k for k, i in inputs if i not in self.carry]
        backward = with_early_gradients(self.backward, weights)
        return dataclasses.replace(self, backward=backward)

    def pull_back(
        self,
        residuals: dict[int, Any],
        cotangents: Sequence[Any],
        totals: Sequence[Any],
    ) -> list[Any]:
        """Cotangents of the active inputs, from those of the active outputs.

        `totals` is what the active constants have got so far; their entries in the
        result are the new totals.
        """
        leaves = [
            residuals[leaf] if isinstance(leaf, int) else leaf.val
            for leaf in self.residual_leaves
        ]
        return evaluate(self.backward, [*leaves, *cotangents, *totals])


Linearize = Callable[[Any, Sequence[int], tuple[int, int], int], LinearizedBody]
"""`linearize_body` for a body, its `active_inputs`, its `carry` and its blocks."""

Linearized = MutableMapping[tuple[Any, ...], tuple[Any, LinearizedBody]]
"""Bodies that were split before, with their programs, by what tells them apart."""


def linearizer(keep_checkpoint: bool, known: Linearized | None = None) -> Linearize:
    """`linearize_body`, asked again only for what is not `known` yet.

    A step is replayed for every prediction, and a fourth of its calls went into
    splitting bodies that are what they were. A body is known by itself, the object: two
    of one structure may compute with other numbers.
    """

    def linearize(
        body: Any, active: Sequence[int], carry: tuple[int, int], blocks: int
    ) -> LinearizedBody:
        key = id(body), tuple(active), carry, keep_checkpoint, blocks
        if known is not None and key in known:
            return known[key][1]
        found = linearize_body(body, active, carry, lambda _: keep_checkpoint, blocks)
        # A value of the trace that is going on must not be seen by the next one.
        if known is not None and not any(map(_jax.is_tracer, found.forward.consts)):
            known[key] = body, found
        return found

    return linearize


def linearize_body(
    body: Any,
    active_inputs: Sequence[int],
    carry: tuple[int, int],
    keep_checkpoint: Callable[[Any], bool],
    blocks: int = 0,
) -> LinearizedBody:
    """Splits `body` into a forward and a backward program.

    **Arguments:** `body` is the closed jaxpr of one run; `active_inputs` are the
    numbers of the inputs to differentiate; `carry` says where the carry starts among
    the inputs and how many there are (its outputs come first); `keep_checkpoint` as for
    `evaluate`; wide products run in at most so many `blocks`, if there are any. The
    carry's activity is grown to a fixed point, since what a run makes active the next
    one reads.
    """
    flat = Program(inline(body, keep_checkpoint=keep_checkpoint))
    flat, products = layer_in_blocks(flat, blocks) if blocks else (flat, ())
    start, length = carry
    active = set(active_inputs)
    while True:
        reached = active_values(flat, sorted(active))
        # What is no value, a literal, cannot be looked up.
        made = {
            k
            for k, number in enumerate(flat.outputs)
            if isinstance(number, int) and number in reached
        }
        grown = active | {start + k for k in made if k < length}
        if grown == active:
            break
        active = grown
    inputs = tuple(sorted(active))
    outputs = tuple(
        k
        for k in range(len(flat.outputs))
        if (k < length and start + k in active) or (k >= length and k in made)
    )
    constants = sum(i < start for i in inputs)
    carried = range(start, start + length)
    found = _split(flat.jaxpr, inputs, outputs, constants, carried)
    return dataclasses.replace(found, blocks=products)


def _split(
    flat: Any,
    active_inputs: tuple[int, ...],
    active_outputs: tuple[int, ...],
    constants: int,
    carry: range,
) -> LinearizedBody:
    """The two programs; the first `constants` of the active inputs are constants.

    Constants are handed through as outputs of their own: the cotangents of those
    outputs are the totals that the layer's shares are added to.
    """
    specs = [spec_of(v.aval) for v in _jax.open_jaxpr(flat).invars]
    seen: dict[str, Any] = {}

    def forward(*inputs: Any) -> list[Any]:
        def primal(*active: Any) -> tuple[list[Any], list[Any]]:
            full = list(inputs)
            for number, value in zip(active_inputs, active, strict=True):
                full[number] = value
            out = evaluate(flat, full, keep_checkpoint=lambda equation: True)
            return [*(out[k] for k in active_outputs), *active[:constants]], out

        chosen = [inputs[i] for i in active_inputs]
        differentiated, pull_back, out = jax.vjp(primal, *chosen, has_aux=True)
        leaves, seen["structure"] = jax.tree.flatten(pull_back)
        seen["cotangents"] = [spec_of(_jax.aval_of(d)) for d in differentiated]
        seen["residuals"] = [spec_of(_jax.aval_of(leaf)) for leaf in leaves]
        return [*out, *leaves]

    program = Program(inline(trace(forward, *specs), keep_checkpoint=lambda e: True))
    count = len(_jax.open_jaxpr(flat).outvars)

    def backward(leaves: list[Any], cotangents: list[Any]) -> list[Any]:
        pull_back = jax.tree.unflatten(seen["structure"], leaves)
        return list(pull_back(cotangents))

    cotangents = [s.update(dtype=_tangent_dtype(s)) for s in seen["cotangents"]]
    return LinearizedBody(
        forward=program,
        output_count=count,
        residual_leaves=tuple(program.outputs[count:]),
        backward=trace(backward, seen["residuals"], cotangents),
        active_inputs=active_inputs,
        active_outputs=active_outputs,
        carry=carry,
    )


def _tangent_dtype(spec: jax.ShapeDtypeStruct) -> Any:
    return spec.dtype if is_float(spec) else np.dtype(jax.dtypes.float0)
