"""Layers' parameters in host memory, as the loops over layers read and write them.

A step is traced with everything on the device. When it is run again with some
parameters in host memory, each such parameter is a `HostArray`: the array, and the
chain of casts and transpositions that the user's code applies to the whole of it on its
way to the loop (mixed precision; `moveaxis` for a scan over another axis than the
first). None of that may happen where the array lies: the host's processor would do it.
A `HostArray` collects it (`then`), and the loop does it to one layer's part that has
arrived on the device:

    weights = HostArray(array=in_host_memory)       # (4096, 16, 16384), float32
    weights = weights.then(transpose_equation)      # as the scan wants it, lazily
    weights = weights.then(cast_equation)
    layers = host_layers([weights], separate=False) # axis 1 of what lies there

`HostLayers` is one per-layer input of a stack: one stacked array, cut along the axis
that the layers have in it, or one array per layer (an unrolled model). `HostGradients`
is where the gradients of such an input go: a buffer in host memory, laid out like the
user's own parameter, so that nothing is left to do to the whole of it afterwards.
Gradients of an unrolled model are stacked along a first axis of their own; taking the
buffer apart in host memory would, again, be the host's processor's work.

What goes silently wrong otherwise: a slice, a cast or a reshape of an array that lies
in host memory compiles, and runs on the host.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import _jax
from ._axis_order import inverse
from ._host_slots import to_device, to_host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """`convert_element_type`, from one dtype to another."""

    source: Any
    target: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transpose:
    """`transpose`; axis k of the result is axis `order[k]` of the operand."""

    order: tuple[int, ...]


Chain = tuple[Cast | Transpose, ...]
"""What is done to an array, first thing first."""


Partition = tuple[str | tuple[str, ...] | None, ...]
"""Which axes of a mesh each axis of an array is spread over."""


def apply_chain(chain: Chain, value: Any) -> Any:
    """`value`, on the device, after every operation of `chain`."""
    for operation in chain:
        if isinstance(operation, Cast):
            value = jax.lax.convert_element_type(value, operation.target)
        else:
            value = jax.lax.transpose(value, operation.order)
    return value


def reverse_chain(chain: Chain) -> Chain:
    """The chain that a cotangent goes through: backwards, each operation undone."""
    return tuple(
        Cast(source=operation.target, target=operation.source)
        if isinstance(operation, Cast)
        else Transpose(order=inverse(operation.order))
        for operation in reversed(chain)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostArray:
    """An array in host memory and what is to be done to it, once it is on the device.

    `array` is as the user holds it; `shape` and `dtype` are those after `chain`. Under
    a mesh, `sharding` is the array's (a `NamedSharding`): what travels is to be split
    as the array is. Left to the compiler, it may be gathered first, or split anew in
    host memory, by the host's processor.
    """

    array: Any
    chain: Chain = ()
    sharding: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after the chain."""
        shape = tuple(self.array.shape)
        for operation in self.chain:
            if isinstance(operation, Transpose):
                shape = tuple(shape[k] for k in operation.order)
        return shape

    @property
    def dtype(self) -> Any:
        """Dtype after the chain."""
        casts = [o for o in self.chain if isinstance(o, Cast)]
        return casts[-1].target if casts else self.array.dtype

    def then(self, equation: Any) -> "HostArray | None":
        """What `equation` makes of this, or `None` if a loop cannot do that per layer.

        **Arguments:** `equation` is a jaxpr's, with this as its first operand.
        """
        name, params = equation.primitive.name, equation.params
        if name == "convert_element_type":
            done = Cast(source=self.dtype, target=params["new_dtype"])
        elif name == "transpose":
            done = Transpose(order=tuple(params["permutation"]))
        else:
            return None
        return dataclasses.replace(self, chain=(*self.chain, done))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostLayers:
    """One per-layer input of a stack, in host memory.

    `arrays` is one stacked array whose axis `axis` counts the layers, or, with `axis`
    `None`, one array per layer; `chain` is what is done to one layer's part after it
    arrived on the device, `sharding` how a part is split. Made by `host_layers`.
    """

    arrays: tuple[Any, ...]
    axis: int | None
    chain: Chain
    sharding: Any = None

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part, as they cross the link."""
        (first, *_) = self.arrays
        layers = 1 if self.axis is None else first.shape[self.axis]
        return first.size * first.dtype.itemsize // max(layers, 1)

    def fetch(self, layer: Any) -> Any:
        """The part of `layer` (traced or not), on the device, before the chain."""
        if self.axis is None:
            branches = [lambda array=array: to_device(array) for array in self.arrays]
            return split(jax.lax.switch(layer, branches), self.sharding)
        (array,) = self.arrays
        # The axis goes on the device: squeezed where it lies it would be a reshape.
        part = to_device(_cut(array, layer, self.axis))
        return split(jax.lax.squeeze(part, [self.axis]), self.sharding)

    def prepare(self, part: Any) -> Any:
        """What the body reads, of a part that `fetch` brought."""
        return apply_chain(self.chain, part)

    @property
    def gradients(self) -> "HostGradients":
        """Where the gradients go, laid out as the weights are."""
        axis = 0 if self.axis is None else self.axis
        chain = reverse_chain(self.chain)
        return HostGradients(axis=axis, chain=chain, sharding=self.sharding)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How one layer's gradient is to lie in a buffer of all layers'.

    It has `shape`, spread over a mesh by `partition` if there is one, and the layers
    stand at `axis`. Of an axis that is spread, the shards are an axis of their own:
    then layers, and places in a shard after them, can be looked at as one axis, and
    cut as one.
    """

    shape: tuple[int, ...]
    axis: int
    partition: Partition | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostGradients:
    """Where one per-layer input's gradients go: a buffer in host memory.

    Its axis `axis` counts the layers; `chain` is what is done to one layer's gradient,
    on the device, before it is copied, `shape` the shape that it then gets, if another
    one, and `sharding` how it is split.
    """

    axis: int = 0
    chain: Chain = ()
    shape: tuple[int, ...] | None = None
    sharding: Any = None

    def empty(self, count: int, part: Any) -> Any:
        """The buffer for `count` parts of the type `part`, that of `finish`."""
        shape = list(part.shape)
        shape.insert(self.axis, count)
        sharding = _with_axis(self.sharding, self.axis, part.ndim)
        if _is_in_types(sharding):
            bare = NamedSharding(sharding.mesh, sharding.spec)
            return _jax.empty_on_host(shape, part.dtype, bare)
        return split(_jax.empty_on_host(shape, part.dtype), sharding)

    def finish(self, gradient: Any) -> Any:
        """A layer's gradient as it is to lie in host memory."""
        gradient = apply_chain(self.chain, gradient)
        if self.shape is not None:
            spec = PartitionSpec() if self.sharding is None else self.sharding.spec
            reshape = functools.partial(jax.lax.reshape, new_sizes=self.shape)
            gradient = _jax.partitioned_by_compiler(reshape, spec)(gradient)
        return split(gradient, self.sharding)

    def lying(self, rows: "Rows | None") -> "HostGradients":
        """The same, laid out like this; `None`: as it is."""
        if rows is None:
            return self
        sharding = self.sharding
        if sharding is not None and rows.partition is not None:
            spec = PartitionSpec(*rows.partition)
            sharding = NamedSharding(sharding.mesh, spec, memory_kind="device")
        return dataclasses.replace(
            self, shape=rows.shape, axis=rows.axis, sharding=sharding
        )

    def write(self, buffer: Any, part: Any, layer: Any) -> Any:
        """`buffer` with `part` in the place of `layer`."""
        part = to_host(jax.lax.expand_dims(part, [self.axis]))
        return jax.lax.dynamic_update_slice_in_dim(buffer, part, layer, self.axis)


