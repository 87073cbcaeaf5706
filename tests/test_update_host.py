"""Updates on the host's processor: their numbers, and what a plan says and compiles.

Numbers are the CPU's, where the same equations run under `compute_on`; places, bytes
and seconds those of programs compiled for a TPU that is not there.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import stowax
import stowax._update._run
from planned_models import QUICK, spec, target_or_skip
from stowax import _jax
from stowax._hardware._figures import RATE, assumed
from stowax._hlo._host_calls import is_planned, update_scope
from stowax._planner import baselines
from stowax._records._stages import Options
from stowax._step._trace import trace_step
from stowax._survey._apply import apply_decisions
from stowax._survey._take import take_survey

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH, ROWS = 3, 1024, 64
ELEMENTS = LAYERS * WIDTH * WIDTH
BYTES = 4 * ELEMENTS
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(1e-3),
    "clipped adamw": CLIPPED,
}


def step_of(optimizer):
    def layer(x, w):
        return x + jnp.tanh(x @ w)

    @stowax.stow
    def loss_fn(params, x):
        if isinstance(params, list):
            for w in params:
                x = layer(x, w)
        else:
            x, _ = jax.lax.scan(lambda c, w: (layer(c, w), None), x, params)
        return jnp.mean((x - 1) ** 2)

    def train_step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train_step


def arguments(optimizer, unrolled=False):
    params = spec(LAYERS, WIDTH, WIDTH)
    if unrolled:
        params = [spec(WIDTH, WIDTH)] * LAYERS
    return params, jax.eval_shape(optimizer.init, params), spec(ROWS, WIDTH)


def target(name="v5p-8", host_gigabytes=None):
    """A target; its host's memory at so many GB/s, where that is given."""
    machine = target_or_skip(name)
    if host_gigabytes is None:
        return machine
    figure = assumed(host_gigabytes * 1e9, RATE, "a test's")
    chip = dataclasses.replace(machine.chip, host_bandwidth=figure)
    return dataclasses.replace(machine, chip=chip)


def survey(optimizer, machine, unrolled=False):
    step = step_of(optimizer)
    specs = machine.specs(*arguments(optimizer, unrolled))
    options = Options(keep_checkpoint=False, roll=True, row_major=False)
    return take_survey(step, specs, trace_step(step, specs, options), machine, options)


def planned(found):
    """The step with all of its state in host memory, and what is planned for it."""
    problem = found.problem(2**40, 2**40)
    plan = found.step_plan(baselines(problem)["offload state"])
    return plan, apply_decisions(
        found.function, plan, found.options, donate=found.step.donate
    )


def placed(plan, values):
    """Arrays on the CPU, in the memories that the plan wants."""
    leaves, structure = jax.tree.flatten(values)
    kinds = ["pinned_host" if i in plan.hosted.shards else "device" for i in range(99)]
    return jax.tree.unflatten(
        structure,
        [
            jax.device_put(
                jnp.copy(leaf), SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
            )
            for leaf, kind in zip(leaves, kinds, strict=False)
        ],
    )


# ---------------------------------------------------------------- numbers


@pytest.mark.quick("adamw-False")
@pytest.mark.parametrize(
    ("name", "unrolled"),
    [*((name, False) for name in OPTIMIZERS), ("clipped adamw", True)],
)
def test_three_steps_are_those_without_a_plan(name, unrolled):
    optimizer = OPTIMIZERS[name]
    found = survey(optimizer, target(host_gigabytes=10_000), unrolled)
    plan, mine = planned(found)
    assert plan.hosted.on_host == tuple(plan.hosted.shards)
    plain = jax.jit(found.function)
    shape = (LAYERS, WIDTH, WIDTH)
    params = 0.02 * jax.random.normal(jax.random.key(1), shape)
    params = list(params) if unrolled else params
    theirs = params, optimizer.init(params)
    ours = placed(plan, theirs)
    for number in range(3):
        x = jax.random.normal(jax.random.key(number), (ROWS, WIDTH))
        *theirs, loss = plain(*theirs, x)
        *ours, our_loss = mine(*ours, x)
        np.testing.assert_allclose(our_loss, loss, rtol=1e-5)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if left.ndim:
            assert left.sharding.memory_kind == "pinned_host"
        # Adam divides by what may be as small as rounding; Lion takes a sign of it.
        close = np.isclose(left, right, rtol=1e-3, atol=1e-5)
        assert close.mean() > 0.999


# ---------------------------------------------------------------- when it is chosen


def parts(optimizer, machine):
    return survey(optimizer, machine).state.body.host_updates


def test_seconds_of_an_update_in_symbols():
    machine = target(host_gigabytes=1000)
    rate = machine.chip.host_rate()
    assert rate == 1000e9 * 0.2 / 4  # a fifth of the peak, for four chips
    (adam,) = parts(optax.adamw(1e-2), machine)
    # Parameter, gradient and two moments come in; all but the gradient go out.
    assert (adam.update_in, adam.update_out) == (4 * BYTES, 3 * BYTES)
    assert adam.stream_seconds == 4 * BYTES / machine.link.host_to_device
    # A moment is made of itself and the gradient, the parameter of itself and both.
    assert adam.seconds == pytest.approx((3 + 3 + 4) * BYTES / rate, rel=1e-6)
    assert adam.values == (0, 1, 2)


