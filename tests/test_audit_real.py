"""Loops as the documentation of JAX libraries writes them: as they are, and mended.

Every finding on the first form was checked by hand; the second follows the remedies,
trains the same, and is clean.
"""

import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._audit import _memory

pytest.importorskip("optax")

from benchmarks.models import training_loops

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch):
    """A thread that others keep from running is not the loop's fault."""
    monkeypatch.setattr(_memory, "_STARVED_SECONDS", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "library"),
    [
        ("optax_loop", "optax"),
        ("nnx_loop", "flax.nnx"),
        ("equinox_loop", "equinox"),
    ],
)
def test_a_loop_from_the_documentation_and_its_mended_twin(loop, library):
    pytest.importorskip(library)
    made = getattr(training_loops, loop)
    with stowax.audit(least_bytes=4096) as audit:
        before = made()(8)
    kinds = sorted(finding.kind for finding in audit.findings)
    assert kinds == ["host-read", "implicit-transfer", "not-donated"]
    with stowax.audit(least_bytes=4096) as audit:
        after = made(training_loops.FIXES)(8)
    assert audit.findings == ()
    # The batch, and one read of all losses at the end.
    assert round(audit.record.transfers) == 1
    np.testing.assert_allclose(before, np.asarray(after), rtol=1e-6)


def test_a_naive_loop_comes_from_ten_transfers_a_step_to_one():
    with stowax.audit(least_bytes=256) as audit:
        before = training_loops.naive_loop()(8)
    assert audit.record.transfers >= 10
    assert {f.kind for f in audit.findings} == {
        "host-read",
        "implicit-transfer",
        "many-transfers",
        "not-donated",
        "repeated-constant",
    }
    with stowax.audit(least_bytes=256) as audit:
        after = training_loops.naive_loop(training_loops.FIXES)(8)
    assert audit.findings == ()
    assert round(audit.record.transfers) == 1
    assert before == [float(loss) for loss in after]


def test_an_optimizer_outside_of_jit_is_not_taken_for_the_step():
    """Adam's own jitted functions handle the state twice a step, and are optax's."""
    optax = pytest.importorskip("optax")
    gradient = jax.jit(jax.grad(lambda w, x: ((w @ x) ** 2).mean()))
    optimizer = optax.adam(1e-3)
    w, x = jnp.ones((8, 8)), jnp.ones(8)
    state = optimizer.init(w)
    with stowax.audit() as audit:
        for _ in range(6):
            g = gradient(w, x)
            updates, state = optimizer.update(g, state, w)
            w = optax.apply_updates(w, updates)
    assert audit.record.steps == 6
    [found] = audit.findings
    assert found.kind == "eager-dispatch"
    assert "optimizer.update(" in linecache.getline(found.file, found.line)
