"""State that is made where a plan wants it.

Optimizer state that is made on the device before it is offloaded needs the memory that
there is not. One program that makes all of it in host memory is no help: XLA makes
several arrays before the first one leaves. So the function is cut up: what belongs in
host memory is made by programs of their own, a few arrays each, one after the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._calling._calling import Flat, flattened, take
from .._calling._known import known
from .._calling._objects import together
from .._errors import ArgumentError
from .._jaxprs._jaxpr import evaluate
from .._records._plan import ArgumentRecord
from .._state._places import Kind, planned_kinds, put, sharding_in
from .._state._shards import device_bytes

PROGRAMS = 16
"""How many programs make what belongs in host memory, unless one array is larger."""


def initialized(
    records: Sequence[ArgumentRecord],
    init: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """What `init` returns, each array where the records say.

    **Raises:** `ArgumentError` if it returns none of the state in host memory.
    """
    with together():
        taken, _, flat = flattened(known(init), args, kwargs)
        traced = jax.jit(flat).trace(*taken.arrays)
        lowered = traced.lower()
        specs, structure = jax.tree.flatten(lowered.out_info)
        specs = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
        kinds = _kinds(records, flat, jax.tree.unflatten(structure, specs))
        hosted = any(record.memory_kind != "device" for record in records)
        if hosted and not any(map(_is_hosted, kinds)):
            raise ArgumentError(
                "init",
                f"{getattr(init, '__name__', init)}, which returns none of what the "
                "plan has in host memory",
                "Give the function that makes the step's state: one of its arguments, "
                "or a tuple of them.",
            )
        spread = jax.tree.leaves(lowered.compile().output_shardings)
        wanted = [
            sharding_in(sharding, kind.memory) if kind else sharding
            for sharding, kind in zip(spread, kinds, strict=True)
        ]
        out: list[Any] = [None] * len(kinds)
        for numbers, program in programs(traced.jaxpr, kinds, wanted):
            made = program(*jax.tree.leaves(taken.arrays))
            for number, leaf in zip(numbers, made, strict=True):
                out[number] = put(leaf, kinds[number]) if kinds[number] else leaf
            jax.block_until_ready(made)
        whole = jax.tree.unflatten(structure, out)
        return flat.give(whole) if isinstance(flat, Flat) else whole


def programs(
    jaxpr: Any, kinds: Sequence[Kind | None], shardings: Sequence[Any]
) -> Iterator[tuple[list[int], Any]]:
    """`(which results, a jitted function that makes them)`, all of them in the end."""
    results = _jax.open_jaxpr(jaxpr).outvars
    sizes = [
        device_bytes(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s))
        for v, s in zip(results, shardings, strict=True)
    ]
    host = [k for k, kind in enumerate(kinds) if _is_hosted(kind)]
    most = sum(sizes[k] for k in host) / PROGRAMS
    parts: list[list[int]] = [[k for k in range(len(kinds)) if k not in {*host}]]
    for k in host:
        if len(parts) == 1 or sum(sizes[n] for n in (*parts[-1], k)) > most:
            parts.append([])
        parts[-1].append(k)
    for numbers in filter(None, parts):

        def made(*values: Any, numbers: list[int] = numbers) -> list[Any]:
            out = evaluate(jaxpr, values, keep_checkpoint=lambda _: True)
            return [out[k] for k in numbers]

        yield numbers, jax.jit(made, out_shardings=[shardings[k] for k in numbers])


def _is_hosted(kind: Kind | None) -> bool:
    return kind is not None and kind.memory != "device"


def _kinds(
    records: Sequence[ArgumentRecord], flat: Any, specs: Any
) -> list[Kind | None]:
    """Where each array belongs: of one of the step's arguments, or of several."""
    out = flat.give(specs) if isinstance(flat, Flat) else specs
    count = len(jax.tree.leaves(specs))
    found: list[Kind | None] = [None] * count
    for args in ((out,), out if isinstance(out, tuple | list) else ()):
        arrays = take(tuple(args), {}, known(planned_kinds)).arrays
        kinds = planned_kinds(records, arrays)
        if len(kinds) == count and any(kinds):
            return kinds
    return found
