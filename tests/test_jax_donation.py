"""Donated arrays in host memory are overwritten by what belongs there, and only that.

JAX pairs donated arguments with results by shape, in the order of the results. Where
only a part of the state is donated, or results come in another order, new parameters on
the device would be written over a moment in host memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.interpreters import mlir

import stowax
from stowax import _jax_donation
from stowax._hlo._program import read_program

pytestmark = pytest.mark.usefixtures("usual_promotion")
OPTIMIZER = optax.adam(1e-2)
LAYERS, WIDTH = 4, 128


def loss_of(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.mean((x - 0.3) ** 2)


def adam(params, moments, x):
    """As people write it."""
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def moments_first(params, moments, x):
    params, moments, loss = adam(params, moments, x)
    return moments, params, loss


def gradients_first(params, moments, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return grads, optax.apply_updates(params, updates), moments, loss


def arguments():
    params = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 11
    return params, OPTIMIZER.init(params), jnp.ones((16, WIDTH))


def trained(step, function, steps=3):
    """Everything that a few steps return."""
    params, moments, x = arguments()
    seen = []
    for _ in range(steps):
        out = step(params, moments, x)
        if function is moments_first:
            moments, params = out[:2]
        else:
            params, moments = out[-3:-1]
        seen.append(jax.tree.map(np.asarray, out))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "donated", "pinned"),
    [
        (adam, (1,), "optimizer state"),
        (moments_first, (0, 1), "optimizer state"),
        (gradients_first, (0, 1), "parameter"),
    ],
    ids=["only the moments", "in another order", "gradients first"],
)
def test_steps_are_those_without_a_plan(function, donated, pinned):
    step = stowax.jit(
        function,
        budget="100%",
        target="h200",
        pin={pinned: "offload"},
        donate_argnums=donated,
        progress=False,
    )
    ours, plain = trained(step, function), trained(jax.jit(function), function)
    kinds = {a.memory_kind for a in step.plan.program.arguments if a.role == pinned}
    assert "pinned_host" in kinds
    for mine, theirs in zip(ours, plain, strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def program_of(plan, target):
    specs = plan.specs(*jax.eval_shape(arguments))
    compiled = stowax.target(target).compile(plan.apply(adam), *specs)
    return read_program(compiled.hlo_module_protos()[0])


def plan_for(target):
    return stowax.plan(
        jax.jit(adam, donate_argnums=1),
        *jax.eval_shape(arguments),
        budget="100%",
        target=target,
        pin={"optimizer state": "offload", "parameter": "keep"},
        progress=False,
    )


@pytest.mark.slow
def test_what_is_on_the_host_stays_there_in_compiled_programs(monkeypatch):
    plan = plan_for("h200")
    program = program_of(plan, "h200")
    assert len(program.aliased) == 3
    assert not program.crossing
    # New parameters beside the old ones, which nobody gave away.
    one = LAYERS * WIDTH * WIDTH * 4
    assert plan.device_bytes >= 2 * one
    assert plan.host_bytes >= 2 * one

    # By JAX alone: the plan's own program is refused, and the moments stay.
    pairing = mlir._set_up_aliases
    monkeypatch.setattr(mlir, "_set_up_aliases", pairing.__wrapped__)
    without = plan_for("h200")
    assert {a.memory_kind for a in without.program.arguments} == {"device"}
    (note,) = [note for note in without.proof.notes if "may not be offloaded" in note]
    assert "write results on the device over arguments in host memory" in note


def backwards(params, moments, x):
    """Adam's moments come back in the other order."""
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    scaled, rest = moments
    return optax.apply_updates(params, updates), (scaled.nu, scaled.mu), rest, loss


@pytest.mark.slow
def test_results_in_another_order_are_not_moved_about_on_the_host(monkeypatch):
    arguments_ = jax.eval_shape(arguments)
    target = stowax.target("v5p-8")

    def planned():
        plan = stowax.plan(
            jax.jit(backwards, donate_argnums=(0, 1)),
            *arguments_,
            budget="8MiB",
            target=target,
            pin={"optimizer state": "offload", "parameter": "keep"},
            progress=False,
        )
        return plan, stowax.inspect(
            plan.apply(backwards), *plan.specs(*arguments_), target=target
        )

    plan, seen = planned()
    assert sum(a.memory_kind == "pinned_host" for a in plan.program.arguments) == 2
    assert "host-compute" not in {hazard.kind for hazard in seen.hazards}

    # By JAX's pairs, each moment is written to the other's place, on the host.
    monkeypatch.setattr(_jax_donation, "_pairs_in", lambda *_: {})
    plan, seen = planned()
    assert "host-compute" in {hazard.kind for hazard in seen.hazards}
