"""What lies in memory over a step: against XLA's own peak, and by role.

The programs are compiled for chips that are not there. Expected bytes are derived from
the sizes below: `LAYERS` layers of a product and a tanh on `ROWS` rows of `WIDTH`.
"""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import stowax
from stowax._records._memory import MEMORY_ROLES

LAYERS, ROWS, WIDTH = 8, 4096, 512
STACK = LAYERS * ROWS * WIDTH * 4
WEIGHTS = LAYERS * WIDTH * WIDTH * 4


def updated(state, gradients):
    """Two moments and a step, element by element."""
    first = 0.9 * state["first"] + 0.1 * gradients
    second = 0.99 * state["second"] + 0.01 * gradients**2
    weights = state["weights"] - 1e-3 * first / (jnp.sqrt(second) + 1e-8)
    return {"weights": weights, "first": first, "second": second}


def layer(x, w):
    return jnp.tanh(x @ w), None


def loss(weights, x, body=layer):
    return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)


def unrolled_loss(weights, x):
    for i in range(LAYERS):
        x = layer(x, weights[i])[0]
    return jnp.mean(x**2)


def checkpointed_loss(weights, x):
    return loss(weights, x, jax.checkpoint(layer))


def train(loss_fn):
    def step(state, batch):
        value, gradients = jax.value_and_grad(loss_fn)(state["weights"], batch["x"])
        return updated(state, gradients), value

    return jax.jit(step, donate_argnums=0)


def state_and_batch():
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return dict.fromkeys(("weights", "first", "second"), weights), {"x": x}


def gradients_only(loss_fn):
    return jax.jit(jax.value_and_grad(loss_fn))


def inference(weights, x):
    return jax.jit(loss)(weights, x)


STEPS = {
    "train": lambda: (train(loss), state_and_batch()),
    "train, checkpointed": lambda: (train(checkpointed_loss), state_and_batch()),
    "gradients, unrolled": lambda: (
        gradients_only(unrolled_loss),
        (state_and_batch()[0]["weights"], state_and_batch()[1]["x"]),
    ),
    "inference": lambda: (
        jax.jit(inference),
        (state_and_batch()[0]["weights"], state_and_batch()[1]["x"]),
    ),
    "planned": lambda: (train_planned(), state_and_batch()),
}


@functools.cache
def inspected(name, target):
    step, args = STEPS[name]()
    if name == "planned":
        plan = planned(target)
        step, args = plan.apply(step), plan.specs(*args)
    return stowax.inspect(step, *args, target=target)


def train_planned():
    marked = stowax.stow(loss)

    def step(state, batch):
        value, gradients = jax.value_and_grad(marked)(state["weights"], batch["x"])
        return updated(state, gradients), value

    return step


@functools.cache
def planned(target):
    return stowax.plan(
        train_planned(),
        *state_and_batch(),
        pin={"*tanh*": "offload"},
        target=target,
        progress=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "h200") for name in STEPS),
        # Compiling unrolled layers for a TPU takes a minute: `benchmarks.inspection`.
        *((name, "v5p-8") for name in STEPS if "unrolled" not in name),
        ("train", "v5e-4"),
        ("gradients, unrolled", "a100-80"),
    ],
)
def test_the_peak_is_the_compilers_own(name, target):
    found = inspected(name, target)
    memory = found.memory_timeline
    assert memory.compiler_peak_bytes > 0
    assert memory.peak_bytes == memory.compiler_peak_bytes
    curve = memory.device
    assert sum(curve.by_role().values()) == curve.peak_bytes
    assert curve.peak_bytes == max(m.total for m in curve.moments)


def stacked_by_jax():
    """How many values of a layer the traced step stacks for its backward pass.

    Before JAX 0.12 that is the layer's input, tanh and 1 - tanh; then the input and
    1 - tanh**2.
    """
    step, args = STEPS["train"]()
    scan = next(e for e in step.trace(*args).jaxpr.eqns if e.primitive.name == "scan")
    return sum(v.aval.shape == (LAYERS, ROWS, WIDTH) for v in scan.outvars)


def stacks(curve, role):
    return [b for b in curve.blocks if b.role == role and b.filled_in]


