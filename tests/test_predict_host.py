"""Predicted memory of the host: offloaded values, and gradients there after them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stowax import _mlir
from stowax._layers._host_slots import empty_slots, read_slot, write_slot
from stowax._predict import _predict
from stowax._target import _target
from test_predict import F32, MATRIX, N, predict, spec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "again"), [("v5e-1", True), ("h200", False)], ids=["v5e-1", "h200"]
)
@pytest.mark.usefixtures("full_effort")
def test_values_and_then_gradients_on_the_host(name, again):
    """Both are alive in the backward loop; libtpu counts the smaller of them again."""
    pytest.importorskip("libtpu" if name == "v5e-1" else "jax_plugins")
    target, layers = _target.target(name), 8

    def step(w, x):
        def forward(state, layer):
            x, values, i = state
            values = write_slot(values, x, i, "values")
            return (jnp.tanh(x @ layer), values, i + 1), None

        def backward(state, layer):
            ct, gradients, i = state
            x = read_slot(values, i, "values")
            ct = ct * jnp.tanh(x @ layer)
            gradients = write_slot(gradients, x.T @ ct, i, "gradients")
            return (ct @ layer.T, gradients, i - 1), None

        def update(i, w):
            return w.at[i].add(read_slot(gradients, i, "gradients"))

        values = empty_slots(layers, jax.typeof(x))
        (y, values, i), _ = jax.lax.scan(forward, (x, values, jnp.int32(0)), w)
        gradients = empty_slots(layers, jax.typeof(w[0]))
        start = y, gradients, i - 1
        (ct, gradients, _), _ = jax.lax.scan(backward, start, w, reverse=True)
        return jax.lax.fori_loop(0, layers, update, w), ct

    rows = N // 2  # a value is half a matrix: it is the smaller
    sizes = (spec(layers, 4 * N, 4 * N), spec(4 * rows, 4 * N))
    lowered = target.lower(jax.jit(step, donate_argnums=0), *sizes)
    predicted = _predict.predict_memory(
        _mlir.read_graph(lowered.compiler_ir()), target.platform
    )
    figures = lowered.compile().memory_analysis()
    matrices, values = (16 * layers * n * N * F32 for n in (N, rows))
    expected = matrices + values + (values if again else 0)
    assert figures.host_temp_size_in_bytes == expected
    assert predicted.host_total == expected


def test_what_is_offloaded_counts_on_the_host():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    layers = 8

    def step(x, to_host):
        def body(carry, _):
            kept = carry @ carry
            if to_host:
                kept = jax.device_put(kept, jax.memory.Space.Host)
            return carry + 1, kept

        last, stack = jax.lax.scan(body, x, None, length=layers)

        def back(carry, kept):
            kept = jax.device_put(kept, jax.memory.Space.Device)
            return carry @ kept, None

        return jnp.sum(jax.lax.scan(back, last, stack)[0])

    x = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=sharding)
    on_device = predict(lambda x: step(x, False), x)
    offloaded = predict(lambda x: step(x, True), x)
    assert on_device.host_total == 0
    assert offloaded.host_total == layers * MATRIX
    assert on_device.device_total - offloaded.device_total >= (layers - 2) * MATRIX
