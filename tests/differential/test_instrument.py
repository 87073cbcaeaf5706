"""The instrument itself: what is planted is found, and what is only rounding is not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from differential import judge as judge_module
from differential import optimizers
from differential.build import build
from differential.calibrate import otherwise
from differential.choosers import SeededChooser
from differential.compare import difference
from differential.judge import Front, judge, judge_all, shape_of
from differential.layer_ops import OPS, Op
from differential.programs import (
    FORMS,
    MEASURED,
    Program,
    Wishes,
    draw,
    one_by_one,
    settled,
)
from differential.shrink import shrunk

SMALL = Program(optimizer="momentum")


@dataclasses.dataclass
class Applied:
    """A plan that was applied already."""

    step: Any

    def apply(self, _):
        return self.step


def off_by(factor, at):
    """`apply` that hands out steps whose call number `at` returns too much."""

    def apply(plan, step):
        planned, calls = plan.apply(step), []

        def run(*args):
            calls.append(None)
            params, *rest = planned(*args)
            if len(calls) == at:
                params = jax.tree.map(lambda p: p * factor, params)
            return params, *rest

        return run

    return apply


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 4])
def test_a_wrong_number_is_found(at):
    verdict = judge(SMALL, Wishes(), Front(apply=off_by(1.001, at)))
    assert verdict.outcome == "wrong"
    assert f"step {at - 1}, [0]" in verdict.message


def test_rounding_is_not_wrong():
    verdict = judge(SMALL, Wishes(), Front(apply=off_by(1 + 2**-22, 1)))
    assert (verdict.outcome, verdict.compared) == ("as written", 5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "mixed", "x64"])
def test_another_program_of_the_plain_step_is_no_false_alarm(dtype):
    layer = ("matmul", "mlp", "attention", "sort", "layer norm")
    program = dataclasses.replace(SMALL, layer=layer, dtype=dtype, optimizer="adam")
    verdict = judge(program, Wishes(), otherwise(program))
    assert verdict.outcome == "as written"
    assert verdict.compared > 0


def test_old_state_read_too_late_is_found():
    """The parameters move by the momentum from before it was updated."""

    def stale(params, momentum, grads, rate):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        moved = jax.tree.map(lambda p, m: p - rate * m, params, momentum)
        return moved, momentum

    right = optimizers.BY_HAND["old momentum"]
    program = dataclasses.replace(SMALL, optimizer="old momentum")

    def apply(plan, step):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(optimizers.BY_HAND, "old momentum", (right[0], stale))
            return jax.jit(build(program, stowax.stow).step)

    assert judge(program, Wishes(), Front(apply=apply)).outcome == "wrong"


@pytest.mark.slow
def test_decisions_are_drawn_for_values_and_state():
    streamed = Program(optimizer="optax adam", size="streamed", data=1)
    found = judge_all(streamed, Wishes(target="h200"), decisions=3)[1:]
    assert [v.outcome for v in found] == ["planned"] * 3
    moved = {what for verdict in found for what in verdict.moved}
    assert {"offload activation", "offload parameter"} <= moved
    assert "offload optimizer state" in moved


@pytest.mark.slow
def test_a_wrong_number_under_drawn_decisions_is_found(monkeypatch):
    drawn = judge_module.draw_decisions

    def off(survey, chooser):
        made = drawn(survey, chooser)
        more = off_by(1.001, 2)(Applied(made.step), None)
        return dataclasses.replace(made, step=more)

    monkeypatch.setattr(judge_module, "draw_decisions", off)
    first, *found = judge_all(SMALL, Wishes(target="h200"), decisions=2)
    assert first.outcome != "wrong"
    assert [v.outcome for v in found] == ["wrong"] * 2


@pytest.mark.slow
def test_a_pin_that_holds_for_nothing_is_left_out():
    pins = ("no such value", "keep"), ("activation", "recompute")
    program = dataclasses.replace(SMALL, layer=("matmul", "tanh", "mlp"))
    verdict = judge(program, Wishes(target="h200", budget=0.9, pin=pins))
    assert verdict.outcome == "planned"
    assert verdict.dropped == ("pin: no such value keep",)


def test_a_foreign_error_is_found():
    def plan(*args, **options):
        return {}["nothing"]

    verdict = judge(SMALL, Wishes(), Front(plan=plan))
    assert verdict.outcome == "foreign"
    assert verdict.kind == "plan: KeyError: … @ no line of stowax"


def test_an_error_of_stowax_is_a_refusal():
    def plan(*args, **options):
        return stowax.plan(*args, **{**options, "target": "no such machine"})

    verdict = judge(SMALL, Wishes(), Front(plan=plan))
    assert verdict.outcome == "refused"
    assert "no such machine" in verdict.message


def test_an_error_of_the_step_is_the_same_error(monkeypatch):
    def fail(p, c, x, i):
        raise ZeroDivisionError("by the layer")

    monkeypatch.setitem(OPS, "fails", Op(run=fail))
    broken = dataclasses.replace(SMALL, layer=("fails",))
    assert judge(broken, Wishes()).outcome == "same error"

    def plan(*args, **options):
        raise KeyError("something else")

    assert judge(broken, Wishes(), Front(plan=plan)).outcome == "foreign"


def run_of(*values):
    return [{"loss": np.float32(v)} for v in values]


def test_steps_are_compared_while_plain_runs_agree():
    plain = run_of(1, 1, 1)
    parted = run_of(1, 1.5, 3)
    found, steps = difference(plain, run_of(1, 1, 7), [parted])
    assert (found, steps) == (None, 2)
    found, _ = difference(plain, run_of(1.01, 1, 1), [parted])
    assert found.step == 0  # the first step is compared whatever comes later


def test_infinities_are_equal_only_at_the_same_place():
    plain = run_of(np.inf, np.nan)
    assert difference(plain, run_of(np.inf, np.nan), []) == (None, 2)
    assert difference(plain, run_of(-np.inf, np.nan), [])[0].step == 0
    assert difference(plain, run_of(np.inf, 1), [])[0].step == 1


def test_dtypes_and_structures_are_compared():
    plain = [{"loss": np.float32(1)}]
    assert "float64" in difference(plain, [{"loss": np.float64(1)}], [])[0].leaf
    assert "structure" in difference(plain, [{"gain": np.float32(1)}], [])[0].leaf
    counts = [{"count": np.int32(1)}]
    assert difference(counts, [{"count": np.int32(2)}], [])[0].error == np.inf


def test_a_seed_makes_one_program():
    assert draw(SeededChooser(5)) == draw(SeededChooser(5))
    assert len({draw(SeededChooser(seed)) for seed in range(50)}) == 50


def test_a_failure_is_simplified_to_what_causes_it():
    program, wishes = draw(SeededChooser(3))
    program = dataclasses.replace(program, layer=("tanh", "sort", "mlp"))
    fails = lambda program, wishes: "sort" in program.layer
    found = shrunk(program, wishes, fails)
    assert found == (Program(layer=("sort",)), Wishes())


def test_marks_do_not_change_the_plain_step():
    """A program computes the same whatever it is marked with."""
    built = [build(SMALL, mark) for mark in (stowax.stow, jax.jit)]
    one, other = (jax.jit(b.step)(*b.args) for b in built)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=jnp.finfo(a.dtype).eps * 64)


def test_errors_that_look_alike_are_of_one_kind():
    body = "step: its repeated body {}.0-{} (2fe1, 4 times, at {}) is not in the plan"
    one, other = (
        body.format("2641749e", "7", "a.py:156"),
        body.format("03486a60", "b", "b.py:15"),
    )
    assert shape_of(one) == shape_of(other)
    assert shape_of(one) == "step: its repeated body # … is not in the plan"


def test_programs_with_one_unusual_part_are_numbered():
    made = one_by_one()
    assert len(set(made)) == len(made)
    assert all(program == settled(program) for program, _ in made)
    assert {program.form for program, _ in made} == {*FORMS, MEASURED}


def test_a_state_that_jax_cannot_make_is_no_fault_of_the_plan():
    """`optax.adafactor` makes arrays of a mesh outside of it."""
    program = Program(mesh="explicit", optimizer="optax adafactor")
    (verdict,) = judge_all(program, Wishes())
    assert verdict.outcome == "same error"
