"""The layers of a Python loop: rolled where it is needed, as they are written else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from planned_models import QUICK, compiled_total, plan, spec, tanh_loss
from stowax._errors import PlanMismatchError

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

LAYERS, WIDTH = 3, 1024
MATRIX = WIDTH * WIDTH * 4
ADAM = optax.adam(1e-3)


@stowax.stow
def loss_fn(params, x):
    for w in params.values():
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def train_step(params, state, x):
    grads = jax.grad(loss_fn)(params, x)
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def arguments(make=spec):
    params = {f"w{i}": make(WIDTH, WIDTH) for i in range(LAYERS)}
    return params, jax.eval_shape(ADAM.init, params), make(WIDTH, WIDTH)


def as_written(found):
    """Whether the layers run one after the other: each by itself, or all alike."""
    return found.program.options.as_written or not found.program.options.roll


@functools.cache
def planned(**wishes):
    wishes = {k: dict(v) if k == "pin" else v for k, v in wishes.items()}
    return plan(train_step, *arguments(), **wishes)


def pinned(**pins):
    names = {
        "state": "optimizer state",
        "weights": "parameter",
        "product": "dot_general*",
    }
    return tuple((names[name], decision) for name, decision in pins.items())


@pytest.mark.slow
def test_layers_stay_as_written_if_state_is_all_that_has_to_leave():
    found = planned(pin=pinned(state="offload"), budget="1GiB")
    assert found.fits
    assert as_written(found)
    # What the user gets who forbids rolling: no copies of weights, no stacks.
    unrolled = planned(pin=pinned(state="offload"), budget="1GiB", roll=False)
    assert found.device_bytes == unrolled.device_bytes
    assert compiled_total(found, train_step, *arguments()) == found.device_bytes
    moments = 2 * LAYERS * MATRIX
    assert moments <= found.host_bytes < 1.01 * moments
    assert any("as they are written" in note for note in found.proof.notes)


@pytest.mark.slow
def test_state_leaves_before_layers_are_rolled():
    """A budget that the step misses by less than its moments."""
    keeping = planned(pin=pinned(state="keep"), roll=False, budget="1GiB")
    budget = keeping.device_bytes - 3 * LAYERS * MATRIX // 2
    found = planned(budget=budget, pin=pinned(product="keep"))
    assert found.fits
    assert as_written(found)
    offloaded = [d for d in found.decisions if d.decision == "offload"]
    assert {d.role for d in offloaded} == {"optimizer state"}


@pytest.mark.slow
def test_layers_are_rolled_where_state_is_not_enough():
    least = planned(pin=pinned(state="offload"), budget="1GiB")
    found = planned(budget=least.device_bytes - LAYERS * MATRIX)
    assert found.fits
    assert not as_written(found)
    assert found.program.stacks
    assert found.smallest_budget < least.device_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "pin",
    [pinned(state="offload", product="offload"), pinned(weights="offload")],
    ids=["activation", "parameter"],
)
def test_layers_are_rolled_where_a_pin_asks_for_it(pin):
    found = planned(pin=pin, budget="1GiB")
    assert found.fits
    assert not as_written(found)
    assert found.program.stacks


WIDE = spec(64 * WIDTH, WIDTH)  # products that are a hundred times the weights


@pytest.mark.slow
def test_a_loop_as_written_keeps_some_and_recomputes_some():
    """No copy, no loop, and in less memory by what it does not keep."""
    params, state, _ = arguments()
    whole = plan(train_step, params, state, WIDE)
    assert whole.outcome == "unneeded"
    budget = whole.device_bytes * 7 // 8
    found = plan(train_step, params, state, WIDE, budget=budget)
    assert found.fits
    assert as_written(found)
    assert found.host_bytes == 0
    decided = {decision.decision for decision in found.decisions}
    assert decided <= {"keep", "recompute"}
    assert compiled_total(found, train_step, params, state, WIDE) <= budget
    # A third of the forward pass at most, and no loop's copies of weights.
    assert found.step_seconds < 1.25 * whole.step_seconds
    assert any("as they are written" in note for note in found.proof.notes)


@pytest.mark.slow
def test_nothing_of_layers_as_they_are_written_is_offloaded_by_hand():
    found = planned(pin=pinned(state="offload"), budget="1GiB")
    assert as_written(found)
    stack, *_ = found.program.stacks
    moved = tuple(
        dataclasses.replace(d, decision="offload")
        if d.stack == stack.name and d.decision == "keep"
        else d
        for d in found.decisions
    )
    edited = dataclasses.replace(found, decisions=moved)
    with pytest.raises(PlanMismatchError, match="keep and recompute only"):
        edited.apply(train_step).lower(*edited.specs(*arguments()))


@pytest.mark.slow
@pytest.mark.parametrize("decision", ["keep", "recompute"])
def test_a_pin_holds_in_a_loop_as_written(decision):
    found = planned(pin=pinned(state="offload", product=decision), budget="1GiB")
    assert as_written(found)
    products = [d for d in found.decisions if d.name.startswith("dot_general")]
    assert {d.decision for d in products} == {decision}


def test_numbers_are_those_of_the_step():
    found = planned(pin=pinned(state="offload"), budget="1GiB")
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params, state, x = arguments(lambda *s: jax.random.normal(next(keys), s) / 32)
    state = ADAM.init(params)
    usual = jax.jit(train_step)(params, state, x)
    params, state = found.place(params, state)
    got = found.apply(train_step)(params, state, x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), usual, got
    )
    mu = got[1][0].mu["w0"]
    assert mu.sharding.memory_kind == "pinned_host"


@pytest.mark.slow
def test_on_a_tpu_too(tmp_path):
    found = planned(pin=pinned(state="offload"), budget="1GiB", target="v5p-8")
    rolled = pinned(state="offload", product="offload")
    assert found.device_bytes < planned(pin=rolled, target="v5p-8").device_bytes
    found.save(tmp_path / "plan.json")
    again = stowax.load_plan(tmp_path / "plan.json", compiler_options=QUICK)
    assert compiled_total(again, train_step, *arguments()) == found.device_bytes


def large():
    """Matrices that are a hundredth of the chip: its compiler counts in hundredths."""
    return arguments(lambda *shape: spec(*(7 * n for n in shape)))


@pytest.mark.slow
def test_a_step_that_nearly_fits_computes_a_little_again(tmp_path):
    plain = plan(train_step, *large())
    assert plain.outcome == "unneeded"
    budget = int(0.9 * plain.device_bytes)
    found = plan(train_step, *large(), budget=budget)
    assert found.fits
    assert as_written(found)
    assert found.host_bytes == 0
    # No copy, and less than the forward pass again: 3 of the 9 products of a step.
    assert found.step_seconds < (1 + 3 / 9) * plain.step_seconds
    # The program is the plan's own wherever it is compiled, from a file, too.
    found.save(tmp_path / "plan.json")
    loaded = stowax.load_plan(tmp_path / "plan.json")
    assert compiled_total(loaded, train_step, *large()) == found.device_bytes <= budget


def descent(weights, x):
    """Each gradient is added to its parameter at once, if that may be overwritten."""
    value, grads = jax.value_and_grad(tanh_loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_a_step_that_fits_donated_stays_as_it_is():
    """However much its gradients take before any is used, as it was traced."""
    weights, x = [spec(512, 512)] * 5, spec(4, 512)
    taken = 5 * 512 * 512 * 4
    found = stowax.plan(
        descent, weights, x, target="h200", budget=int(1.2 * taken), progress=False
    )
    assert found.fits
    assert found.program.donate_argnums == (0,)
    assert found.outcome == "unneeded"
    assert found.host_bytes == 0


@pytest.mark.slow
def test_what_was_compiled_for_a_share_is_compiled_once():
    lines = []
    weights, x = [spec(128, 128)] * 4, spec(4, 128)
    stowax.plan(
        jax.jit(descent, donate_argnums=0),
        weights,
        x,
        target="h200",
        budget="100%",
        progress=lines.append,
    )
    compiled = [line for line in lines if "compiling the step as it is" in line]
    assert len(compiled) == 1


@pytest.mark.slow
def test_a_step_that_fits_is_planned_where_that_is_clearly_faster():
    """A scan that keeps everything writes it to memory, and reads it again."""

    @stowax.stow
    def loss(ws, x):
        def layer(x, w):
            return x + jnp.tanh(jax.nn.gelu(x @ w) * jnp.sin(x)), None

        return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

    arguments = spec(8, 512, 512), spec(2**17, 512)
    kept = plan(step, *arguments, forbid=["recompute"])
    assert kept.outcome == "unneeded"
    found = plan(step, *arguments)
    assert found.fits
    assert found.host_bytes == 0
    assert "recompute" in {decision.decision for decision in found.decisions}
    assert found.step_seconds < 0.95 * kept.step_seconds
    assert [trial.what for trial in found.search.trials] == ["as written", "plan 2"]