def sharding_over(array: Any, partition: Partition | None) -> Any:
    """How an array is spread over the mesh that it comes with, `None` for no mesh.

    Of an array's type JAX knows the mesh, while a step is traced, and not the
    partition: that is the plan's to remember. A step that was planned for a mesh may be
    run without one.
    """
    mesh = jax.typeof(array).sharding.mesh
    if partition is None or mesh.empty:
        return None
    if mesh.size == 1 and not mesh.explicit_axes:
        return None
    return NamedSharding(mesh, PartitionSpec(*partition))


def host_layers(values: Sequence[HostArray], *, separate: bool) -> HostLayers:
    """One per-layer input from the arrays that it lies in.

    **Arguments:** `values` is one array whose first axis, after its chain, counts the
    layers, or with `separate` one array per layer, all with the same chain
    and sharding.
    """
    if separate:
        ((chain, sharding),) = {(value.chain, value.sharding) for value in values}
        arrays = tuple(value.array for value in values)
        if sharding is not None:
            sharding = sharding.with_memory_kind("device")
        return HostLayers(arrays=arrays, axis=None, chain=chain, sharding=sharding)
    (value,) = values
    axis = 0  # where the layers are: first after the chain, so backwards from there
    for operation in reversed(value.chain):
        if isinstance(operation, Transpose):
            axis = operation.order[axis]
    place, chain = axis, []
    for operation in value.chain:
        if isinstance(operation, Transpose):
            order = [k - (k > place) for k in operation.order if k != place]
            place = operation.order.index(place)
            if order == sorted(order):
                continue
            operation = Transpose(order=tuple(order))
        chain.append(operation)
    sharding = _without_axis(value.sharding, axis, value.array.ndim)
    return HostLayers(
        arrays=(value.array,), axis=axis, chain=tuple(chain), sharding=sharding
    )


