"""A step is recorded once, and replayed for every program of a plan."""

import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import stowax
from layered import run_layers
from stowax._errors import ArgumentError, StepError
from stowax._jaxprs._canonical import digest, outline
from stowax._layers._rewrite import Rewriter
from stowax._records._stages import Options
from stowax._step._recording import record
from stowax._step._trace import trace_step

LAYERS, WIDTH, ROWS = 3, 8, 16


def arrays():
    weights = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 4
    return weights, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def layer(x, w):
    return x + jnp.tanh(x @ w)


def loss_of(weights, x):
    return jnp.mean(jnp.square(run_layers(layer, x, weights)))


def update(loss):
    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return weights - 0.1 * grads, value

    return step


def recorded(step, *args):
    leaves, structure = jax.tree.flatten(args)
    return record(step, leaves, structure)


@pytest.mark.slow
def test_the_users_code_runs_once_for_all_programs_of_a_plan():
    """Once to be recorded, and as it is written where that is a candidate.

    Once more where the mark is further inside: it is met while all of the loss is
    recorded.
    """
    runs = []

    def loss(weights, x):
        runs.append("recorded" if stowax._mark.current() else "as written")
        return loss_of(weights, x)

    weights = jnp.zeros((LAYERS, 256, 256))
    plan = stowax.plan(
        update(loss), weights, jnp.zeros((512, 256)), budget="2MiB", target="h200"
    )
    assert plan.program.rewritten
    assert len(plan.search.trials) > 0
    assert runs.count("recorded") == 1
    runs.clear()
    marked = stowax.stow(loss)
    around = update(marked), update(lambda weights, x: marked(weights, x) / 2)
    for step, times in zip(around, (1, 2), strict=True):
        x = jnp.zeros((512, 256))
        stowax.plan(step, weights, x, budget="2MiB", target="h200")
        assert runs.count("recorded") == times
        runs.clear()


# Each computes loss and gradients by way of the marked function, in a way of its own.
AROUND = {
    "jit": lambda f: jax.value_and_grad(jax.jit(f)),
    "jit of the gradient": lambda f: jax.jit(jax.value_and_grad(f)),
    "checkpoint": lambda f: jax.value_and_grad(jax.checkpoint(f)),
    "custom_vjp": lambda f: jax.value_and_grad(in_custom_vjp(f)),
    "scan over microbatches": lambda f: accumulated(f),
    "cond": lambda f: in_cond(f),
}


def in_custom_vjp(f):
    @jax.custom_vjp
    def g(weights, x):
        return f(weights, x)

    g.defvjp(lambda w, x: jax.vjp(f, w, x), lambda pull_back, ct: pull_back(ct))
    return g


