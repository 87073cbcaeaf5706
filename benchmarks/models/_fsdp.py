"""Fully sharded training (FSDP): one mesh axis, over which everything is cut.

Every parameter and both its moments are cut along their largest axis that divides, the
batch along its first. The activations are pinned to the batch's sharding between
layers; without that the partitioner may cut them along the width and send activations
around instead of weights, silently.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.models import _layers

AXIS = "fsdp"
Step = Callable[..., Any]


def partition(path: tuple[Any, ...], leaf: Any, count: int = 1) -> PartitionSpec:
    """The sharding of one leaf of the state: its largest axis over `count` devices.

    The layer axis of stacked weights is not cut: a scan takes one layer at a time, and
    every chip is to hold a part of it. What no axis of divides lies whole everywhere.
    """
    stacked = any(getattr(entry, "key", None) == "layers" for entry in path)
    axes = range(1 if stacked else 0, leaf.ndim)
    axes = [axis for axis in axes if leaf.shape[axis] % count == 0]
    if not axes:
        return PartitionSpec()
    largest = max(axes, key=lambda axis: leaf.shape[axis])
    return PartitionSpec(
        *(AXIS if axis == largest else None for axis in range(leaf.ndim))
    )


def sharded(mesh: Mesh, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
    """`leaf` with its sharding."""
    sharding = NamedSharding(mesh, partition(path, leaf, mesh.size))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def sharded_state(mesh: Mesh, state: Any) -> Any:
    """Every leaf of `state` with its sharding."""
    return jax.tree.map_with_path(functools.partial(sharded, mesh), state)


def sharded_batch(mesh: Mesh, batch: Any) -> Any:
    """Every leaf of `batch`, its first axis cut."""

    def cut(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(AXIS, *[None] * (leaf.ndim - 1))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(cut, batch)


def along_batch(mesh: Mesh) -> Callable[[Array], Array]:
    """Pins activations [b s d] to the batch's sharding."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS, None, None))
    return lambda x: jax.lax.with_sharding_constraint(x, sharding)


def like_parameters(mesh: Mesh, gradients: Any) -> Any:
    """Gradients lie as the parameters do, or every chip would hold all of them."""
    return jax.tree.map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(
            leaf, NamedSharding(mesh, partition(path, leaf, mesh.size))
        ),
        gradients,
    )


def in_dtype(tree: Any, dtype: jax.typing.DTypeLike) -> Any:
    """`tree` of specs with its floats in `dtype`."""

    def cast(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, dtype if floating else leaf.dtype)

    return jax.tree.map(cast, tree)


def make_step(
    loss_fn: Callable[[Any, Any], Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    update: bool = True,
) -> Step:
    """The training step on `mesh` for a marked `loss_fn(parameters, batch)`.

    With `update` it is `(state, batch) -> (state, metrics)`; without, it is
    `(parameters, batch) -> (loss, gradients)` and there is no optimizer.
    """

    def loss_and_gradients(parameters: Any, batch: Any):
        loss, gradients = jax.value_and_grad(loss_fn)(parameters, batch)
        return loss, like_parameters(mesh, gradients)

    def train_step(state: dict[str, Any], batch: Any):
        parameters = state["parameters"]
        loss, gradients = loss_and_gradients(parameters, batch)
        parameters, moments = _layers.updated(
            optimizer, parameters, state["optimizer"], gradients
        )
        return {"parameters": parameters, "optimizer": moments}, {"loss": loss}

    return train_step if update else loss_and_gradients


def mesh_of(target: Any, batch: int) -> Mesh:
    """A mesh of all devices of `target`.

    **Raises:** `ValueError` where the batch does not divide among them.
    """
    count = len(target.devices)
    if batch % count:
        raise ValueError(
            f"batch: got {batch} for {count} devices. "
            f"Write a multiple of {count}, such as {count * -(-batch // count)}."
        )
    return target.mesh((count,), (AXIS,))


def specs_of(
    mesh: Mesh,
    parameters: Callable[[], Any],
    batch: Callable[[], Any],
    *,
    optimizer: optax.GradientTransformation | None,
    weights: jax.typing.DTypeLike = jnp.float32,
) -> tuple[Any, Any]:
    """Sharded specs of `(state, batch)`, or of `(parameters, batch)`.

    **Arguments:** `parameters` and `batch` make real arrays; they are only traced.
    Without an `optimizer` there is no state. `weights` is the dtype of parameters and
    moments.
    """
    state = in_dtype(jax.eval_shape(parameters), weights)
    if optimizer is not None:
        moments = jax.eval_shape(optimizer.init, state)
        state = {"parameters": state, "optimizer": moments}
    return sharded_state(mesh, state), sharded_batch(mesh, jax.eval_shape(batch))
