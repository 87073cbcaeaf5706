"""The programs that a machine is measured with, each on all devices at once.

Every program is one that planned steps contain: a large product, a fused loop over
memory, one over registers, copies between the memories of a device and its host inside
of a compiled program (asynchronous, by memory kinds), an update on the host. The work
is spread over a mesh of the devices so that each does its own part and nothing crosses
between them. `tests/test_calibration_programs.py` holds, on compiled programs of the
backends, that they are what is counted here.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _jax
from .._jaxprs._jaxpr import trace

AXIS = "devices"
COLUMNS = 1024
"""Columns of every array but products': whole tiles of a TPU's memory."""

_WIDE = {"int8": jnp.int32, "float8_e4m3fn": jnp.bfloat16}
"""What products of narrow dtypes are summed up in, and returned as."""

VECTOR_ROUNDS, VECTOR_OPERATIONS = 64, 3
"""Rounds of the loop over registers, and the operations of a round: enough for an
element that no chip of the table waits for its memory."""

UPDATE_BYTES = 40
"""Bytes an element of an update as Adam's, by the count of `_update._host.host_bytes`:
one loop for each result, which reads what that is made of (3 + 3 + 4 arrays)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to be timed: `amount` is what one run does on one device.

    `specs` are its arguments. The last of them, as many as `replaced`, are donated, and
    what it returns takes their place in the next run.
    """

    jitted: Any
    specs: tuple[jax.ShapeDtypeStruct, ...]
    amount: float
    replaced: int = 0

    def ready(self) -> Callable[[], Any]:
        """What starts a run; the arguments are made here."""
        arguments = [filled(spec) for spec in self.specs]
        jax.block_until_ready(arguments)
        kept = len(arguments) - self.replaced

        def run() -> Any:
            made = self.jitted(*arguments)
            if self.replaced:
                arguments[kept:] = [made] if isinstance(made, jax.Array) else made
            return made

        return run


def sharding_of(devices: Sequence[Any], kind: str = "device") -> NamedSharding:
    """Rows spread over `devices`, in their memory of a kind."""
    mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
    return NamedSharding(mesh, PartitionSpec(AXIS), memory_kind=kind)


def filled(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """An array for `spec` whose values are no simpler than real ones.

    Zeros would be: chips clock higher on them. Values are in (0, 1].
    """
    sharding: Any = spec.sharding
    make = _maker(spec.shape, spec.dtype, sharding.with_memory_kind("device"))
    return jax.device_put(make(), sharding)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """Makes the values of `filled` on the device; compiled once for all alike."""

    def make() -> jax.Array:
        rows, columns = (
            jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1)
        )
        bits = (rows * np.uint32(2654435761) + columns * np.uint32(2246822519)) >> 24
        if jnp.issubdtype(dtype, jnp.integer):
            return (bits >> 1).astype(dtype)
        return ((bits.astype(jnp.float32) + 1) / 256).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def products(devices: Sequence[Any], dtype: str, size: int) -> Program:
    """Two products of `size` × `size`; operations count multiply and add."""
    sharding = sharding_of(devices)
    part = sharding.spec

    def local(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = _WIDE.get(dtype)
        one = jax.lax.dot(x, w, preferred_element_type=wide)
        return one, jax.lax.dot(w, x, preferred_element_type=wide)

    spread = jax.shard_map(
        local, mesh=sharding.mesh, in_specs=(part, part), out_specs=(part, part)
    )
    spec = jax.ShapeDtypeStruct(
        (len(devices) * size, size), jnp.dtype(dtype), sharding=sharding
    )
    return Program(jitted=jax.jit(spread), specs=(spec, spec), amount=2 * 2.0 * size**3)


def stream(devices: Sequence[Any], size: int, repeats: int) -> Program:
    """A fused loop that reads and writes `size` bytes, `repeats` times."""

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda _, x: x * 0.5 + 0.25, x)

    return _in_place(run, devices, size, amount=2.0 * size * repeats)


def arithmetic(devices: Sequence[Any], size: int, repeats: int) -> Program:
    """A fused loop of many elementwise operations on each of `size / 4` elements."""

    def rounds(_: Any, x: jax.Array) -> jax.Array:
        for _ in range(VECTOR_ROUNDS):
            x = jnp.maximum(x * 0.9999 + 0.0001, 0.001)
        return x

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, rounds, x)

    each = VECTOR_ROUNDS * VECTOR_OPERATIONS
    return _in_place(run, devices, size, amount=float(size // 4 * each * repeats))


def _in_place(run: Any, devices: Sequence[Any], size: int, amount: float) -> Program:
    return Program(
        jitted=jax.jit(run, donate_argnums=0),
        specs=(_floats(devices, size),),
        amount=amount,
        replaced=1,
    )


def copies(devices: Sequence[Any], size: int) -> tuple[Program, Program, Program]:
    """Copies of `size` bytes: device to host, host to device, and both at once.

    Each goes into an array that is there and given up for it, as in a planned step: a
    new one would cost the host more than the copy does.
    """
    here, there = sharding_of(devices), sharding_of(devices, "pinned_host")
    on_device, on_host = _floats(devices, size), _floats(devices, size, "pinned_host")

    def out(x: jax.Array, _: jax.Array) -> jax.Array:
        return jax.device_put(x, there)

    def into(y: jax.Array, _: jax.Array) -> jax.Array:
        return jax.device_put(y, here)

    def both(x: jax.Array, y: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.device_put(x, there), jax.device_put(y, here)

    def program(run: Any, given: tuple, made: tuple) -> Program:
        places = tuple(range(len(given), len(given) + len(made)))
        shardings = tuple(spec.sharding for spec in made)
        jitted = jax.jit(
            run,
            out_shardings=shardings if len(made) > 1 else shardings[0],
            donate_argnums=places,
            keep_unused=True,
        )
        return Program(
            jitted=jitted, specs=given + made, amount=size, replaced=len(made)
        )

    return (
        program(out, (on_device,), (on_host,)),
        program(into, (on_host,), (on_device,)),
        program(both, (on_device, on_host), (on_host, on_device)),
    )


def update(devices: Sequence[Any], size: int) -> Program:
    """An update as Adam's by CPU devices, on arrays of `size` bytes."""
    spec = _floats(devices, size)
    return Program(
        jitted=jax.jit(_adam, donate_argnums=(1, 2, 3)),
        specs=(spec,) * 4,
        amount=UPDATE_BYTES * (size / 4),
        replaced=3,
    )


