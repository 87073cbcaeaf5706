"""The tutorial's Adam step with its optimizer state in host memory: bytes and seconds.

Three programs per machine: everything on the device; the tutorial's own recipe; the
same step, unchanged, with its update streamed in blocks. Device totals are arguments +
outputs - aliased + temporaries of the compiled program, seconds come from its schedule.

    python -m benchmarks.adam_step

Prints a table. Bars: streamed, at most 3.07 GiB on h200 and 2.45 GiB on v5p-8; on
v5p-8, where the update waits for the link, waiting at most 1.1 times what the bytes of
the busier direction take. The second is missed by 0.04, with all of the state off the
device: libtpu's temporaries add up places that overlap (docs/notes.md).
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
from typing import Any

import jax

import stowax
from benchmarks import _record
from benchmarks.models import adam_tutorial
from stowax._jaxprs._jaxpr import trace
from stowax._survey._options import overlap_options
from stowax._target._machine import Target
from stowax._update._find import stream_update
from stowax._update._run import run_streamed

BARS = {"h200": 3.07, "v5p-8": 2.45}


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


def row(machine: Target, name: str, compiled: Any) -> tuple[Any, ...]:
    """What a compiled program needs, and how long it waits for copies."""
    found = stowax.inspect(compiled)
    timeline = found.timeline
    link = max(timeline.device_to_host_seconds, timeline.host_to_device_seconds)
    on_host = sum(hazard.kind == "host-compute" for hazard in found.hazards)
    asynchronous = all(t.asynchronous for t in found.transfers if t.bytes >= 2**16)
    return (
        machine.name,
        name,
        _record.gib(found.memory.device.total),
        _record.gib(found.memory.host.total),
        f"{timeline.step_seconds * 1e3:.1f}",
        f"{timeline.exposed_seconds * 1e3:.1f}",
        f"{link * 1e3:.1f}",
        on_host,
        "yes" if asynchronous else "no",
    )


HEAD = (
    "target",
    "state",
    "device GiB",
    "host GiB",
    "step ms",
    "waiting ms",
    "busier link ms",
    "host computations",
    "copies asynchronous",
)


def main() -> None:
    """Compiles the three programs for each target and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=BARS)
    parser.add_argument("--streamed", action="store_true", help="only the last program")
    options = parser.parse_args()
    rows = []
    for name in options.target or BARS:
        machine = stowax.target(name)
        step, recipe = adam_tutorial.step, adam_tutorial.offloaded_step
        if not options.streamed:
            plain = whole(machine, step, "device", (0, 1))
            rows.append(row(machine, "on the device", plain))
            tutorial = whole(machine, recipe, "pinned_host", (0,))
            rows.append(row(machine, "offloaded, tutorial", tutorial))
        mine = streamed(machine, step, adam_tutorial.arguments())
        rows.append(row(machine, f"streamed (bar {BARS[name]})", mine))
    print(_record.table(HEAD, rows), end="")


if __name__ == "__main__":
    main()
