"""The CUDA plugin's limit on pinned host memory: arithmetic, texts, and who meets it.

No GPU is attached here: a CPU stands in for one, named a GPU, as `make_target` sees it.
"""

import types

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import spec, target_or_skip
from stowax._hardware._hardware import CHIPS
from stowax._hardware._pinned import beyond_the_pool, pool_bytes, setting_for
from stowax._target._machine import HOST_FRACTION, make_target

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
AHEAD = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
GIB = 2**30


@pytest.mark.parametrize(
    ("environment", "gib"),
    [
        ({}, 64),
        ({LIMIT: "128"}, 128),
        ({LIMIT: "many"}, 64),
        ({AHEAD: "true"}, 16),
        ({AHEAD: "0"}, 64),
        ({AHEAD: "TRUE", LIMIT: "3"}, 3),
    ],
)
def test_its_gb_are_gib(environment, gib):
    assert pool_bytes(environment) == gib * GIB


def test_the_setting_holds_what_is_needed():
    for needed in (1, GIB, 64 * GIB + 1, 200 * 10**9):
        name, _, value = setting_for(needed).partition("=")
        held = pool_bytes({name: value})
        assert held - GIB < needed <= held


def test_what_to_set_is_said_where_a_plan_needs_more():
    assert beyond_the_pool(64 * GIB, 64 * GIB, attached=False) is None
    assert beyond_the_pool(113 * GIB + 1, 64 * GIB, attached=False) == (
        "it needs 113.0 GiB of pinned host memory per device, and the CUDA plugin pins "
        "by default at most 64.0 GiB: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=114 in the "
        "environment, before JAX is imported"
    )
    here = beyond_the_pool(2 * GIB, GIB, attached=True)
    assert here is not None
    assert "the CUDA plugin pins here at most 1.00 GiB" in here


def attached_gpu(monkeypatch, machine_gib, **environment):
    """A GPU as if it were attached to a host of so much memory."""
    for name in (LIMIT, AHEAD):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": machine_gib * GIB // 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    device = types.SimpleNamespace(
        process_index=jax.process_index(), memory_stats=lambda: {"bytes_limit": GIB}
    )
    return make_target("gpu", CHIPS["h200"], (device,), attached=True)


def test_no_plan_for_an_attached_gpu_fills_more_than_its_pool(monkeypatch):
    there = attached_gpu(monkeypatch, 500)
    assert there.host_bytes == there.pinned_bytes == 64 * GIB
    (note,) = there.notes
    assert note == (
        "plans put at most 64.0 GiB per device into host memory, which is what the "
        "CUDA plugin pins here: for 400.0 GiB set "
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=400 in the environment, before JAX is "
        "imported"
    )
    more = attached_gpu(monkeypatch, 500, **{LIMIT: "450"})
    assert more.host_bytes == int(500 * GIB * HOST_FRACTION)
    assert more.pinned_bytes == 450 * GIB
    assert not more.notes
    small = attached_gpu(monkeypatch, 40)
    assert small.host_bytes == 40 * GIB * HOST_FRACTION
    assert not small.notes


@pytest.mark.slow
def test_a_plan_for_a_gpu_that_is_not_there_names_the_setting(monkeypatch):
    # A variable here says nothing of another machine.
    monkeypatch.setenv(LIMIT, "1")
    target = target_or_skip("h200")
    assert target.pinned_bytes == 64 * GIB < target.host_bytes
    layers, width = 12, 2**15  # 48 GiB of weights, and as much momentum

    @stowax.stow
    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
        return jnp.mean(x**2)

    def step(params, momentum, x):
        grads = jax.grad(loss_fn)(params, x)
        momentum = 0.9 * momentum + grads
        return params - 0.1 * momentum, momentum

    weights = spec(layers, width, width)
    args = weights, weights, spec(8, width)
    found = stowax.plan(
        step,
        *args,
        target=target,
        progress=False,
        pin={"parameter": "offload", "optimizer state": "offload"},
    )
    # Parameters, momentum and gradients.
    assert found.host_bytes == 3 * layers * 4 * width**2
    assert found.fits
    note = beyond_the_pool(found.host_bytes, 64 * GIB, attached=False)
    assert note == found.proof.notes[0]
    assert f"{LIMIT}=144" in str(found)
