"""More faults that are planted: small ones, crashes, randomness, decisions together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plan_parts import changed
from stowax._layers import _passes
from stowax._verify._blame import find_blame
from stowax._verify._compare import STATE_ROLES
from verified_steps import (
    LARGE,
    arguments,
    around,
    hosted,
    made,
    plan_for,
    train_step,
    verify,
)


def failed(v):
    assert not v
    return {leaf.path for leaf in v.failed}


@pytest.mark.slow
def test_where_the_step_itself_is_random_nothing_is_blamed():
    draw = np.random.default_rng(0)
    answer = jax.ShapeDtypeStruct((), jnp.float32)

    def step(params, momentum, x):
        noise = jax.pure_callback(lambda: np.float32(draw.normal()), answer)
        params, momentum, loss = train_step(params, momentum, x)
        return params, momentum, loss + noise

    v = verify(plan_for(*arguments(), step=step), step, steps=1)
    assert {leaf.path for leaf in v.failed} <= {"out[2]"}
    assert v.blamed == ()
    assert "the step itself is not deterministic" in v.notes[-1]
    if not v:
        assert v.why.startswith("No decision can be blamed: the step itself gives")


@pytest.mark.slow
def test_nan_in_the_same_places_is_no_error(monkeypatch):
    def step(params, momentum, x):
        params, momentum, loss = train_step(params, momentum, x)
        return params, momentum, loss, jnp.where(x > 0, jnp.log(-x), x)

    plan = plan_for(*arguments(), step=step)
    v = verify(plan, step, steps=1)
    assert v
    assert v.notes[0].startswith("The plain step returns NaN or infinity")
    around(monkeypatch, lambda call, out: (*out[:3], out[3].at[0, 0].set(0.5)))
    changed = verify(plan, step, steps=1, blame=False)
    assert failed(changed) == {"out[3]"}


@pytest.mark.slow
def test_a_planned_step_that_cannot_run_fails_in_words(monkeypatch):
    def fault(call, out):
        raise ValueError("INTERNAL: no such buffer\nmore")

    around(monkeypatch, fault, hosted("args[1]['up']"))
    v = verify(made(LARGE), args=arguments(LARGE))
    assert {leaf.problem for leaf in v.failed if leaf.role != "gradient"} == {
        "the planned step raises ValueError: INTERNAL: no such buffer"
    }
    assert [b.name for b in v.blamed] == ["args[1]['up']"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [lambda x: x * 1.0001, lambda x: x.at[3, 5].set(0.0)],
    ids=["scaled", "one element"],
)
def test_a_reload_that_is_a_little_off_in_one_layer(fault, monkeypatch):
    (value,) = (d.value for d in made().decisions if d.name.startswith("dot_general"))
    right = _passes.read_slot

    def read_slot(slots, layer, scope):
        got = right(slots, layer, scope)
        wrong = scope.endswith(f".{value}")
        return jnp.where(layer == 2, fault(got), got) if wrong else got

    monkeypatch.setattr(_passes, "read_slot", read_slot)
    v = verify(steps=1)
    assert not v
    assert [b.value for b in v.blamed] == [value]


@pytest.mark.slow
def test_old_state_that_is_read_after_the_new_was_written(monkeypatch):
    def fault(call, out):
        params, momentum, loss = out
        stale = jax.tree.map(lambda p, m: p + 0.1 * m - 0.01 * m, params, momentum)
        return params | {"up": stale["up"]}, momentum, loss

    around(monkeypatch, fault, hosted("args[1]['up']"))
    v = verify(made(LARGE), args=arguments(LARGE))
    assert "out[0]['up']" in failed(v)
    assert [b.name for b in v.blamed] == ["args[1]['up']"]


def test_decisions_that_are_wrong_only_together_are_named_without_the_others():
    plan = changed(made(LARGE), stacks=())
    one = next(d for d in plan.decisions if d.role == "optimizer state")
    paths = [a.path for a in plan.program.arguments if a.role in STATE_ROLES]
    assert len(paths) == 4
    decisions = tuple(
        dataclasses.replace(one, name=path, decision="offload") for path in paths
    )
    records = tuple(
        dataclasses.replace(
            a, memory_kind="pinned_host" if a.path in paths else "device"
        )
        for a in plan.program.arguments
    )
    plan = changed(plan, decisions=decisions, arguments=records)
    guilty = {"args[0]['up']", "args[1]['down']"}

    def wrong(part):
        kinds = {a.path: a.memory_kind for a in part.program.arguments}
        return all(kinds[path] == "pinned_host" for path in guilty)

    blamed, why = find_blame(plan, {}, wrong, lambda words: None)
    assert {b.name for b in blamed} == guilty
    assert why == (
        "No single decision is to blame: these 2 are wrong together. With some of them "
        "taken back the step is right."
    )
