"""A job of several processes: one plans, all run that plan, and none waits for ever."""

import json
import os
import socket
import subprocess
import sys

import pytest

JOB = """
import json, sys
import jax
me, count, port, differing = (int(a) for a in sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", count, me)
import jax.numpy as jnp, numpy as np
import stowax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("data",))
draw = np.random.default_rng(0).normal

def put(x, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

params = put((0.1 * draw(size=(6, 64, 64))).astype(np.float32))
x = put(draw(size=(1024, 64)).astype(np.float32), "data")
last = jnp.cos if differing and me == count - 1 else jnp.tanh

def loss_of(params, x):
    layer = lambda x, w: (x + last(jnp.sin(x @ w) @ w.T), None)
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

def train_step(params, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return params - 0.1 * grads, loss

said, found = [], {}
step = stowax.jit(train_step, budget="60%", progress=said.append, cache=False)
plain = jax.jit(train_step)
try:
    for name, run in (("planned", step), ("plain", plain)):
        now, found[name] = params, []
        for _ in range(3):
            now, loss = run(now, x)
            found[name].append(float(loss))
    ways = [decision.way for decision in step.plan.decisions]
    found["plan"] = [step.plan.fits, ways, step.plan.device_bytes]
except stowax._errors.PlanMismatchError as error:
    found["error"] = str(error)
print(json.dumps({**found, "surveyed": any(s.startswith("survey") for s in said)}))
"""


def run_job(count, *, differing=False):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    known = {**os.environ, "JAX_PLATFORMS": "cpu"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, *map(str, (k, count, port, int(differing)))],
            env=known,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(count)
    ]
    try:
        ends = [job.communicate(timeout=240) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    lines = [[t for t in out.splitlines() if t.startswith("{")] for out, _ in ends]
    assert all(lines), [err[-2000:] for _, err in ends]
    return [json.loads(own[-1]) for own in lines]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_one_process_plans_for_all(count):
    first, *others = run_job(count)
    assert first["surveyed"]
    assert not any(other["surveyed"] for other in others)
    assert first["plan"][0]
    for other in others:
        assert other["plan"] == first["plan"]
        assert other["planned"] == first["planned"]
    assert first["planned"] == pytest.approx(first["plain"], rel=1e-5)


@pytest.mark.slow
def test_processes_that_differ_are_told_so():
    for number, found in enumerate(run_job(2, differing=True)):
        assert "process 0 is about to run train_step, and process 1" in found["error"]
        assert ("(so says process 0)" in found["error"]) == (number > 0)
