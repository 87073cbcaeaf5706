"""The tutorial's Adam step, compiled as it is and with its state in host memory."""

from typing import Any

import jax

from benchmarks.models import adam_tutorial
from stowax._jaxprs._jaxpr import trace
from stowax._survey._options import overlap_options
from stowax._target._machine import Target
from stowax._update._find import stream_update
from stowax._update._run import run_streamed


def placed(machine: Target, specs: Any, kind: str = "device") -> Any:
    """`specs` in one kind of memory of one device; scalars always on the device."""

    def place(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        memory = kind if spec.ndim else "device"
        return spec.update(sharding=machine.sharding(memory_kind=memory))

    return jax.tree.map(place, specs)


def whole(machine: Target, function: Any, kind: str, donate: Any) -> Any:
    """One of the tutorial's own programs, compiled."""
    params, state, inputs = adam_tutorial.arguments()
    specs = placed(machine, params), placed(machine, state, kind)
    out = jax.tree.map(lambda spec: spec.sharding, specs)
    jitted = jax.jit(function, donate_argnums=donate, out_shardings=out)
    return machine.compile(jitted, *specs, placed(machine, inputs))


def streamed(machine: Target, step: Any, arguments: Any, options: Any = None) -> Any:
    """`step(params, state, inputs)`, compiled with its state in host memory."""
    leaves, structure = jax.tree.flatten(arguments)
    first, last = (len(jax.tree.leaves(arguments[:k])) for k in (1, 2))
    flat = trace(
        lambda *args: jax.tree.leaves(step(*jax.tree.unflatten(structure, args))),
        *leaves,
    )
    found = stream_update(flat, {i: i for i in range(first, last)})
    kinds = ["pinned_host" if i in found.host_inputs else "device" for i in range(last)]
    state = [machine.sharding(memory_kind=kind) for kind in kinds]
    others = [machine.sharding()] * (len(leaves) - last)
    specs = [
        spec.update(sharding=s)
        for spec, s in zip(leaves, [*state, *others], strict=True)
    ]
    jitted = jax.jit(
        lambda *args: run_streamed(found, args, in_turn=machine.platform != "tpu"),
        donate_argnums=tuple(range(last)),
        out_shardings=state,
    )
    options = overlap_options(machine) if options is None else options
    return machine.compile(jitted, *specs, compiler_options=options)
