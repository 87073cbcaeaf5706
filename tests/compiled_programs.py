"""Small programs compiled for chips that are not there, each compiled once per session.

Sizes are chosen so that every figure can be derived in the tests: `LAYERS` layers of an
MLP on `ROWS` rows of width `WIDTH` with `HIDDEN` hidden units, in bfloat16 (2 bytes).
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from stowax._errors import MissingExtraError
from stowax._hlo._program import read_program
from stowax._target import _target as target_module

LAYERS, ROWS, WIDTH, HIDDEN = 6, 512, 512, 2048
BLOCKS, BLOCK_ROWS, COLUMNS = 8, 128, 8192
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
SCOPE_OUT, SCOPE_IN = "stowax.offload.3", "stowax.fetch.3"


def _layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def weights(sharding, layers=LAYERS):
    lead = (layers,) if layers else ()
    return {
        "up": jax.ShapeDtypeStruct(
            (*lead, WIDTH, HIDDEN), jnp.bfloat16, sharding=sharding
        ),
        "down": jax.ShapeDtypeStruct(
            (*lead, HIDDEN, WIDTH), jnp.bfloat16, sharding=sharding
        ),
    }


def _rows(sharding):
    return jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=sharding)


def offloaded(device, host):
    """Layers that write their outputs to a host buffer, and layers that read them back.

    The buffer is in the carry and its slices stand under scope names. A value is
    written one iteration late and read one early. It is the last thing that a layer
    makes and the first that the second scan reads: the carry has one buffer for the
    value that comes in and the one that goes out, so a copy must be done before the new
    value is made.
    """

    def step(ws, x):
        def forward(carry, inputs):
            x, pending, slots = carry
            i, w = inputs
            with jax.named_scope(SCOPE_OUT):
                slot = jax.device_put(pending, HOST)
                slots = jax.lax.dynamic_update_index_in_dim(slots, slot, i, 0)
            x = _layer(x, w)
            return (x, jnp.sin(x), slots), None

        def backward(carry, inputs):
            x, current = carry
            i, w = inputs
            with jax.named_scope(SCOPE_IN):
                slot = jax.lax.dynamic_index_in_dim(slots, i, 0, keepdims=False)
                following = jax.device_put(slot, DEVICE)
            return (_layer(_layer(x - current, w), w), following), None

        empty = jax.lax.empty((LAYERS, ROWS, WIDTH), jnp.bfloat16)
        slots = jax.device_put(empty, HOST)
        none = jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
        numbers = jnp.arange(LAYERS)
        carry = (x, none, slots)
        (x, last, slots), _ = jax.lax.scan(forward, carry, (numbers, ws))
        (x, _), _ = jax.lax.scan(backward, (x, last), (numbers, ws), reverse=True)
        return x

    return jax.jit(step, out_shardings=device), (weights(device), _rows(device))


def scanned(device, host):
    """The same write, left to the scan's own outputs, under a scope in the body."""

    def step(ws, x):
        def forward(x, w):
            hidden = x @ w["up"]
            with jax.named_scope(SCOPE_OUT):
                slot = jax.device_put(hidden, HOST)
            return x + jax.nn.gelu(hidden) @ w["down"], slot

        return jax.lax.scan(forward, x, ws)

    return (
        jax.jit(step, out_shardings=(device, host)),
        (weights(device), _rows(device)),
    )


def plain(device, host):
    """Nothing on the host: loss and gradients of the scanned layers."""

    def loss(ws, x):
        x, _ = jax.lax.scan(lambda x, w: (_layer(x, w), None), x, ws)
        return jnp.sum(x.astype(jnp.float32))

    return jax.jit(jax.value_and_grad(loss)), (weights(device), _rows(device))


def streamed(device, host):
    """State in host memory, updated block by block, in and out in every trip."""

    def step(state, gradient):
        def block(i, state):
            start = i * BLOCK_ROWS
            old = jax.lax.dynamic_slice_in_dim(state, start, BLOCK_ROWS)
            change = jax.lax.dynamic_slice_in_dim(gradient, start, BLOCK_ROWS)
            new = jax.device_put(jax.device_put(old, DEVICE) + change, HOST)
            return jax.lax.dynamic_update_slice_in_dim(state, new, start, 0)

        return jax.lax.fori_loop(0, BLOCKS, block, state)

    shape = (BLOCKS * BLOCK_ROWS, COLUMNS)
    state = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=host)
    gradient = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=host)
    return jitted, (state, gradient)


def on_the_host(device, host):
    """Layers in a Python loop, weights and their gradients in host memory."""
    fetch = functools.partial(jax.device_put, device=DEVICE)
    layer = jax.checkpoint(lambda x, w: _layer(x, jax.tree.map(fetch, w)))

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.sum(x.astype(jnp.float32))

    jitted = jax.jit(jax.value_and_grad(loss), out_shardings=(device, host))
    return jitted, ([weights(host, 0) for _ in range(4)], _rows(device))


def arithmetic_in_host_memory(device, host):
    """An addition whose operand nobody brought to the device."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=host)
    return jax.jit(lambda x: jax.device_put(x + 1, DEVICE)), (x,)


def nested(device, host):
    """Three trips of five trips of one product."""

    def step(w, x):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            return jax.lax.scan(inner, x, length=5)[0], None

        return jax.lax.scan(outer, x, length=3)[0]

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=device)
    return jax.jit(step), (square, _rows(device))


def open_ended(device, host):
    """A loop whose length is data."""

    def step(x):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) < jnp.float32(1e6), lambda x: jnp.tanh(x @ x), x
        )

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=device)
    return jax.jit(step), (square,)


def switched(device, host):
    """A scan over the layer number, the weights taken by `switch`: a rolled model."""

    def step(ws, x):
        def body(x, i):
            w = jax.lax.switch(i, [lambda w=w: w for w in ws])
            return _layer(x, w), None

        return jax.lax.scan(body, x, jnp.arange(len(ws)))[0]

    return jax.jit(step), ([weights(device, 0) for _ in range(4)], _rows(device))


def too_large(device, host):
    """A chain of products whose values do not fit on any GPU of the table: 160 GiB."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x.astype(jnp.float32))

    def spec(rows):
        return jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16, sharding=device)

    return jax.jit(jax.grad(loss)), ([spec(4096) for _ in range(40)], spec(2**19))


PROGRAMS = {
    function.__name__: function
    for function in (
        offloaded,
        scanned,
        plain,
        streamed,
        on_the_host,
        arithmetic_in_host_memory,
        nested,
        open_ended,
        switched,
        too_large,
    )
}


# Without these the TPU's scheduler waits for a copy right after its start.
HIDE_COPIES = {
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_tpu_enable_all_experimental_scheduler_features": True,
}


@functools.cache
def machine(target):
    try:
        return target_module.target(target)
    except MissingExtraError as missing:  # listed by pytest -rs
        pytest.skip(str(missing))


@functools.cache
def compiled(name, target):
    """The `CompiledProgram` called `name`, for the target of that name."""
    there = machine(target)
    device = there.sharding(memory_kind="device")
    host = there.sharding(memory_kind="pinned_host")
    jitted, args = PROGRAMS[name](device, host)
    options = HIDE_COPIES if name == "offloaded" and there.platform == "tpu" else None
    return there.compile(jitted, *args, compiler_options=options)


@functools.cache
def program(name, target):
    """The same, read."""
    return read_program(compiled(name, target).hlo_module_protos()[0])