def update_on_host(device: Any, size: int) -> Program:
    """The same by the host's processor for one device, on arrays in host memory.

    The gradient is read and not returned: on a call that hands an argument through,
    libtpu 0.0.50 ends the process.
    """
    spec = _floats([device], size, "pinned_host")
    plain = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    jaxpr = trace(_adam, plain, plain, plain, plain)

    def run(*arrays: jax.Array) -> list[Any]:
        return _jax.compute_on_host(jaxpr, arrays, on_device=0)

    return Program(
        jitted=jax.jit(
            run, donate_argnums=(1, 2, 3), out_shardings=[spec.sharding] * 3
        ),
        specs=(spec,) * 4,
        amount=UPDATE_BYTES * (size / 4),
        replaced=3,
    )


def _adam(
    gradient: jax.Array, parameter: jax.Array, first: jax.Array, second: jax.Array
) -> tuple[jax.Array, ...]:
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient * gradient
    parameter = parameter - 1e-3 * first / (jnp.sqrt(second) + 1e-8)
    return parameter, first, second


def _floats(
    devices: Sequence[Any], size: int, kind: str = "device"
) -> jax.ShapeDtypeStruct:
    rows = max(1, size // (4 * COLUMNS))
    return jax.ShapeDtypeStruct(
        (len(devices) * rows, COLUMNS), jnp.float32, sharding=sharding_of(devices, kind)
    )
