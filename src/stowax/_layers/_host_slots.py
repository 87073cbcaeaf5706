"""Host memory for a stack's offloaded values: a slot per layer, written in place.

A buffer of `count` slots lies in host memory and travels in the carry of the forward
scan; each iteration updates one slot of it. XLA turns the update into an asynchronous
copy into place. Values that come out of a scan stacked would become the same copies,
but without their names: the scope around an explicit update survives into the compiled
program, and so every planned copy can be looked for there.

The buffer is of host memory from the start, by its type: zeros that are moved there
would exist on the device first, and of `jax.lax.empty` a GPU's partitioner makes the
whole on every device of a mesh. Kept values have such buffers on the device
(`empty_layers`).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .. import _jax


def to_host(value: Any) -> Any:
    """The value in host memory, sharded as it was."""
    return jax.device_put(value, jax.memory.Space.Host)


def to_device(value: Any) -> Any:
    """The value in device memory, sharded as it was."""
    return jax.device_put(value, jax.memory.Space.Device)


def empty_layers(count: int, aval: Any) -> Any:
    """Device memory for `count` values of one type; what it holds is not defined."""
    sharding = _spread(aval, leading=1)
    return empty_array((count, *aval.shape), aval, sharding)


def empty_array(shape: Sequence[int], aval: Any, sharding: Any = None) -> Any:
    """Device memory of a shape, for what is made of values of the type `aval`.

    What it holds is not defined: zeros would be a pass over memory. Under a mesh of
    GPUs it has to be zeros all the same: their partitioner allocates what is empty
    whole on every device, and zeros only each one's part. A TPU's does not, and there
    zeros would cost ten passes, by the compiler's estimate: PaliGemma2-3B on a v5p-8,
    60 GiB of values kept, 1.68 s a step with zeros and 1.43 s without. `sharding` is
    that of the array's type, where types have one (`_jax.explicit_sharding`).
    """
    shape = tuple(shape)
    if _jax.may_be_spread(aval):
        made = jax.lax.platform_dependent(
            tpu=lambda: jax.lax.empty(shape, aval.dtype, out_sharding=sharding),
            default=lambda: jax.lax.full(shape, 0, aval.dtype, sharding=sharding),
        )
    else:
        made = jax.lax.empty(shape, aval.dtype, out_sharding=sharding)
    return _jax.varying_as(made, aval)


def write_layer(layers: Any, value: Any, layer: Any) -> Any:
    """`layers` with `value` in the place of `layer`."""
    value = _on_mesh_of(layers, value)
    return jax.lax.dynamic_update_index_in_dim(layers, value, layer, 0)


def empty_slots(count: int, aval: Any) -> Any:
    """Host memory for `count` values of one type; what it holds is not defined."""
    sharding = _spread(aval, leading=1)
    made = _jax.empty_on_host((count, *aval.shape), aval.dtype, sharding)
    return _jax.varying_as(made, aval)


def write_slot(slots: Any, value: Any, layer: Any, scope: str) -> Any:
    """`slots` with `value` in the place of `layer`; the copy is named `scope`."""
    with jax.named_scope(scope):
        value = to_host(_on_mesh_of(slots, value))
        return jax.lax.dynamic_update_index_in_dim(slots, value, layer, 0)


def _spread(aval: Any, leading: int) -> Any:
    """How values of a type are spread; what is made of numbers may be on any mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if not aval.sharding.mesh.empty or not mesh.explicit_axes:
        return _jax.explicit_sharding(aval, leading)
    return NamedSharding(mesh, PartitionSpec(*[None] * (leading + aval.ndim)))


def _on_mesh_of(buffer: Any, value: Any) -> Any:
    """A value that is on no mesh, on that which the buffer's type names."""
    mesh = _jax.aval_of(buffer).sharding.mesh
    if not mesh.explicit_axes or not _jax.aval_of(value).sharding.mesh.empty:
        return value
    return jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec()))


def read_slot(slots: Any, layer: Any, scope: str) -> Any:
    """What the slot of `layer` holds, on the device; the copy is named `scope`."""
    with jax.named_scope(scope):
        slot = jax.lax.dynamic_index_in_dim(slots, layer, 0, keepdims=False)
        return to_device(slot)


def staged(value: Any, layer: Any) -> Any:
    """The same bits in a buffer of their own.

    A carried value's buffer is the next iteration's as well: a copy that reads it would
    have to end before that value is made. Moving it aside costs a pass over device
    memory, and gives the copy the whole iteration. The predicate is always true; the
    compiler cannot know, so the move stays.
    """
    sharding = _jax.explicit_sharding(_jax.aval_of(value))
    always = _jax.broadcast(layer >= 0, value.shape, sharding)
    return jax.lax.select(always, value, jax.lax.full_like(value, 0))