def _without_axis(sharding: Any, axis: int, ndim: int) -> Any:
    """How one layer's part is split, of an array that is split like this."""
    if sharding is None:
        return None
    partition = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    del partition[axis]
    return NamedSharding(sharding.mesh, PartitionSpec(*partition), memory_kind="device")


def _with_axis(sharding: Any, axis: int, ndim: int) -> Any:
    """How an array is split whose parts along `axis`, of `ndim` axes, are so."""
    if sharding is None:
        return None
    partition = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    partition.insert(axis, None)
    return NamedSharding(
        sharding.mesh, PartitionSpec(*partition), memory_kind="pinned_host"
    )


def split(value: Any, sharding: Any) -> Any:
    """`value`, spread over a mesh like this; `None`: as it is."""
    if sharding is None:
        return value
    if _is_in_types(sharding):
        wanted = NamedSharding(sharding.mesh, sharding.spec)
        there = _jax.aval_of(value).sharding
        same = wanted.is_equivalent_to(there, value.ndim)
        return value if same else jax.sharding.reshard(value, wanted)
    return jax.lax.with_sharding_constraint(value, sharding)


def _is_in_types(sharding: Any) -> bool:
    """Whether types say how arrays are spread over this mesh."""
    return sharding is not None and bool(sharding.mesh.explicit_axes)


def can_stream(part: Any, *, platform: str) -> bool:
    """Whether a layer's part of this type can cross the link by itself.

    A TPU copies whole tiles: of arrays with fewer than two axes, and of others that do
    not fill their tiles, there is no copy of one layer's part. Such arrays are small.
    """
    if platform != "tpu":
        return True
    return len(part.shape) > 1 and part.shape[-1] % 128 == 0 == part.shape[-2] % 8


def after(index: Any, values: Sequence[Any]) -> Any:
    """`index`, not negative, through arithmetic that needs `values` first.

    The larger of it and of what `not_positive` makes of them, which is `index`; the
    compiler cannot know. So a copy to or from the place `index` does not start before
    the values are there.
    """
    index = jnp.int32(index)
    return jax.lax.max(index, not_positive(values)) if values else index


def not_positive(values: Sequence[Any]) -> Any:
    """An integer that is not positive, made of one element of each of `values`."""
    number = jnp.int32(0)
    for value in values:
        element = first_element(value)
        if jnp.iscomplexobj(element):
            element = jax.lax.real(element)
        element = jax.lax.convert_element_type(element, jnp.int32)
        number = jax.lax.min(number, element)
    return number


def first_element(value: Any) -> Any:
    """The first element of an array, as a scalar."""

    def first(value: Any) -> Any:
        return jax.lax.slice(value, [0] * value.ndim, [1] * value.ndim).reshape(())

    return _jax.partitioned_by_compiler(first, PartitionSpec())(value)


def can_order(aval: Any) -> bool:
    """Whether `after` can wait for a value of this type."""
    return aval.size > 0 and (
        jnp.issubdtype(aval.dtype, jnp.floating)
        or jnp.issubdtype(aval.dtype, jnp.integer)
    )


def _cut(array: Any, layer: Any, axis: int) -> Any:
    starts = [jnp.int32(0)] * array.ndim
    starts[axis] = jnp.int32(layer)
    sizes = [*array.shape[:axis], 1, *array.shape[axis + 1 :]]
    return jax.lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