def test_it_is_offered_only_where_it_is_faster_and_known():
    optimizer = optax.adamw(1e-2)
    machine = target(host_gigabytes=1000)
    (part,) = parts(optimizer, machine)
    # The rate at which both take as long: no longer offered there.
    even = 1000 * part.seconds / part.stream_seconds
    assert parts(optimizer, target(host_gigabytes=1.05 * even))
    assert parts(optimizer, target(host_gigabytes=0.95 * even)) == ()
    assert parts(optimizer, target("v6e-8")) == ()  # nobody knows its host's memory
    assert parts(optimizer, target("h200", host_gigabytes=10**6)) == ()  # not in place


def test_what_the_device_has_a_part_in_streams():
    def head(params, state, x):  # the parameter is read outside of layers, too
        def loss(w):
            return step(w, x) + jnp.sum(w[0] ** 2)

        @stowax.stow
        def step(w, x):
            x, _ = jax.lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, w)
            return jnp.mean(x**2)

        grads = jax.grad(loss)(params)
        updates, state = optax.sgd(0.1, momentum=0.9).update(grads, state)
        return optax.apply_updates(params, updates), state

    machine = target(host_gigabytes=10_000)
    specs = machine.specs(*arguments(optax.sgd(0.1, momentum=0.9)))
    options = Options(keep_checkpoint=False, roll=True, row_major=False)
    traced = trace_step(head, specs, options)
    state = take_survey(head, specs, traced, machine, options).state
    assert [v.role for v in state.body.values] == ["optimizer state"]
    assert state.body.host_updates == ()


# ---------------------------------------------------------------- what is compiled


def plan(machine, **options):
    optimizer = optax.sgd(0.1)
    more = {"compiler_options": QUICK} if QUICK else {}
    pin = {"parameter": "offload"}
    return stowax.plan(
        step_of(optimizer),
        *arguments(optimizer),
        target=machine,
        progress=False,
        pin=pin,
        **more,
        **options,
    )


@pytest.mark.slow
def test_a_plan_that_updates_on_the_host(tmp_path):
    machine = target()  # as its figures are: gradient descent is faster there
    found = plan(machine)
    assert [a.path for a in found.program.arguments if a.on_host] == ["args[0]"]
    (state,) = [d for d in found.decisions if d.stack == "state"]
    assert state.decision == "offload"
    assert state.reason.startswith("the host's processor updates it, in ")
    assert "through the device that would take" in state.reason
    assert "the host's processor updates 1 value of the state" in str(found)
    found.save(tmp_path / "plan.json")
    again = stowax.load_plan(tmp_path / "plan.json", compiler_options=QUICK)
    assert json.loads((tmp_path / "plan.json").read_text())["program"]["arguments"][0][
        "on_host"
    ]

    optimizer = optax.sgd(0.1)
    specs = again.specs(*arguments(optimizer))
    program = machine.compile(again.apply(step_of(optimizer)), *specs)
    inspection = stowax.inspect(program)
    assert not [h for h in inspection.hazards if h.kind == "host-compute"]
    memory = inspection.memory.host
    assert memory.alias == memory.argument == BYTES
    assert memory.temp == BYTES  # the gradients: nothing is updated beside its place
    busy = [i for i in inspection.timeline.intervals if i.lane == "host"]
    seconds = 3 * BYTES / machine.chip.host_rate()
    assert sum(i.seconds for i in busy) == pytest.approx(seconds, rel=1e-3)

    streams = plan(machine, forbid=["host update"])
    assert not any(a.on_host for a in streams.program.arguments)
    assert streams.step_seconds > found.step_seconds
    assert streams.device_bytes >= found.device_bytes


@pytest.mark.slow
def test_what_was_to_be_updated_on_the_host_and_is_not_stays(monkeypatch):
    monkeypatch.setattr(stowax._update._run, "runs_on_host", lambda *_: False)
    found = plan(target())
    assert not any(argument.on_host for argument in found.program.arguments)
    words = (
        "the compiler left copies out of the program (The compiled program does not "
        "update these arrays on the host's processor, although the plan says so: "
        "args[0]."
    )
    assert any(words in note for note in found.proof.notes)


def donated_update(machine):
    """State in host memory, donated, and doubled there."""

    def double(x):
        jaxpr = jax.make_jaxpr(lambda x: [x[0, 0], 2 * x])(spec(*x.shape))
        with jax.named_scope(update_scope([0])):
            return _jax.compute_on_host(jaxpr, [x], on_device=1)

    host = machine.sharding(memory_kind="pinned_host")
    jitted = jax.jit(double, donate_argnums=0, out_shardings=[machine.sharding(), host])
    return machine.compile(jitted, spec(WIDTH, WIDTH).update(sharding=host))


@pytest.mark.parametrize(("name", "in_place"), [("v5p-8", True), ("h200", False)])
def test_where_the_host_updates_in_place(name, in_place):
    # `_update._host.PLATFORMS` says so: should a GPU learn it, this tells.
    compiled = donated_update(target(name))
    inspection = stowax.inspect(compiled)
    copies = [t for t in inspection.transfers if t.direction == "host-to-host"]
    assert bool(copies) != in_place
    assert (inspection.memory.host.temp == 0) == in_place
    assert not [h for h in inspection.hazards if h.kind == "host-compute"]


def test_only_arithmetic_of_planned_updates_is_planned():
    (call,) = [
        item
        for computation in _program(donated_update(target())).computations.values()
        for item in computation.instructions
        if item.op_name and item.opcode == "multiply"
    ]
    foreign = dataclasses.replace(call, op_name="jit(step)/layer/mul")
    assert is_planned([call])
    assert not is_planned([call, foreign])
    assert not is_planned([])


def _program(compiled):
    from stowax._hlo._program import read_program

    return read_program(compiled.hlo_module_protos()[0])