def accumulated(f):
    def run(weights, x):
        def add(total, part):
            value, grads = jax.value_and_grad(f)(weights, part)
            return total + grads, value

        start = jnp.zeros_like(weights)
        grads, values = jax.lax.scan(add, start, x.reshape(2, ROWS // 2, WIDTH))
        return jnp.mean(values), grads

    return run


def in_cond(f):
    def run(weights, x):
        return jax.lax.cond(
            jnp.sum(x) > 0,
            lambda: jax.value_and_grad(f)(weights, x),
            lambda: jax.value_and_grad(f)(weights, -x),
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_a_marked_function(name):
    def step(weights, x):
        value, grads = AROUND[name](stowax.stow(loss_of))(weights, x)
        return weights - 0.1 * grads, value

    traced = trace_step(step, arrays(), Options())
    assert not traced.recording.left
    assert [s.stack.count for s in traced.stacks.values()]

    def nothing(stack, body):
        return {n: "keep" for n in body.residuals if n in stack.carry_inputs}

    def planned(*args):
        return traced.recording.replay(Rewriter(nothing, Options()), args)

    got, expected = jax.jit(planned)(*arrays()), jax.jit(step)(*arrays())
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_mark_in_a_loop_that_is_differentiated_as_a_whole():
    marked = stowax.stow(lambda w, x: run_layers(layer, x, w))

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, _: (marked(weights, x), None), x, None, length=2)
        return jnp.mean(x)

    found = stowax.plan(update(loss), *arrays())
    assert found.proof.notes[0].startswith(
        "what is differentiated runs as written: its forward and its backward pass "
        "stand in different loops"
    )
    step = found.apply(update(loss))
    expected = jax.jit(update(loss))(*arrays())
    jax.tree.map(np.testing.assert_array_equal, step(*arrays()), expected)


def forwards(weights, x):
    value, tangents = jax.linearize(lambda w: loss_of(w, x), weights)
    return weights - 0.1 * tangents(weights) * weights, value


def checked(weights, x):
    def loss(weights):
        value = loss_of(weights, x)
        checkify.check(value < 1e6, "too large")
        return value

    value, grads = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * grads, value


LEFT = {
    "its derivative is taken forwards (by the function that jax.linearize returns): "
    "nothing is stored for that. Take jax.vjp or jax.grad of it": forwards,
    "it calls checkify.check, which stowax cannot read": checkify.checkify(checked),
}


@pytest.mark.parametrize(("why", "step"), LEFT.items(), ids=["linearize", "checkify"])
def test_what_is_left_as_it_is_written_says_why(why, step):
    found = stowax.plan(step, *arrays())
    assert found.proof.notes[0] == f"what is differentiated runs as written: {why}"
    got, expected = found.apply(step)(*arrays()), jax.jit(step)(*arrays())
    # Of checkify's result the error comes first, which JAX numbers anew in every trace.
    jax.tree.map(np.testing.assert_array_equal, got[-1], expected[-1])


def test_what_goes_wrong_inside_stowax_leaves_the_step_as_it_is_written(monkeypatch):
    def fails(*args, **kwargs):
        raise IndexError("list index out of range")

    monkeypatch.setattr("stowax._layers._rewrite.run_stack", fails)
    step = update(stowax.stow(loss_of))
    found = stowax.plan(step, *arrays())
    assert re.fullmatch(
        r"what is differentiated runs as written: stowax cannot read it \(IndexError: "
        r"list index out of range, at stowax/_layers/_loop_units\.py:\d+\)\. Please "
        r"report that: https://github\.com/stowax/stowax/issues",
        found.proof.notes[0],
    )
    expected = jax.jit(step)(*arrays())
    jax.tree.map(np.testing.assert_array_equal, found.apply(step)(*arrays()), expected)


def test_a_step_that_is_wrong_without_a_plan_fails_alike():
    def step(weights, x):
        return jax.value_and_grad(stowax.stow(loss_of))(weights @ x, x)

    with pytest.raises(TypeError) as plain:
        jax.jit(step).trace(*arrays())
    with pytest.raises(TypeError) as planned:
        stowax.plan(step, *arrays())
    assert str(planned.value) == str(plain.value)


def test_what_is_changed_in_place_and_not_returned_is_refused():
    def step(state, x):
        value, grads = jax.value_and_grad(stowax.stow(loss_of))(state["w"], x)
        state["w"] = state["w"] - 0.1 * grads
        return value, jnp.sum(jnp.square(grads))

    weights, x = arrays()
    with pytest.raises(StepError) as caught:
        stowax.plan(step, {"w": weights}, x)
    assert str(caught.value).startswith(
        "step: it changes args[0]['w'] in place and does not return it, and under "
        "jax.jit such a change is lost. Return the new parameters"
    )

    def returning(state, x):
        value, grads = jax.value_and_grad(stowax.stow(loss_of))(state["w"], x)
        state["w"] = state["w"] - 0.1 * grads
        return state, value

    assert stowax.plan(returning, {"w": weights}, x).fits


def test_new_parameters_that_reach_no_output_are_refused():
    def step(weights, x):
        value, grads = jax.value_and_grad(stowax.stow(loss_of))(weights, x)
        weights - 0.1 * grads
        return value, jnp.sum(jnp.square(grads))

    with pytest.raises(StepError, match="none of its outputs is made of them"):
        stowax.plan(step, *arrays())

    def probe(weights, x):
        value, grads = jax.value_and_grad(stowax.stow(loss_of))(weights, x)
        return value, jnp.sum(jnp.square(grads))

    assert stowax.plan(probe, *arrays()).fits


@pytest.mark.slow
def test_weak_types_of_the_first_step_are_no_other_program():
    def step(weights, x):
        bias = weights["b"]

        def loss(w, x):
            return jnp.mean(run_layers(lambda x, w: layer(x, w) + bias[None, :], x, w))

        value, grads = jax.value_and_grad(stowax.stow(loss))(weights["w"], x)
        return {"w": weights["w"] - 0.1 * grads, "b": bias * jnp.float32(1)}, value

    weights, x = arrays()
    state = {"w": weights, "b": jnp.full((WIDTH,), 0.1)}
    assert state["b"].weak_type
    found = stowax.plan(step, state, x, pin={"*tanh*": "recompute"})
    planned, plain = found.apply(step), jax.jit(step)
    mine, other = found.place(jax.tree.map(jnp.copy, state)), state
    for _ in range(3):
        (mine, value), (other, expected) = planned(mine, x), plain(other, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert mine["b"].weak_type == other["b"].weak_type


@pytest.mark.slow
def test_a_plan_fits_the_step_in_another_process(tmp_path):
    """What JAX has traced before decides how a program prints, and not what it is."""
    script = textwrap.dedent(
        """
        import sys, jax, jax.numpy as jnp, stowax

        def inner(x, w):
            return x + jax.nn.gelu(jnp.tanh(x @ w)), None

        @stowax.stow
        def loss(weights, x, labels):
            x, _ = jax.lax.scan(lambda x, w: jax.lax.scan(inner, x, w), x, weights)
            picked = jnp.take_along_axis(x, labels[:, None], 1)
            return jnp.mean(jax.nn.one_hot(labels, 8) * x) + jnp.mean(picked)

        def step(weights, x, labels):
            value, grads = jax.value_and_grad(loss)(weights, x, labels)
            return weights - 0.1 * grads, value

        args = jnp.ones((3, 2, 8, 8)), jnp.ones((16, 8)), jnp.zeros(16, jnp.int32)
        if sys.argv[1] == "plan":
            jax.jit(jax.grad(loss))(*args)  # fills JAX's caches
            pin = {"activation": "recompute"}
            plan = stowax.plan(step, *args, pin=pin, progress=False)
            plan.save(sys.argv[2])
        else:
            plan = stowax.load_plan(sys.argv[2])
        print(float(plan.apply(step)(*args)[1]))
        """
    )
    path = tmp_path / "step.py"
    path.write_text(script)
    saved = str(tmp_path / "plan.json")
    lines = [
        subprocess.run(
            [sys.executable, str(path), what, saved],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()[-1]
        for what in ("plan", "apply")
    ]
    assert lines[0] == lines[1]


def test_an_outline_leaves_out_numbers_meshes_and_names():
    def outlined(function, *args):
        return outline(jax.make_jaxpr(function)(*args))

    x = jnp.ones((4, 4))
    mesh = jax.make_mesh((1,), ("a",))
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("a")))
    assert outlined(lambda x: x * 0.1, x) == outlined(lambda y: y * 0.2, x)
    assert outlined(jnp.tanh, x) == outlined(jnp.tanh, spread)
    assert outlined(jnp.tanh, x) != outlined(jnp.sin, x)
    assert outlined(lambda x: x @ x, x) != outlined(lambda x: x @ x.T, x)
    assert outlined(jnp.tanh, x) != outlined(jnp.tanh, x.astype(jnp.bfloat16))
    jaxpr = jax.make_jaxpr(lambda x: jnp.sum(jnp.tanh(x)))(x)
    assert outline(jaxpr)[1] == "tanh [accuracy=None] 0 -> float32[4,4]"
    assert digest(jaxpr) == digest(jax.make_jaxpr(lambda z: jnp.sum(jnp.tanh(z)))(x))


def test_the_recording_keeps_effects_in_their_place():
    seen = []

    def step(weights, x):
        def loss(w, x):
            def one(x, w):
                jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
                return layer(x, w)

            return jnp.mean(run_layers(one, x, w))

        return update(stowax.stow(loss))(weights, x)

    found = stowax.plan(step, *arrays(), pin={"activation": "recompute"})
    assert found.program.rewritten
    jax.block_until_ready(found.apply(step)(*arrays()))
    jax.effects_barrier()
    planned, seen[:] = sorted(seen), []
    jax.block_until_ready(jax.jit(step)(*arrays()))
    jax.effects_barrier()
    assert len(planned) == LAYERS
    np.testing.assert_allclose(planned, sorted(seen), rtol=1e-6)


def test_arguments_by_their_names():
    step, (weights, x) = update(stowax.stow(loss_of)), arrays()
    found = stowax.plan(step, weights, x=x, pin={"*tanh*": "recompute"})
    expected = jax.jit(step)(weights, x)
    got = found.apply(step)(jnp.copy(weights), x=x)  # donated
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match=r"^bugdet: got an argument that neither"):
        stowax.plan(step, weights, x, bugdet="1GiB")

    def by_name(weights, *, x):
        return step(weights, x)

    found = stowax.plan(by_name, weights, x=x, pin={"*tanh*": "recompute"})
    for a, b in zip(found.apply(by_name)(weights, x=x), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
