"""Real runs on the CPU: what is measured, and that the arguments come to no harm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._errors import ArgumentError, TraceError
from stowax.report import comparison_text

LAYERS, ROWS = 5, 96


def train(state, batch):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    value, gradient = jax.value_and_grad(
        lambda w: jnp.sum(jax.lax.scan(layer, batch, w)[0])
    )(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, value


STEP = jax.jit(train, donate_argnums=0)


def arguments():
    w = jnp.full((LAYERS, ROWS, ROWS), 0.01, jnp.float32)
    return {"w": w}, jnp.ones((ROWS, ROWS), jnp.float32)


def test_a_donating_step_is_measured_and_its_arguments_live():
    state, batch = arguments()
    before = np.asarray(state["w"]).copy()
    found = stowax.measure(STEP, state, batch, steps=2)
    assert found.origin == "measured"
    assert found.step_seconds == pytest.approx(
        found.compute_seconds + found.idle_seconds, rel=1e-6
    )
    assert found.exposed_seconds == found.collective_wait_seconds == 0
    assert {interval.lane for interval in found.intervals} == {"compute"}
    assert not state["w"].is_deleted()
    np.testing.assert_array_equal(np.asarray(state["w"]), before)
    assert "the median of 2 steps" in found.assumptions[0]
    # The names are the instructions of the program that inspect simulates. A trip of
    # the loop runs each of its own once: as often as there are layers.
    simulated = stowax.inspect(STEP, state, batch).timeline
    names = [interval.name for interval in found.intervals]
    assert max(names.count(name) for name in {*names}) >= LAYERS
    assert {*names} & {interval.name for interval in simulated.intervals}
    assert "ratio" in comparison_text(simulated, found, 80).splitlines()[0]


def test_a_recorded_loop_is_measured_without_a_run(tmp_path):
    state, batch = arguments()
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            state, value = STEP(state, batch)
        value.block_until_ready()
    specs = jax.eval_shape(lambda: (state, batch))
    found = stowax.measure(STEP, *specs, trace=tmp_path)
    assert "the median of 3 steps" in found.assumptions[0]
    assert found.compute_seconds > 0
    other = jax.jit(lambda x: jnp.sin(x) @ x)
    with pytest.raises(TraceError, match="did not run on /host:CPU"):
        stowax.measure(other, specs[1], trace=tmp_path)


def test_static_arguments_and_compiled_steps():
    power = jax.jit(lambda x, n: x**n, static_argnums=1, donate_argnums=0)
    x = jnp.ones((64, 64))
    assert stowax.measure(power, x, 3, steps=1).compute_seconds > 0
    compiled = jax.jit(jnp.sin, donate_argnums=0).lower(x).compile()
    assert stowax.measure(compiled, x, steps=1).compute_seconds > 0
    assert not x.is_deleted()


def test_a_step_that_fails_leaves_its_arguments_alone():
    def broken(x):
        def fail(_):
            raise ValueError("the user's own")

        return x + jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])

    x = jnp.ones((8, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the user's own"):
        stowax.measure(jax.jit(broken, donate_argnums=0), x)
    assert not x.is_deleted()
    # And the profiler is free again.
    assert stowax.measure(jax.jit(jnp.sin), x, steps=1).step_seconds > 0


def test_no_room_for_copies(monkeypatch):
    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax, "device_put", refuse)
    state, batch = arguments()
    size = LAYERS * ROWS * ROWS * 4 / 1024
    with pytest.raises(TraceError) as caught:
        stowax.measure(STEP, state, batch)
    assert str(caught.value) == (
        "args: no memory is left for a copy of what the step donates "
        f"({size:.1f} KiB). They are unharmed. Record your training loop with "
        "jax.profiler.trace(folder), and write stowax.measure(step, *args, "
        "trace=folder)."
    )


def test_the_profiler_runs_already(tmp_path):
    state, batch = arguments()
    with jax.profiler.trace(tmp_path), pytest.raises(TraceError) as caught:
        stowax.measure(STEP, state, batch)
    assert "the profiler did not start" in str(caught.value)
    assert "hand its folder in as trace=" in str(caught.value)


X = jax.ShapeDtypeStruct((8, 8), "float32")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda gone: stowax.measure(train, 1.0),
            "step: got function. Write stowax.measure(jax.jit(step), ...).",
        ),
        (
            lambda gone: stowax.measure(STEP, {"w": X}, X),
            "args[0]['w']: got a jax.ShapeDtypeStruct. The step is run: pass arrays, "
            "or the trace of a run (trace=...).",
        ),
        (
            lambda gone: stowax.measure(STEP, {"w": gone}, X),
            "args[0]['w']: got an array that was deleted or donated. Pass what the "
            "last step returned in its place.",
        ),
        (
            lambda gone: stowax.measure(STEP, steps=0),
            "steps: got 0. Write a number of steps, 1 or more.",
        ),
        (
            lambda gone: stowax.measure(jax.jit(jnp.sin), X, trace="nowhere"),
            "trace: got 'nowhere', which has no .xplane.pb file. Write the folder that "
            "was given to jax.profiler.trace.",
        ),
    ],
)
def test_bad_input(call, said):
    gone = jnp.ones((8, 8))
    gone.delete()
    with pytest.raises(ArgumentError) as caught:
        call(gone)
    assert str(caught.value) == said


def test_a_file_that_is_no_trace(tmp_path):
    (tmp_path / "broken.xplane.pb").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ArgumentError, match=r"broken\.xplane\.pb', which is no trace"):
        stowax.measure(jax.jit(jnp.sin), X, trace=tmp_path)
