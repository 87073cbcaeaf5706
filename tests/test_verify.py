"""The gate: a right plan passes, a planted fault is found where it was planted.

Faults are put into the pipeline itself, or around the planned function, as a compiler
would make them; the step and its plan know nothing of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from plan_parts import changed
from stowax._errors import ArgumentError, PlanMismatchError, VerifyMemoryError
from stowax._layers import _passes
from stowax._verify import _gate, _tolerance
from verified_steps import (
    LARGE,
    LAYERS,
    ROWS,
    arguments,
    around,
    hosted,
    loss_fn,
    made,
    offloading,
    plan_for,
    reload_of,
    train_step,
    verify,
)


def failed(v):
    assert not v
    return {leaf.path for leaf in v.failed}


GRADIENTS = {"loss_fn: args[0]['down']", "loss_fn: args[0]['up']"}
PARAMETERS = {"out[0]['down']", "out[0]['up']"}
MOMENTUM = {"out[1]['down']", "out[1]['up']"}


def test_a_right_plan_passes_and_the_arguments_are_left_alone():
    args = jax.tree.map(jnp.copy, arguments(LARGE))
    v = verify(made(LARGE), args=args, steps=3)
    assert v
    assert v.passed
    assert v.repeatable
    assert (v.blamed, v.why, v.notes) == ((), "", ())
    assert {leaf.path: leaf.role for leaf in v.leaves} == {
        **dict.fromkeys(GRADIENTS, "gradient"),
        "out[0]['down']": "parameter",
        "out[0]['up']": "parameter",
        "out[1]['down']": "optimizer state",
        "out[1]['up']": "optimizer state",
        "out[2]": "output",
    }
    # An error of a thousandth of what is learnt would be found.
    assert all(0 < x.tolerance < 1e-3 * x.change for x in v.leaves)
    for mine, before in zip(
        jax.tree.leaves(args), jax.tree.leaves(arguments(LARGE)), strict=True
    ):
        assert mine.sharding.memory_kind == "device"
        np.testing.assert_array_equal(mine, before)


@pytest.mark.slow
def test_a_reload_of_the_wrong_layer_is_blamed_on_its_value(monkeypatch):
    (value,) = (d.value for d in made().decisions if d.name.startswith("dot_general"))
    reload_of(value, monkeypatch)
    v = verify()
    # The loss of the first step is right: nothing of it went through the host.
    assert failed(v) == GRADIENTS | PARAMETERS | MOMENTUM | {"out[2]"}
    assert {x.path: x.step for x in v.failed}["out[2]"] == 2
    (blamed,) = v.blamed
    assert (blamed.value, blamed.decision, blamed.instead) == (value, "offload", "keep")
    assert blamed.name.startswith("dot_general verified_steps.py:")
    assert v.why == (
        "With it, and nothing else offloaded, the step is wrong; with all of the plan "
        "but for it the step is right."
    )
    # Steps and gradients, plain and planned; nothing offloaded; at most two halves of
    # each of two cuts (of three offloads); all but one.
    assert v.runs <= 4 + 1 + 2 * 2 + 1


@pytest.mark.slow
def test_a_gradient_that_a_small_learning_rate_would_hide(monkeypatch):
    def step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-9 * g, params, grads), loss

    params, _, x = arguments()
    plan = offloading(plan_for(params, x, step=step, pin={"sin*": "recompute"}))
    (value,) = (d.value for d in plan.decisions if d.name.startswith("dot_general"))
    reload_of(value, monkeypatch)
    v = verify(plan, step, (params, x))
    # The product is read again for its sine, which only one gradient needs.
    assert "loss_fn: args[0]['down']" in failed(v)
    assert failed(v) <= {"loss_fn: args[0]['down']", "out[0]['down']"}
    assert [b.value for b in v.blamed] == [value]
    assert v.notes[0].startswith("In 2 of 5 leaves rounding alone explains as much as")


@pytest.mark.slow
def test_gradients_that_cannot_be_seen_are_said_to_be_judged_by_the_state():
    def step(params, momentum, x):
        def add(total, part):
            grads = jax.grad(loss_fn)(params, part)
            return jax.tree.map(jnp.add, total, grads), None

        parts = x.reshape(2, -1, x.shape[1])
        grads = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), momentum

    v = verify(plan_for(*arguments(), step=step, pin={"sin*": "recompute"}), step)
    assert v
    assert {leaf.role for leaf in v.leaves} == {"parameter", "output"}
    assert v.notes == (
        "The gradients are not compared by themselves: they are made inside of a loop "
        "of the step, or a jax.vmap. They are judged by the state that they make.",
    )


@pytest.mark.slow
def test_what_is_wrong_however_it_is_stored(monkeypatch):
    right = _passes.write_layer

    def write_layer(layers, value, layer):
        wrong = value.shape == (ROWS, 4 * 16)  # the product, and its sine
        return right(layers, value, LAYERS - 1 - layer if wrong else layer)

    monkeypatch.setattr(_passes, "write_layer", write_layer)
    v = verify(plan_for(*arguments(), pin={"cos*": "recompute"}))
    assert not v
    assert [b.name.split()[0] for b in v.blamed] == ["dot_general", "sin"]
    assert {(b.decision, b.instead) for b in v.blamed} == {("keep", "recompute")}
    assert v.why == (
        "Each of these is wrong with everything else computed again; with all of the "
        "plan but for them the step is right."
    )


@pytest.mark.slow
def test_a_fault_that_is_no_decisions(monkeypatch):
    around(monkeypatch, lambda call, out: (out[0], out[1], out[2] * 1.01))
    v = verify()
    assert failed(v) == {"out[2]"}
    assert v.blamed == ()
    assert v.why.startswith("No decision is to blame: with everything kept on the")


@pytest.mark.slow
def test_a_clobbered_buffer_that_shows_at_step_eight(monkeypatch):
    count = []

    def fault(call, out):
        params, momentum, loss = out
        count.append(call)
        if len(count) % 10 != 8:
            return out
        count.clear()
        spoilt = momentum["up"].at[2, 5].set(jnp.nan)
        spoilt = jax.device_put(spoilt, momentum["up"].sharding)
        return params, momentum | {"up": spoilt}, loss

    around(monkeypatch, fault, hosted("args[1]['up']"))
    v = verify(made(LARGE), args=arguments(LARGE), steps=10)
    assert "out[1]['up']" in failed(v)
    (worst,) = [x for x in v.failed if x.path == "out[1]['up']"]
    assert worst.error is None
    assert "NaN or infinity in" in worst.problem
    assert [b.name for b in v.blamed] == ["args[1]['up']"]


@pytest.mark.slow
def test_a_planned_step_that_does_not_repeat_itself_fails(monkeypatch):
    def fault(call, out):
        return out[0], out[1], out[2] * (1 + 1e-6 * call)

    around(monkeypatch, fault)
    v = verify(blame=False)
    assert not v.failed  # so little could be rounding
    assert (v.passed, v.repeatable) == (False, False)
    assert v.notes == (
        "Two planned runs on the same arguments differ, first in out[2] after step 1; "
        "two plain runs do not. That is a race.",
    )


def test_a_step_that_is_random_itself_is_no_race():
    draw = np.random.default_rng(0)
    answer = jax.ShapeDtypeStruct((), jnp.float32)

    def step(params, momentum, x):
        noise = jax.pure_callback(lambda: np.float32(draw.normal()), answer)
        params, momentum, loss = train_step(params, momentum, x)
        return params, momentum, loss + 1e-6 * noise

    v = verify(plan_for(*arguments(), step=step), step)
    assert v
    assert "the step itself is not deterministic" in v.notes[-1]


def test_leaves_of_another_kind_are_said(monkeypatch):
    def fault(call, out):
        params, momentum, loss = out
        host = params["up"].sharding.with_memory_kind("pinned_host")
        params = params | {"up": jax.device_put(params["up"], host)}
        return params, momentum, loss.astype(jnp.bfloat16)

    around(monkeypatch, fault)
    v = verify(steps=1, blame=False)
    assert {leaf.path: (leaf.error, leaf.problem) for leaf in v.failed} == {
        "out[0]['up']": (
            None,
            "it is returned in pinned_host memory, and belongs in device memory",
        ),
        "out[2]": (None, "it is bfloat16[], plain float32[]"),
    }


@pytest.mark.slow
def test_sharded_arguments_against_one_processor():
    """The sums are really added up in another order: by eight devices and by one."""
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    params, momentum, x = arguments()
    everywhere = NamedSharding(mesh, PartitionSpec())
    params, momentum = jax.device_put((params, momentum), everywhere)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))
    args = params, momentum, x
    plan = plan_for(*args, pin={"sin*": "recompute"})
    v = verify(plan, args=args, reference="cpu", steps=3)
    assert v
    assert any(leaf.error > 0 for leaf in v.leaves)
    assert all(leaf.error < leaf.tolerance / 2 for leaf in v.leaves)
    assert x.sharding.spec == PartitionSpec("rows")


@pytest.mark.slow
def test_random_keys_counters_and_a_plan_that_moves_nothing():
    def step(state, x):
        key, new = jax.random.split(state["key"])
        noisy = x + 0.1 * jax.random.normal(new, x.shape)
        params, momentum, loss = train_step(state["params"], state["momentum"], noisy)
        count = state["count"] + 1
        state = {"params": params, "momentum": momentum, "key": key, "count": count}
        return state, loss

    params, momentum, x = arguments()
    state = {"params": params, "momentum": momentum, "count": jnp.int32(0)}
    args = state | {"key": jax.random.key(3)}, np.asarray(x)
    plan = plan_for(*args, step=step)
    assert plan.outcome == "unneeded"
    v = verify(plan, step, args)
    assert v
    assert v.notes == (
        "The plan moves nothing: both runs are of the step as it is written.",
    )
    assert {x.path: x.tolerance for x in v.leaves}["out[0]['count']"] == 0.0


def test_a_compile_only_plan_is_checked_here_and_it_says_what_that_is_worth():
    plan = changed(made(), target="v5p-8", compile_only=True)
    v = verify(plan, steps=1)
    assert v
    assert v.notes == (
        "The plan is for v5p-8, and ran on cpu here: this shows that its decisions "
        "leave the step's numbers alone, and nothing of what the compiler for v5p-8 "
        "makes of them. Verify again on that machine.",
    )


def test_what_cannot_be_verified_is_answered():
    def said(**options):
        with pytest.raises(ArgumentError) as caught:
            verify(**options)
        return str(caught.value)

    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments())
    assert said(args=specs) == (
        "args[0]['down']: got a jax.ShapeDtypeStruct, which has no numbers. Give "
        "arrays: verify runs the step."
    )
    assert said(plan="plan.json").startswith("plan: got str. Write stowax.verify(step")
    assert said(steps=0) == "steps: got 0. Write a whole number from 1 on."
    assert said(reference="host").startswith("reference: got 'host'. Write \"device\"")
    assert said(step="train").startswith("step: got 'train', which cannot be called")
    params, momentum, x = arguments()
    with pytest.raises(PlanMismatchError, match=r"step: args\[2\] is float32\[8,16\]"):
        verify(args=(params, momentum, x[:8]))


@pytest.mark.parametrize(
    ("version", "instead"),
    [("plain", 'Write reference="cpu" to run it'), ("planned", "numpy arrays")],
)
def test_no_room_on_the_device_is_said(version, instead, monkeypatch):
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2 bytes.\nmore"

    def run_out(*args):
        raise jax.errors.JaxRuntimeError(full)

    def plain_version(*args, right=_gate.plain_version):
        return dataclasses.replace(right(*args), jitted=run_out)

    if version == "plain":
        monkeypatch.setattr(_gate, "plain_version", plain_version)
    else:
        around(monkeypatch, run_out)
    with pytest.raises(VerifyMemoryError) as caught:
        verify()
    said = str(caught.value)
    assert said.startswith(f"verify: the {version} step does not fit on the device.")
    assert instead in said
    assert said.endswith("trying to allocate 2 bytes.")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_an_eighth_of_the_floats_moves_by_a_rounding_under_strict_promotion(dtype):
    # The tests run under it, and bfloat16 beside float32 is an error there.
    leaf = jnp.linspace(1.0, 1.9, 4096, dtype=dtype)
    unit = float(jnp.finfo(dtype).eps) / 2
    rounding = _tolerance.Rounding(unit=unit, terms=1.0)
    moved = _tolerance.shaken(leaf, rounding, seed=1)
    other = _tolerance.shaken(leaf, rounding, seed=1, number=1)
    assert moved.dtype == dtype
    change = np.asarray(moved, np.float64) / np.asarray(leaf, np.float64) - 1
    assert np.all(np.abs(change) <= 4 * unit)
    # Of 4096 draws with probability 1/8: five standard deviations of 21 around 512.
    assert 405 < np.sum(change != 0) < 619
    assert 200 < np.sum(change > 0) < 312
    assert not np.array_equal(moved, other)
