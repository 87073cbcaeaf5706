"""Simulated steps of Llama2-13B beside figures that were worked out by hand.

Before there was a simulator, the step time of a few programs was read off their
compiled schedules by hand: the compiler's cycle estimates in the order of the schedule
over 1.75 GHz, loop bodies times their trips, one host link, and a `-done` waits for its
copy. Here the same programs are compiled again and simulated under the same
assumptions: loss and gradients, 40 layers, 32 × 2048 tokens, 4 chips (FSDP), plain
attention with its scores in float32, under JAX's own checkpoint policies.

Beside the seconds, the bytes: what the schedule's copies move, trips counted, against
what the policy says has to be moved. The compiler peels iterations off these loops.

    python -m benchmarks simulation --program "q, k, v offloaded"

A compile takes a minute or two on two idle cores.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import stowax
from benchmarks import _record
from benchmarks._record import gib
from benchmarks.models import _layers, llama
from stowax._hardware._hardware import CHIPS
from stowax._hlo._program import read_program
from stowax._records._program import Program
from stowax._records._stages import Link
from stowax._timing._simulate import simulate

TARGET, CHIP = "v5p-8", "v5p"
BAR = 0.03
"""How far a step's seconds may lie apart."""
CONFIG = llama.LLAMA2_13B

OPTIONS = {
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_tpu_enable_all_experimental_scheduler_features": True,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, and what was worked out for it by hand.

    `offloaded` are checkpoint names; `seconds` has compute and exposed seconds for a
    link of so many bytes per second, `device_gib` and `host_gib` the compiler's totals.
    """

    name: str
    offloaded: tuple[str, ...]
    options: dict[str, Any]
    device_gib: float
    host_gib: float | None
    seconds: dict[float, tuple[float, float]]


QKV = ("query", "key", "value")
CASES = (
    Case(
        name="full recompute",
        offloaded=(),
        options={},
        device_gib=55.3,
        host_gib=0.0,
        seconds={15e9: (7.16, 0.0)},
    ),
    Case(
        name="q, k, v offloaded",
        offloaded=QKV,
        options={},
        device_gib=61.1,
        host_gib=18.8,
        seconds={15e9: (7.09, 1.75)},
    ),
    Case(
        name="layer input offloaded",
        offloaded=("input",),
        options={},
        device_gib=43.0,
        host_gib=6.3,
        seconds={15e9: (7.16, 0.31)},
    ),
    Case(
        name="full recompute, scheduler options",
        offloaded=(),
        options=OPTIONS,
        device_gib=54.9,
        host_gib=0.0,
        seconds={15e9: (7.16, 0.0)},
    ),
    Case(
        name="q, k, v offloaded, scheduler options",
        offloaded=QKV,
        options=OPTIONS,
        device_gib=58.0,
        host_gib=None,
        seconds={15e9: (7.09, 0.77), 30e9: (7.09, 0.32)},
    ),
)


def attention(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """Plain attention whose scores are float32 from the first product on.

    `_layers.attention` rounds them to the activations' dtype in between. That is half
    the memory traffic of the scores: 6.5 instead of 7.2 s a step.
    """
    scores = jnp.einsum(
        "bqhe,bkhe->bhqk", query, key, preferred_element_type=jnp.float32
    )
    scores = scores * (1.0 / math.sqrt(query.shape[-1]))
    scores = jnp.where(mask[:, None, :, :], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhqk,bkhe->bqhe", weights, value)


def layer(
    weights: dict[str, Array], x: Array, table: tuple[Array, Array], mask: Array
) -> Array:
    """`scan_transformer.layer`, its values named for checkpoint policies."""
    x = checkpoint_name(x, "input")
    normed = _layers.rms_norm(x, weights["attention_norm"])
    query, key, value = (
        checkpoint_name(_layers.split_heads(normed, weights[name]), name)
        for name in QKV
    )
    query, key = _layers.rotate(query, table), _layers.rotate(key, table)
    mixed = attention(query, key, value, mask)
    x = x + _layers.join_heads(mixed, weights["output"])
    normed = _layers.rms_norm(x, weights["feed_forward_norm"])
    return x + _layers.swiglu(normed, weights["gate"], weights["up"], weights["down"])


def make_step(mesh: Any, policy: Any) -> Callable[..., Any]:
    """Loss and gradients, every layer under `jax.checkpoint` with `policy`."""
    batch_sharding = NamedSharding(mesh, PartitionSpec(llama.AXIS, None, None))

    def constrain(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, batch_sharding)

    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        table = _layers.rotary_table(CONFIG.sequence, CONFIG.head_width)
        mask = _layers.causal_mask(CONFIG.sequence)
        x = parameters["embedding"][batch["inputs"]].astype(CONFIG.compute)

        def body(x: Array, weights: dict[str, Array]) -> tuple[Array, None]:
            return constrain(layer(weights, x, table, mask)), None

        # Within a scan nothing has to be kept from being shared. With `prevent_cse`,
        # the default, q, k and v are waited for 2.31 s instead of 1.74.
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(body, constrain(x), parameters["layers"])
        x = _layers.rms_norm(x, parameters["norm"])
        logits = x @ parameters["head"].astype(x.dtype)
        return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))

    def step(parameters: dict[str, Any], batch: dict[str, Array]):
        loss, gradients = jax.value_and_grad(loss_fn)(parameters, batch)
        return loss, jax.tree.map_with_path(
            lambda path, leaf: jax.lax.with_sharding_constraint(
                leaf, NamedSharding(mesh, llama.partition(path, leaf))
            ),
            gradients,
        )

    return jax.jit(step)


def policy_of(case: Case) -> Any:
    """JAX's policy that offloads the names of `case` and recomputes the rest."""
    policies = jax.checkpoint_policies
    if not case.offloaded:
        return policies.nothing_saveable
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(case.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def needed_bytes(case: Case, chips: int) -> int:
    """Bytes per chip that have to go out once and come back once.

    Each name is one [batch, sequence, width] array of every layer.
    """
    tokens = CONFIG.batch * CONFIG.sequence // chips
    element = jnp.dtype(CONFIG.compute).itemsize
    return CONFIG.layers * len(case.offloaded) * tokens * CONFIG.width * element


def simulated(case: Case) -> dict[str, Any]:
    """Compiles one program and simulates it under every link of `case`."""
    target = stowax.target(TARGET)
    chips = target.device_count
    step = make_step(target.mesh((chips,), (llama.AXIS,)), policy_of(case))
    _, args = llama.llama2_13b(target, update=False)
    compiled = target.compile(step, *args, compiler_options=case.options)
    memory = compiled.memory_analysis()
    program = read_program(compiled.hlo_module_protos()[0])
    return {
        "name": case.name,
        "device_bytes": _record.total_bytes(memory),
        "host_bytes": memory.host_temp_size_in_bytes,
        "needed_bytes": needed_bytes(case, chips),
        "moved_bytes": moved(program),
        "trips": sorted(
            item.trips
            for computation in program.computations.values()
            for item in computation.instructions
            if item.opcode == "while" and item.trips is not None
        ),
        "links": [_timed(program, rate) for rate in case.seconds],
    }


def moved(program: Program) -> dict[str, int]:
    """Bytes over the link per step and direction, by the schedule."""
    found = {"device-to-host": 0, "host-to-device": 0, "host-to-host": 0}
    for transfer in program.transfers:
        found[transfer.direction] += transfer.total_bytes
    return found


def _timed(program: Program, rate: float) -> dict[str, float]:
    link = Link(device_to_host=rate, host_to_device=rate)
    # "One host link": by hand, both directions shared it.
    timeline = simulate(program, CHIPS[CHIP], link, duplex=False)
    return {
        "rate": rate,
        "compute_seconds": timeline.compute_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "collective_wait_seconds": timeline.collective_wait_seconds,
    }


def page(records: _record.Records) -> str:
    """The tables, in the order of the cases."""
    found = [(case, records.cells.get(case.name, {"error": ""})) for case in CASES]
    whole = [
        cell | {"case": case, "by_hand": case.seconds[link["rate"]], "link": link}
        for case, cell in found
        if "error" not in cell
        for link in cell["links"]
    ]
    over = [
        f"{row['case'].name} at {row['link']['rate'] / 1e9:g} GB/s"
        for row in whole
        if abs(difference(row)) > BAR
    ]
    waits = [row["link"]["collective_wait_seconds"] for row in whole]
    return _record.page_text(
        records,
        over=f"{'Beyond' if over else 'All steps are within'} {BAR:.0%}"
        f"{': ' if over else ''}{', '.join(over)}.",
        steps=_record.columns(_STEPS, whole),
        collectives=f"{max(waits, default=0.0):.2f}",
        copies=_record.columns(_COPIES, [c for _, c in found if "error" not in c]),
    )


def difference(row: dict[str, Any]) -> float:
    """Of the step's seconds, simulated against by hand, as a fraction."""
    link = row["link"]
    simulated = link["compute_seconds"] + link["exposed_seconds"]
    return simulated / sum(row["by_hand"]) - 1


def _percent(fraction: float) -> str:
    return f"{fraction:+.1%}" if abs(fraction) <= BAR else f"**{fraction:+.1%}**"


_STEPS = {
    "program": lambda r: r["name"],
    "link GB/s": lambda r: f"{r['link']['rate'] / 1e9:g}",
    "compute s: by hand": lambda r: f"{r['by_hand'][0]:.2f}",
    "compute s: simulated": lambda r: f"{r['link']['compute_seconds']:.2f}",
    "exposed s: by hand": lambda r: f"{r['by_hand'][1]:.2f}",
    "exposed s: simulated": lambda r: f"{r['link']['exposed_seconds']:.2f}",
    "step s: by hand": lambda r: f"{sum(r['by_hand']):.2f}",
    "step s: simulated": lambda r: f"{sum(r['by_hand']) * (1 + difference(r)):.2f}",
    "difference": lambda r: _percent(difference(r)),
    "device GiB: by hand": lambda r: f"{r['case'].device_gib:.1f}",
    "device GiB: compiled": lambda r: gib(r["device_bytes"]),
}
_COPIES = {
    "program": lambda r: r["name"],
    "trips of the loops": lambda r: ", ".join(map(str, r["trips"])),
    "needed GiB": lambda r: gib(r["needed_bytes"]),
    "out": lambda r: gib(r["moved_bytes"]["device-to-host"]),
    "in": lambda r: gib(r["moved_bytes"]["host-to-device"]),
}


def options(parser: argparse.ArgumentParser) -> None:
    names = [case.name for case in CASES]
    parser.add_argument("--program", action="append", choices=names)


def run(asked: argparse.Namespace, records: _record.Records) -> None:
    """The programs that were asked for."""
    for case in CASES:
        if case.name in (asked.program or [case.name]):
            records.made(case.name, lambda c=case: simulated(c))
