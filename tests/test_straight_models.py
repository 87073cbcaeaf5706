"""Models of different blocks compute the same under every policy by hand.

Plans of them are judged by these policies, so one that computed something else would
be a rival that nobody can have.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import straight
from benchmarks.models import STRAIGHT, _blocks, resnet


def arguments(model):
    """As `model.real()` has them, with weights from NumPy: they need no compile."""
    draws = np.random.default_rng(0)

    def drawn(spec):
        inputs = max(1, spec.size // max(1, spec.shape[-1]))
        return draws.normal(0.1, inputs**-0.5, spec.shape).astype(spec.dtype)

    state = model.sized()[1][0]
    zeros = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), state)
    parameters = jax.tree.map(drawn, state["parameters"])
    return zeros | {"parameters": parameters}, jax.jit(model.batch)()


def outcome(model, args, policy):
    """Loss, gradients (as momentum), and running statistics."""
    state, metrics = jax.jit(model.make_step(policy))(*args)
    return metrics["loss"], state["optimizer"], state.get("statistics")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "graph_net", "big_vocabulary"])
def test_policies_give_the_same_loss_and_gradients(name):
    model = STRAIGHT[name].model(STRAIGHT[name].SMALL)
    # Momentum after one step is the gradient, and quick to compile.
    model = dataclasses.replace(model, optimizer=optax.trace(0.9))
    args = arguments(model)
    given = outcome(model, args, "none")
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(given)]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert sum(leaf.any() for leaf in leaves) > 0.9 * len(leaves)
    for policy in _blocks.POLICIES[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5),
            *(given, outcome(model, args, policy)),
        )


@pytest.mark.slow
def test_policies_put_checkpoints_where_they_say():
    model = resnet.model(resnet.SMALL)  # stem, three bottlenecks, head
    for policy, count in {"none": 0, "all": 1, "blocks": 5, "sqrt": 3}.items():
        step, args = model.sized(policy)
        assert str(jax.make_jaxpr(step)(*args)).count("remat2[") == count, policy


def test_an_unknown_policy_is_refused():
    step, args = resnet.model(resnet.SMALL).sized("some")
    with pytest.raises(ValueError, match="policy: one of none, all, blocks, sqrt"):
        jax.eval_shape(step, *args)


def line(device_bytes, step_seconds, **more):
    given = {"model": "unet", "target": "h200", "device_bytes": device_bytes}
    return given | {"step_seconds": step_seconds} | more


def test_plans_are_compared_with_the_fastest_policy_that_fits():
    cells = {
        f"unet, h200, {policy}": line(*figures, policy=policy)
        for policy, figures in {
            "none": (100, 1.0),
            "all": (110, None),  # the compiler refused it for its size
            "blocks": (30, 1.5),
            "sqrt": (50, 1.4),
        }.items()
    }

    def outcome_at(budget, seconds, fits=True):
        best = straight.best_by_hand(cells, "unet", "h200", budget)
        return straight.outcome_of(line(budget, seconds, fits=fits), best)

    assert outcome_at(60, 1.05) == "0.750"  # beside sqrt, the faster of two
    assert outcome_at(49, 1.8) == "**1.200**"  # blocks
    assert outcome_at(29, 1.8) == "alone"
    assert outcome_at(29, 1.8, fits=False) == "neither fits"
    assert outcome_at(30, 1.8, fits=False) == "**lost**"
    best = straight.best_by_hand(cells, "unet", "h200", 60)
    assert straight.outcome_of({"error": "refused"}, best) == "**lost**"
