"""Llama 2 at its published sizes, fully sharded over a mesh (FSDP).

The model is `scan_transformer`; what is added is where the arrays lie: every parameter
and both its moments are cut along their largest axis over the one mesh axis `fsdp`, the
batch along its first. The activations are pinned to the batch's sharding between
layers; without that the partitioner may cut them along the width and send activations
around instead of weights, silently.

The mesh comes from a `stowax.Target`, so that the step can be planned and compiled for
chips that are not there:

>>> step, args = llama2_13b(stowax.target("v5p-8"))

Sizes: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), and
the configuration files published with the weights.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stowax
from benchmarks.models import _layers, scan_transformer
from benchmarks.models.scan_transformer import SMALL, Config, Step

AXIS = "fsdp"

LLAMA2_7B = Config(
    layers=32,
    width=4096,
    heads=32,
    key_value_heads=32,
    feed_forward=11_008,
    vocabulary=32_000,
    sequence=2048,
    batch=32,
)
LLAMA2_13B = dataclasses.replace(
    LLAMA2_7B, layers=40, width=5120, heads=40, key_value_heads=40, feed_forward=13_824
)
LLAMA2_70B = dataclasses.replace(
    LLAMA2_7B, layers=80, width=8192, heads=64, key_value_heads=8, feed_forward=28_672
)


def partition(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    """The sharding of one leaf of the state: its largest axis over the mesh.

    The layer axis of stacked weights is not cut: a scan takes one layer at a time, and
    every chip is to hold a part of it.
    """
    stacked = any(getattr(entry, "key", None) == "layers" for entry in path)
    axes = range(1 if stacked else 0, leaf.ndim)
    if not axes:
        return PartitionSpec()
    largest = max(axes, key=lambda axis: leaf.shape[axis])
    return PartitionSpec(
        *(AXIS if axis == largest else None for axis in range(leaf.ndim))
    )


def sharded(mesh: Mesh, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
    """`leaf` with its sharding."""
    sharding = NamedSharding(mesh, partition(path, leaf))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def make_step(config: Config, mesh: Mesh, *, update: bool = True) -> Step:
    """The training step on `mesh`.

    With `update` it is `(state, batch) -> (state, metrics)`; without, it is
    `(parameters, batch) -> (loss, gradients)` and there is no optimizer.
    """
    optimizer = scan_transformer.optimizer(config)
    batch_sharding = NamedSharding(mesh, PartitionSpec(AXIS, None, None))

    def constrain(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, batch_sharding)

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        logits = scan_transformer.forward(
            config, parameters, batch["inputs"], constrain
        )
        return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))

    def loss_and_gradients(parameters: dict[str, Any], batch: dict[str, Array]):
        loss, gradients = jax.value_and_grad(loss_fn)(parameters, batch)
        # Gradients lie as the parameters do, or every chip would hold all of them.
        gradients = jax.tree.map_with_path(
            lambda path, leaf: jax.lax.with_sharding_constraint(
                leaf, NamedSharding(mesh, partition(path, leaf))
            ),
            gradients,
        )
        return loss, gradients

    def train_step(state: dict[str, Any], batch: dict[str, Array]):
        parameters = state["parameters"]
        loss, gradients = loss_and_gradients(parameters, batch)
        parameters, moments = _layers.updated(
            optimizer, parameters, state["optimizer"], gradients
        )
        return {"parameters": parameters, "optimizer": moments}, {"loss": loss}

    return train_step if update else loss_and_gradients


def on_target(
    config: Config, target: Any, *, update: bool = True
) -> tuple[Step, tuple[Any, ...]]:
    """Step and sharded `jax.ShapeDtypeStruct`s of `config` on all devices of `target`.

    **Arguments:** `target` offers `devices` and `mesh(shape, axis_names)`; `update` as
    in `make_step`.

    **Raises:** `ValueError` where the batch does not divide among the devices.
    """
    count = len(target.devices)
    if config.batch % count:
        raise ValueError(
            f"batch: got {config.batch} for {count} devices. "
            f"Write a multiple of {count}, such as {count * -(-config.batch // count)}."
        )
    mesh = target.mesh((count,), (AXIS,))
    state = jax.eval_shape(lambda: scan_transformer.initial_state(config))
    state = state if update else state["parameters"]
    state = jax.tree.map_with_path(functools.partial(sharded, mesh), state)
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(AXIS, None)),
        ),
        jax.eval_shape(lambda: scan_transformer.random_batch(config)),
    )
    return make_step(config, mesh, update=update), (state, batch)


def llama2_7b(target: Any, *, update: bool = True, **sizes: Any):
    """Llama 2 7B on `target`; `sizes` replace fields of its `Config`."""
    config = dataclasses.replace(LLAMA2_7B, **sizes)
    return on_target(config, target, update=update)


def llama2_13b(target: Any, *, update: bool = True, **sizes: Any):
    """Llama 2 13B on `target`, 32 sequences of 2048 tokens unless `sizes` say other."""
    config = dataclasses.replace(LLAMA2_13B, **sizes)
    return on_target(config, target, update=update)


def llama2_70b(target: Any, *, update: bool = True, **sizes: Any):
    """Llama 2 70B on `target`; 8 key/value heads are shared by 64 query heads."""
    config = dataclasses.replace(LLAMA2_70B, **sizes)
    return on_target(config, target, update=update)


def llama2_13b_v5p_8() -> tuple[Step, tuple[Any, ...]]:
    """The full training step of 13B on the 4 chips of a v5p-8."""
    return llama2_13b(stowax.target("v5p-8"))


def llama2_13b_loss_and_gradients_v5p_8() -> tuple[Step, tuple[Any, ...]]:
    """Loss and gradients of 13B on the 4 chips of a v5p-8, without an optimizer."""
    return llama2_13b(stowax.target("v5p-8"), update=False)


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays on one attached device, for numerics on a CPU."""
    mesh = Mesh(jax.devices()[:1], (AXIS,))
    state = scan_transformer.initial_state(SMALL)
    batch = scan_transformer.random_batch(SMALL)
    state = jax.tree.map_with_path(
        lambda path, leaf: jax.device_put(
            leaf, NamedSharding(mesh, partition(path, leaf))
        ),
        state,
    )
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS, None)))
    return make_step(SMALL, mesh), (state, batch)
