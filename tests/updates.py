"""A step made to run with its state in host memory, for the tests of `_update_*`."""

import dataclasses
from typing import Any
from unittest import mock

import jax
from jax.sharding import SingleDeviceSharding

from stowax import _jax_host_memory
from stowax._jaxprs._jaxpr import trace
from stowax._update._blocks import BlockSize
from stowax._update._find import stream_update
from stowax._update._record import Group, Leaf
from stowax._update._run import run_streamed

SMALL = BlockSize(count=4, smallest_bytes=1, leaf_bytes=1024)
"""Blocks small enough for the leaves of a test."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedStep:
    """`step(params, state, batch)`, its state in host memory where that is possible."""

    found: Any
    structure: Any
    state_inputs: range

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.found.leaves

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.found.groups

    @property
    def host_inputs(self) -> tuple[int, ...]:
        return self.found.host_inputs

    def run(self, *args: Any) -> Any:
        with without_copies():
            out = run_streamed(self.found, placed(self, *args))
        return jax.tree.unflatten(self.structure, out)

    def compiled(self, *args: Any) -> Any:
        flat = placed(self, *args)
        flat = [
            jax.numpy.copy(a) if i not in self.host_inputs else a
            for i, a in enumerate(flat)
        ]
        out = [
            sharding(i in self.found.host_outputs)
            for i in range(self.structure.num_leaves)
        ]
        jitted = jax.jit(
            lambda *args: run_streamed(self.found, args),
            out_shardings=out,
        )
        return jax.tree.unflatten(self.structure, jitted(*flat))

    def check_places(self, out: Any) -> None:
        for i, leaf in enumerate(jax.tree.leaves(out)):
            hosted = leaf.sharding.memory_kind == "pinned_host"
            assert hosted == (i in self.found.host_outputs)


def without_copies() -> Any:
    """Operations work where their arrays lie, whatever plan ran in this process."""
    return mock.patch.object(_jax_host_memory, "_in_host_memory", return_value=False)


def sharding(host: bool) -> SingleDeviceSharding:
    kind = "pinned_host" if host else "device"
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def placed(step: StreamedStep, *args: Any) -> list[Any]:
    """The flat arguments, each where `step` wants it."""
    return [
        jax.device_put(leaf, sharding(i in step.host_inputs))
        for i, leaf in enumerate(jax.tree.leaves(args))
    ]


def streamed_step(step: Any, params: Any, state: Any, batch: Any, **kwargs: Any) -> Any:
    """The step with every leaf of its state meant for host memory."""
    leaves, structure = jax.tree.flatten((params, state, batch))
    seen = {}

    def flat(*values: Any) -> Any:
        out = step(*jax.tree.unflatten(structure, values))
        results, seen["structure"] = jax.tree.flatten(out)
        return results

    jaxpr = trace(flat, *[jax.typeof(leaf) for leaf in leaves])
    first = len(jax.tree.leaves(params))
    inputs = range(first, first + len(jax.tree.leaves(state)))
    found = stream_update(jaxpr, {i: i for i in inputs}, **{"size": SMALL, **kwargs})
    return StreamedStep(found=found, structure=seen["structure"], state_inputs=inputs)
