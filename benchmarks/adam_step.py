"""The tutorial's Adam step with its optimizer state in host memory: bytes and seconds.

Three programs per machine: everything on the device; the tutorial's own recipe; the
same step, unchanged, with its update streamed in blocks. Device totals are arguments +
outputs - aliased + temporaries of the compiled program, seconds come from its schedule.

    python -m benchmarks adam_step --target h200

Bars: streamed, at most 3.07 GiB on h200 and 2.45 GiB on v5p-8; on
v5p-8, where the update waits for the link, waiting at most 1.1 times what the bytes of
the busier direction take. The second is missed by 0.04, with all of the state off the
device: libtpu's temporaries add up places that overlap (docs/notes.md).
"""

import argparse
from collections.abc import Callable
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


def found_in(compiled: Any) -> dict[str, Any]:
    """What a compiled program needs, and how long it waits for copies."""
    found = stowax.inspect(compiled)
    timeline = found.timeline
    link = max(timeline.device_to_host_seconds, timeline.host_to_device_seconds)
    large = [t for t in found.transfers if t.bytes >= 2**16]
    return {
        "device_bytes": found.memory.device.total,
        "host_bytes": found.memory.host.total,
        "step_seconds": timeline.step_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "link_seconds": link,
        "host_computations": sum(h.kind == "host-compute" for h in found.hazards),
        "asynchronous": all(transfer.asynchronous for transfer in large),
    }


WAYS: dict[str, Callable[[Target], Any]] = {
    "on the device": lambda m: whole(m, adam_tutorial.step, "device", (0, 1)),
    "offloaded, tutorial": lambda m: whole(
        m, adam_tutorial.offloaded_step, "pinned_host", (0,)
    ),
    "streamed": lambda m: streamed(m, adam_tutorial.step, adam_tutorial.arguments()),
}
_COLUMNS = {
    "target": lambda c: c["target"],
    "state": lambda c: c["way"],
    "device GiB": lambda c: _record.gib(c["device_bytes"]),
    "host GiB": lambda c: _record.gib(c["host_bytes"]),
    "step ms": lambda c: f"{c['step_seconds'] * 1e3:.1f}",
    "waiting ms": lambda c: f"{c['exposed_seconds'] * 1e3:.1f}",
    "busier link ms": lambda c: f"{c['link_seconds'] * 1e3:.1f}",
    "host computations": lambda c: c["host_computations"],
    "copies asynchronous": lambda c: "yes" if c["asynchronous"] else "no",
}


def page(records: _record.Records) -> str:
    """The table."""
    whole = [cell for cell in records.cells.values() if "error" not in cell]
    bars = " and ".join(f"{bar} GiB on {target}" for target, bar in BARS.items())
    return (
        f"# The tutorial's Adam step, its state streamed\n\n{records.provenance()}\n"
        "Bytes are compiled, milliseconds simulated from the schedules. Streamed, it "
        f"is to take at most {bars}.\n\n{_record.columns(_COLUMNS, whole)}"
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", action="append", choices=BARS)
    parser.add_argument("--way", action="append", choices=WAYS)


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """The programs that were asked for, compiled."""
    for target in asked.target or BARS:
        for way in asked.way or WAYS:
            records.made(
                _record.cell_name(target, way),
                lambda t=target, w=way: found_in(WAYS[w](stowax.target(t))),
                {"target": target, "way": way},
            )