@pytest.mark.parametrize("target", ["v5p-8", "h200"])
def test_arguments_and_kept_activations_have_their_roles(target):
    curve = inspected("train", target).memory_timeline.device
    roles = curve.by_role()
    assert roles["parameter"] == pytest.approx(WEIGHTS, rel=0.01)
    assert roles["optimizer state"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert roles["batch"] == pytest.approx(ROWS * WIDTH * 4, rel=0.01)
    assert roles["kept activation"] >= STACK / 2  # bfloat16 inputs of products on a TPU
    (stack, *_) = stacks(curve, "kept activation")
    assert stack.source.startswith(__file__)
    assert stack.shape.split("[")[1].startswith(f"{LAYERS},")
    names = {b.framework_name for b in curve.blocks if b.role == "parameter"}
    assert names == {"state['weights']"}


@pytest.mark.parametrize("target", ["v5p-8", "h200"])
def test_a_stack_fills_in_the_forward_loop_and_empties_in_the_backward(target):
    memory = inspected("train", target).memory_timeline
    stack = stacks(memory.device, "kept activation")[0]
    forward, backward = (
        [m for m in memory.device.moments if m.loop == body]
        for body in (stack.filled_in, stack.emptied_in)
    )
    trips = {loop.body: loop.trips for loop in memory.loops}
    assert trips[stack.filled_in] == trips[stack.emptied_in] == LAYERS
    assert {m.trip for m in forward} == set(range(LAYERS))
    # A layer's slot at a time: what JAX stacks fills up in the forward loop and empties
    # in the backward one, which fills the gradients' stack.
    kept = [b for b in memory.device.blocks if b.emptied_in == stack.emptied_in]
    assert {b.filled_in for b in kept} == {stack.filled_in}
    assert {b.role for b in kept} == {"kept activation"}
    assert len(kept) == stacked_by_jax()
    slots = sum(b.bytes for b in kept) / LAYERS
    held = {m.trip: m.empty for m in forward}
    assert held[0] - held[LAYERS - 1] == (LAYERS - 1) * slots
    left = {m.trip: m.empty for m in backward}
    freed = slots - WEIGHTS / LAYERS
    assert left[LAYERS - 1] - left[0] == (LAYERS - 1) * freed
    times = [m.seconds for m in memory.device.moments]
    assert times == sorted(times)


@pytest.mark.parametrize("target", ["v5p-8", "h200"])
def test_what_a_checkpoint_computes_again_is_told_apart(target):
    plain = inspected("train", target).memory_timeline.device
    again = inspected("train, checkpointed", target).memory_timeline.device
    assert any(b.role == "recomputed" for b in again.blocks)
    assert not any(b.role == "recomputed" for b in plain.blocks)


@pytest.mark.slow
def test_a_forward_pass_within_a_backward_one_is_computed_again():
    """As layers of a plan are that run as they are written: no loop tells it."""

    def layer(x):
        return jnp.sin(x @ x) @ x

    @jax.custom_vjp
    def thrifty(x):
        return layer(x)

    def backward(x, gradient):
        return jax.vjp(layer, x)[1](gradient)

    thrifty.defvjp(lambda x: (thrifty(x), x), backward)
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    roles = []
    for function in (layer, thrifty):
        step = jax.jit(jax.grad(lambda x, f=function: jnp.sum(f(f(x)) ** 2)))
        found = stowax.inspect(step, x, target="h200").memory_timeline.device
        roles.append({block.role for block in found.blocks})
    assert "recomputed" not in roles[0]
    assert "recomputed" in roles[1]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5p-8", "h200"])
def test_an_offloaded_stack_lies_in_host_memory(target):
    found = inspected("planned", target)
    host = found.memory_timeline.host
    assert host.peak_bytes == pytest.approx(found.memory.host.total, rel=1e-3)
    offloaded = [b for b in host.blocks if b.role == "offloaded"]
    assert sum(b.bytes for b in offloaded) >= STACK
    device = found.memory_timeline.device
    assert any(b.role == "offload in flight" for b in device.blocks)
    roles = {b.role for b in device.blocks}
    assert {"parameter", "optimizer state", "batch"} <= roles
    # It is still there when the backward loop begins to fetch it.
    backward = found.memory_timeline.loops[-1]
    assert all(block.last >= backward.first for block in offloaded)


def test_padding_is_what_the_tiles_of_a_tpu_add():
    x = jax.ShapeDtypeStruct((8 * 1024, 8, 3), jnp.float32)
    found = stowax.inspect(
        jax.jit(lambda x: jnp.cumsum(jnp.sin(x), 0)), x, target="v5e-4"
    )
    block = next(b for b in found.memory_timeline.device.blocks if b.role != "output")
    assert block.array_bytes == 8 * 1024 * 8 * 3 * 4
    assert block.padding == block.bytes - block.array_bytes


def test_what_is_compiled_already_does_not_tell_and_that_is_said():
    target = stowax.target("v5e-4")
    compiled = target.compile(*_flat(STEPS["inference"]()))
    found = stowax.inspect(compiled)
    assert found.memory_timeline is None
    (omission,) = [o for o in found.omissions if o.what == "memory over the step"]
    assert "Give stowax.inspect the jitted function" in omission.reason


def _flat(made):
    step, args = made
    return (step, *args)


def test_a_cpu_tells_without_being_asked():
    found = stowax.inspect(*_flat(STEPS["train"]()), target="cpu")
    curve = found.memory_timeline.device
    assert curve.by_role()["parameter"] >= WEIGHTS
    assert curve.peak_bytes >= 3 * WEIGHTS


@pytest.mark.slow
def test_the_cache_of_compiled_programs_does_not_hide_the_layout(tmp_path):
    step, args = STEPS["inference"]()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        for _ in range(2):
            jax.clear_caches()
            found = stowax.inspect(step, *args, target="v5e-4")
            assert found.memory_timeline is not None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_the_record_is_json():
    found = inspected("train", "h200")
    record = json.loads(found.to_json())
    device = record["memory_timeline"]["device"]
    assert len(device["moments"][0]["bytes"]) == len(MEMORY_ROLES)
    assert device["peak_bytes"] == found.memory_timeline.device.peak_bytes


@pytest.mark.parametrize(
    "target", [pytest.param("v5p-8", marks=pytest.mark.slow), "h200"]
)
def test_the_ledger_says_whom_a_copy_serves_and_what_it_costs(target):
    found, link = inspected("planned", target), stowax.target(target).link
    (check,) = found.copies
    assert (check.out_bytes, check.in_bytes) == (STACK, STACK)
    assert check.planned_bytes == STACK
    assert check.as_planned
    assert {t.serves for t in found.transfers} == {check.name}
    for transfer in found.transfers:
        out = transfer.direction == "device-to-host"
        rate = link.device_to_host if out else link.host_to_device
        assert transfer.seconds == pytest.approx(STACK / rate)
        assert 0 <= transfer.exposed_seconds <= transfer.seconds * 1.01
    waited = sum(t.exposed_seconds for t in found.transfers)
    assert waited == pytest.approx(found.timeline.exposed_seconds)
    assert "1 of 1 offloaded value copied out and back" in str(found)


@pytest.mark.slow
def test_state_that_streams_moves_once_each_way_but_for_a_block():
    plan = stowax.plan(
        train_planned(),
        *state_and_batch(),
        pin={"optimizer state": "offload"},
        target="h200",
        progress=False,
    )
    step, specs = plan.apply(train_planned()), plan.specs(*state_and_batch())
    found = stowax.inspect(step, *specs, target="h200")
    assert [c.name for c in found.copies] == ["args[0]['first']", "args[0]['second']"]
    for check in found.copies:
        assert check.planned_bytes == WEIGHTS
        assert check.as_planned


def test_a_step_without_a_plan_has_no_planned_copies():
    assert inspected("train", "h200").copies == ()


@pytest.mark.slow
def test_asking_for_the_layout_changes_no_figure():
    step, args = STEPS["train"]()
    without = stowax.inspect(stowax.target("v5p-8").compile(step, *args))
    found = inspected("train", "v5p-8")
    assert found.memory == without.memory
    # The compiler's own estimates, which libtpu's dump does not have yet.
    assert found.timeline == without.timeline
    spent = found.memory_timeline.device.moments[-1].seconds
    assert spent == pytest.approx(found.timeline.step_seconds, rel=0.1)
