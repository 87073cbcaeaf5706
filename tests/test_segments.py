"""Straight-line code: where it is cut, and how it is planned."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import compiled_total, plan, spec
from planned_steps import assert_close, check
from stowax._errors import ArgumentError, PlanMismatchError
from stowax._jaxprs._jaxpr import Program
from stowax._jaxprs._segments import find_segments

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

WIDTHS = (96, 160, 128, 224, 64, 192, 112, 144, 80)


def net(weights, x):
    for w in weights:
        x = jax.nn.gelu(x @ w)
        x = x / (1 + jnp.abs(x))
    return jnp.mean(x**2)


def weights_of(make, scale=1):
    sizes = [scale * w for w in (128, *WIDTHS)]
    return [make(a, b) for a, b in itertools.pairwise(sizes)]


def train_step(weights, x):
    loss, grads = jax.value_and_grad(net)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


ROWS, SCALE = 1 << 15, 8


@functools.cache
def planned(**wishes):
    pin = {k: dict(v) if k == "pin" else v for k, v in wishes.items()}
    return plan(train_step, weights_of(spec, SCALE), spec(ROWS, 128 * SCALE), **pin)


def program_of(function, *args):
    return Program(jax.make_jaxpr(function)(*args))


# --- where it is cut ------------------------------------------------------------------


def test_segments_cover_the_run_and_less_crosses_than_lies_within():
    program = program_of(net, weights_of(spec), spec(4096, 128))
    run = range(len(program.nodes))
    (segments,) = find_segments(program, [run])
    assert [k for segment in segments for k in segment] == [*run]
    assert 2 <= len(segments) <= len(WIDTHS)
    # A cut is where one array crosses, not within an activation function.
    for segment in segments[:-1]:
        inside = {n for k in segment for n in program.nodes[k].outputs}
        later = {i for k in run if k > segment[-1] for i in program.nodes[k].inputs}
        assert len(inside & later) == 1


def test_a_narrow_place_is_where_it_is_cut():
    def bottlenecks(weights, x):
        for wide, narrow in weights:
            x = jnp.tanh(jnp.tanh(x @ wide) @ narrow)
        return x.sum()

    pairs = [(spec(8, 512 + 64 * k), spec(512 + 64 * k, 8)) for k in range(6)]
    program = program_of(bottlenecks, pairs, spec(4096, 8))
    (segments,) = find_segments(program, [range(len(program.nodes))])
    assert len(segments) > 2
    for segment in segments[:-1]:
        made = program.nodes[segment[-1]].outputs
        assert all(program.avals[n].shape[-1] == 8 for n in made)


def test_what_cuts_would_not_make_smaller_stays_whole():
    program = program_of(lambda w, x: jnp.tanh(x @ w).sum(), spec(64, 64), spec(99, 64))
    assert find_segments(program, [range(len(program.nodes))]) == [[]]


def test_nothing_to_cut():
    program = program_of(lambda x: x, spec(8))
    assert find_segments(program, [[], []]) == [[], []]


# --- numbers --------------------------------------------------------------------------


def made(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape) / shape[0] ** 0.5


@pytest.mark.slow
def test_numbers_are_the_same_to_the_bit():
    check(train_step, (weights_of(made), made(32, 128)), [])


def test_weights_read_in_several_segments_and_skips_across_them():
    def loss(params, x):
        first = y = jnp.tanh(x @ params["in"])
        for wide, narrow in params["pairs"]:
            y = jnp.tanh(y @ wide) @ narrow @ params["shared"]
        y = y + first @ params["shared"]
        return jnp.mean(y**2), y.sum()

    params = {
        "in": made(16, 16),
        "pairs": [(made(16, n), made(n, 16)) for n in (32, 48, 64)],
        "shared": made(16, 16),
    }

    def step(params, x):
        return jax.value_and_grad(loss, has_aux=True)(params, x)

    check(step, (params, made(64, 16)), [])


@pytest.mark.slow
def test_effects_stand_between_segments():
    seen = []

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jax.nn.gelu(y @ w)
                jax.debug.callback(seen.append, y.sum())
            return jnp.mean(y**2)

        return jax.grad(loss)(weights)

    args = weights_of(made), made(32, 128)
    expected = jax.jit(step)(*args)
    jax.effects_barrier()
    seen.clear()
    found = plan(step, weights_of(spec), spec(32, 128), budget="64KiB")
    with pytest.warns(UserWarning, match="does not fit"):
        run = found.apply(step)
    assert_close(run(*args), expected)
    jax.effects_barrier()
    assert len(seen) == len(WIDTHS)  # nothing that can be noticed runs twice


# --- plans ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_without_layers_fits_in_half_of_its_memory():
    whole = planned(target="h200")
    assert whole.outcome == "unneeded"
    budget = whole.device_bytes // 2
    found = planned(target="h200", budget=budget)
    assert found.fits
    assert found.program.options.segments
    assert found.host_bytes == 0
    assert {d.decision for d in found.decisions} == {"keep", "recompute"}
    args = weights_of(spec, SCALE), spec(ROWS, 128 * SCALE)
    assert compiled_total(found, train_step, *args) <= budget
    # A third of the forward pass again at most.
    assert found.step_seconds < 1.25 * whole.step_seconds


@pytest.mark.slow
def test_the_plan_says_what_it_did():
    # The plan of the test above, which is made once.
    found = planned(target="h200", budget=planned(target="h200").device_bytes // 2)
    assert all(stack.segment and stack.count == 1 for stack in found.program.stacks)
    assert "straight-line code, " in str(found)
    assert any("outside of layers is planned in" in n for n in found.proof.notes)
    assert "Straight-line code from " in found.as_code()


@pytest.mark.slow
def test_a_plan_is_kept_in_a_file_and_runs(tmp_path):
    small = weights_of(spec), spec(4096, 128)
    whole = plan(train_step, *small)
    found = plan(train_step, *small, budget=whole.device_bytes * 6 // 10)
    found.save(tmp_path / "plan.json")
    read = stowax.load_plan(tmp_path / "plan.json")
    assert read.program.options.segments
    args = weights_of(made), made(4096, 128)
    expected = jax.jit(train_step)(*args)
    assert_close(read.apply(train_step)(*args), expected)


@pytest.mark.slow
def test_pins_meet_values_of_segments():
    small = weights_of(spec, 4), spec(1 << 13, 512)
    budget = plan(train_step, *small, target="h200").device_bytes
    wish = {"dot_general*": "recompute"}
    found = plan(train_step, *small, target="h200", budget=budget, pin=wish)
    pinned = [d for d in found.decisions if d.name.startswith("dot_general")]
    assert {d.decision for d in pinned if not d.stack.endswith("-1")} == {"recompute"}
    assert [(p.decision, p.matched > 0) for p in found.pins] == [("recompute", True)]


@pytest.mark.parametrize(
    ("target", "scale", "rows", "words"),
    [
        ("h200", 4, 1 << 13, "source line. Nearest: 'dot_general test_segments.py:"),
        ("cpu", 1, 32, "(what is differentiated runs as written: no layers repeat in"),
    ],
    ids=["segments", "nothing"],
)
def test_a_pin_that_meets_nothing_is_told_what_could_be_meant(
    target, scale, rows, words
):
    args = weights_of(spec, scale), spec(rows, 128 * scale)
    with pytest.raises(ArgumentError) as error:
        plan(train_step, *args, target=target, pin={"dot_generall*": "recompute"})
    assert words in str(error.value)


@pytest.mark.slow
def test_nothing_of_a_segment_is_offloaded_by_hand():
    # The plan of the test above, which is made once.
    found = planned(target="h200", budget=planned(target="h200").device_bytes // 2)
    moved = tuple(
        dataclasses.replace(d, decision="offload") if d.decision == "keep" else d
        for d in found.decisions
    )
    edited = dataclasses.replace(found, decisions=moved)
    args = weights_of(spec, SCALE), spec(ROWS, 128 * SCALE)
    with pytest.raises(PlanMismatchError, match="keep and recompute only"):
        edited.apply(train_step).trace(*args)
