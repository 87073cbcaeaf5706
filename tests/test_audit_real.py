"""Loops as the documentation of JAX libraries writes them: as they are, and mended.

Every finding on the first form was checked by hand; the second follows the remedies,
trains the same, and is clean.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from stowax._audit import _memory

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch):
    """A thread that others keep from running is not the loop's fault."""
    monkeypatch.setattr(_memory, "_STARVED_SECONDS", 1.0)


def batches(count=8):
    random = np.random.default_rng(0)
    for _ in range(count):
        yield random.normal(size=(8, 32)).astype(np.float32), random.integers(0, 4, 8)


def mean_loss(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def optax_loop(mended):
    tx = optax.adam(1e-2)
    keys = jax.random.split(jax.random.key(0))
    params = [jax.random.normal(keys[0], (32, 32)), jax.random.normal(keys[1], (32, 4))]
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnames=("params", "state") * mended)
    def step(params, state, x, y):
        def loss_fn(params):
            return mean_loss(jax.nn.relu(x @ params[0]) @ params[1], y)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for x, y in stowax.prefetch(batches()) if mended else batches():
        params, state, loss = step(params, state, x, y)
        losses.append(loss if mended else float(loss))
    return losses


def nnx_loop(mended):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(32, 32, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.dropout(self.first(x))))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1) * mended)
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda model: mean_loss(model(x), y))(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for x, y in stowax.prefetch(batches()) if mended else batches():
        loss = step(model, optimizer, x, y)
        losses.append(loss if mended else float(loss))
    return losses


def equinox_loop(mended):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(32, 4, 32, 1, key=jax.random.key(0))
    tx = optax.adam(1e-2)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all-except-first" if mended else "none")
    def step(batch, model, state):
        x, y = batch

        def loss_fn(model):
            return mean_loss(jax.vmap(model)(x), y)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for batch in stowax.prefetch(batches()) if mended else batches():
        model, state, loss = step(batch, model, state)
        losses.append(loss if mended else loss.item())
    return losses


@pytest.mark.parametrize("loop", [optax_loop, nnx_loop, equinox_loop])
def test_a_loop_from_the_documentation_and_its_mended_twin(loop):
    with stowax.audit(least_bytes=4096) as audit:
        before = loop(False)
    kinds = sorted(finding.kind for finding in audit.findings)
    assert kinds == ["host-read", "implicit-transfer", "not-donated"]
    with stowax.audit(least_bytes=4096) as audit:
        after = loop(True)
    assert audit.findings == ()
    assert audit.record.transfers == 1  # the batch
    np.testing.assert_allclose(before, np.asarray(after), rtol=1e-6)


def naive_loop():
    step = jax.jit(lambda w, x, rate, k: (w - rate * x, jnp.sum(w * x), jnp.max(w) + k))
    w, losses = jnp.ones((8, 8)), []
    for k in range(8):
        x = np.full((8, 8), k, np.float32)
        rows = [jax.device_put(row) for row in x]
        w, loss, largest = step(w, jnp.stack(rows), 0.1, float(k))
        losses.append(float(loss))
        np.asarray(largest)
    return losses


def naive_loop_mended():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x, rate, k):
        return w - rate * x, jnp.sum(w * x), jnp.max(w) + k, k + 1

    w, k, rate, losses = jnp.ones((8, 8)), jnp.float32(0), jnp.float32(0.1), []
    for x in stowax.prefetch(np.full((8, 8), k, np.float32) for k in range(8)):
        w, loss, _, k = step(w, x, rate, k)
        losses.append(loss)
    return jax.device_get(losses)


def test_a_naive_loop_comes_from_ten_transfers_a_step_to_one():
    with stowax.audit(least_bytes=256) as audit:
        before = naive_loop()
    assert audit.record.transfers >= 10
    assert {f.kind for f in audit.findings} == {
        "host-read",
        "implicit-transfer",
        "many-transfers",
        "not-donated",
        "repeated-constant",
    }
    with stowax.audit(least_bytes=256) as audit:
        after = naive_loop_mended()
    assert audit.findings == ()
    # The batch, and one read of all losses at the end.
    assert round(audit.record.transfers) == 1
    assert before == [float(loss) for loss in after]
