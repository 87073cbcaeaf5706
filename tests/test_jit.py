"""`stowax.jit`: any step that some `jit` takes, in one line, with the same numbers."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from plan_parts import changed
from stowax._errors import ArgumentError, MisfitError, PlanMismatchError

LAYERS, WIDTH, ROWS = 6, 64, 1024
jit = functools.partial(stowax.jit, progress=False)


def weights(seed=0, width=WIDTH):
    draw = np.random.default_rng(seed).normal
    return {
        "up": jnp.asarray(0.1 * draw(size=(LAYERS, width, 2 * width)), jnp.float32),
        "down": jnp.asarray(0.1 * draw(size=(LAYERS, 2 * width, width)), jnp.float32),
    }


def batch(seed=1, rows=ROWS, width=WIDTH):
    draw = np.random.default_rng(seed).normal
    return jnp.asarray(draw(size=(rows, width)), jnp.float32)


def loss_of(params, x, last=jnp.tanh):
    def layer(x, w):
        return x + last(jnp.sin(x @ w["up"]) @ w["down"]), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def train_step(params, momentum, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss


def arguments():
    params = weights()
    return params, jax.tree.map(jnp.zeros_like, params), batch()


def losses(step, count=4):
    params, momentum, x = arguments()
    found = []
    for _ in range(count):
        params, momentum, loss = step(params, momentum, x)
        found.append(float(loss))
    return found


def moved(plan):
    return {d.decision for d in plan.decisions}


def test_one_line_and_no_mark():
    step = jit(train_step, budget="60%", target="h200", donate_argnums=(0, 1))
    assert step.plan is None
    np.testing.assert_allclose(losses(step), losses(jax.jit(train_step)), rtol=1e-5)
    assert step.plan.fits
    assert moved(step.plan) & {"offload", "recompute"}
    assert step.plan.program.donate_argnums == (0, 1)
    assert step.plan.device_bytes <= step.plan.budget_bytes
    assert step.__name__ == "train_step"


@pytest.mark.slow
def test_what_a_step_is_given_stays_where_nothing_says_that_it_is_donated():
    given = arguments()
    step = jit(train_step, budget="80%", target="h200")
    first = step(*given)
    assert step.plan.fits
    assert step.plan.program.donate_argnums == ()
    assert moved(step.plan) & {"offload", "recompute"}
    again = step(*given)
    np.testing.assert_array_equal(first[-1], again[-1])


def test_what_jit_donates_is_donated_by_a_step_that_stays_as_it_is():
    """Its memory, and its time to dispatch, are those of `jax.jit`'s function."""
    for step in (
        jit(train_step, donate_argnums=(0, 1)),
        jit(jax.jit(train_step, donate_argnums=(0, 1))),
    ):
        args = arguments()
        donated = step.lower(*args).compile().memory_analysis()
        assert step.plan.outcome == "unneeded"
        assert step.plan.program.donate_argnums == (0, 1)
        assert donated.alias_size_in_bytes == 2 * sum(
            a.nbytes for a in args[0].values()
        )


@pytest.mark.slow
def test_what_was_donated_is_told_apart(capsys):
    """Only where nothing fits without: a line says so, and so does an error."""
    pin = {"optimizer state": "offload"}
    wishes = {"pin": pin, "target": "h200", "budget": "80%"}
    step = stowax.jit(train_step, **wishes, progress=print)
    given = arguments()
    first = step(*given)
    assert set(step.plan.program.donate_argnums) >= {1}
    said = capsys.readouterr().out
    assert "train_step does not fit unless" in said
    assert "may be overwritten: what a call returns is gone after the next" in said
    assert "donate_argnums=()" in said
    # What the script made itself stays; what the step returned is the step's.
    np.testing.assert_array_equal(step(*given)[-1], first[-1])
    step(*first[:2], given[-1])
    with pytest.raises(ArgumentError, match=r"^args\[0\].*an earlier step was given"):
        step(*first[:2], given[-1])
    never = jit(train_step, **wishes, donate_argnums=())
    with pytest.raises(ArgumentError, match=r"does not donate args\[1\]"):
        never(*arguments())


@pytest.mark.slow
def test_what_only_has_a_results_type_is_not_donated():
    """A rate has the type of the loss, weights to stay near that of the gradients."""

    def step(params, anchor, rate, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        new = jax.tree.map(
            lambda p, a, g: p - rate * (g + 0.1 * (p - a)), params, anchor, grads
        )
        return new, grads, loss

    given = (weights(), weights(1), jnp.float32(0.1), batch())
    options = {"budget": "70%", "target": "h200", "progress": False}
    plan = stowax.plan(step, *given, **options)
    assert set(plan.program.donate_argnums) <= {0}
    assert plan.fits


@pytest.mark.slow
def test_arrays_that_are_given_twice_are_told_apart():
    """Weights and their average begin as the same arrays, and are donated."""

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        mean = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["mean"], params)
        return {"params": params, "mean": mean}, loss

    def run(step):
        params, found = weights(), []
        state = {"params": params, "mean": params}
        for _ in range(3):
            state, loss = step(state, batch())
            found.append(float(loss))
            state["mean"] = state["params"]
        return found

    planned = jit(step, budget="80%", target="h200", donate_argnums=0)
    np.testing.assert_allclose(run(planned), run(jax.jit(step)), rtol=1e-5)
    assert planned.plan.program.donate_argnums == (0,)


@pytest.mark.slow
def test_what_is_told_of_jit_s_functions():
    step = jit(train_step, budget="80%", target="h200")
    given = arguments()
    shapes = step.eval_shape(*given)
    assert step.plan is None
    assert shapes[-1].shape == ()
    with jax.disable_jit():
        step(*given)
    assert step.plan is None
    assert copy.deepcopy({"step": step})["step"] is step
    first = step(*given)[-1]
    with jax.default_matmul_precision("float32"):
        np.testing.assert_allclose(step(*given)[-1], first, rtol=1e-4)
        assert "HIGHEST" in step.lower(*given).as_text()
    assert "HIGHEST" not in step.lower(*given).as_text()
    step.clear_cache()
    np.testing.assert_array_equal(step(*given)[-1], first)


@pytest.mark.slow
def test_a_mark_restricts_what_is_planned():
    first = stowax.stow(loss_of)

    def step(params, other, x):
        a, grads = jax.value_and_grad(first)(params, x)
        b, more = jax.value_and_grad(lambda p: loss_of(p, x, jnp.cos))(other)
        update = functools.partial(jax.tree.map, lambda p, g: p - 0.1 * g)
        return update(params, grads), update(other, more), a + b

    args = weights(0), weights(5), batch()
    plan = functools.partial(stowax.plan, target="h200", progress=False)
    assert len(plan(step, *args).program.stacks) == 1
    first = loss_of  # `step` reads it when it is called
    assert len(plan(step, *args).program.stacks) == 2


@pytest.mark.slow
def test_options_of_jit_are_honoured():
    def step(params, x, mode, *, scale):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        rate = {"slow": 0.01, "fast": 0.1}[mode] * scale
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    planned = jit(step, static_argnums=2, static_argnames="scale", donate_argnums=0)
    plain = jax.jit(step, static_argnums=2, static_argnames="scale")
    for mode, scale in (("slow", 1), ("fast", 2), ("slow", 1)):
        params = weights()
        new, _ = planned(params, batch(), mode, scale=scale)
        expected, _ = plain(weights(), batch(), mode, scale=scale)
        np.testing.assert_allclose(new["up"], expected["up"], rtol=1e-5, atol=1e-7)
    assert planned.plan.program.donate_argnums in ((), (0,))


@pytest.mark.slow
@pytest.mark.parametrize("around", [jax.jit, functools.partial(jax.jit, inline=True)])
def test_jitted_steps_are_planned(around):
    jitted = around(train_step, donate_argnums=(0,))
    wishes = {"budget": "60%", "target": "h200", "progress": False}
    plan = stowax.plan(jitted, *arguments(), **wishes)
    assert moved(plan) & {"offload", "recompute"}
    assert set(plan.program.donate_argnums) <= {0}
    got = plan.apply(jitted)(*plan.place(*arguments()))
    np.testing.assert_allclose(got[2], train_step(*arguments())[2], rtol=1e-5)


@pytest.mark.slow
def test_other_types_are_planned_anew(capsys):
    step = stowax.jit(train_step)
    first, second = batch(), batch(rows=128)
    plain = jax.jit(train_step)
    for x in (first, second, first):
        params, momentum, _ = arguments()
        got = step(params, momentum, x)[2]
        expected = plain(params, momentum, x)[2]
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    told = capsys.readouterr().err
    assert told.count("planning train_step anew, for arguments of other types") == 1


@pytest.mark.slow
def test_a_budget_that_nothing_keeps():
    step = jit(train_step, budget="64KiB", target="h200")
    with pytest.raises(MisfitError, match=r"The smallest budget .*is ") as found:
        step(*arguments())
    assert isinstance(found.value, stowax.StowaxError)


def test_a_function_that_differentiates_nothing(capsys):
    @stowax.jit
    def evaluate(params, x):
        return loss_of(params, x)

    params, _, x = arguments()
    np.testing.assert_allclose(evaluate(params, x), loss_of(params, x), rtol=1e-6)
    assert evaluate.plan is None
    told = capsys.readouterr().err
    assert "it differentiates nothing" in told
    assert told.endswith("It runs as jax.jit would run it.\n")


def test_an_error_of_the_step_is_the_same():
    @jit
    def wrong(params, x):
        jax.grad(loss_of)(params, x)
        raise ZeroDivisionError("by the user")

    with pytest.raises(ZeroDivisionError, match="by the user"):
        wrong(*arguments()[::2])


def test_within_another_trace_it_is_the_step():
    step = jit(train_step, budget="60%", target="h200")
    shapes = jax.eval_shape(step, *arguments())
    assert shapes[2].shape == ()
    assert step.plan is None
    outer = jax.jit(lambda *args: step(*args)[2])
    expected = train_step(*arguments())[2]
    np.testing.assert_allclose(outer(*arguments()), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_plan_made_before(tmp_path):
    options = {"budget": "60%", "target": "h200", "progress": False}
    made = stowax.plan(train_step, *arguments(), **options)
    made.save(tmp_path / "plan.json")
    for plan in (made, tmp_path / "plan.json"):
        step = jit(train_step, plan=plan)
        np.testing.assert_allclose(losses(step), losses(jax.jit(train_step)), rtol=1e-5)
        assert step.plan == made
    with pytest.raises(PlanMismatchError, match="the plan was made for"):
        jit(train_step, plan=made)(*arguments()[:2], batch(rows=128))
    foreign = changed(made, compile_only=False, device_kind="TPU v5p")
    with pytest.raises(PlanMismatchError, match="and JAX runs on cpu here"):
        jit(train_step, plan=foreign)(*arguments())


@pytest.mark.slow
def test_lower_and_trace():
    step = jit(train_step, budget="60%", target="h200")
    assert "stowax" in step.lower(*arguments()).as_text() or step.plan.program.stacks
    assert step.trace(*arguments()).jaxpr.eqns
    found = stowax.inspect(step, *arguments(), target="h200")
    assert found.memory.device.total <= step.plan.budget_bytes


def test_what_cannot_be_called():
    with pytest.raises(ArgumentError) as caught:
        stowax.jit(3)
    assert str(caught.value) == (
        "fun: got 3, which cannot be called. Write stowax.jit(train_step)."
    )


def test_a_method():
    class Trainer:
        def __init__(self):
            self.rate = 0.1

        @functools.partial(jit, static_argnums=0)
        def step(self, params, x):
            loss, grads = jax.value_and_grad(loss_of)(params, x)
            return jax.tree.map(lambda p, g: p - self.rate * g, params, grads), loss

    trainer, (params, _, x) = Trainer(), arguments()
    new, _ = trainer.step(params, x)
    grads = jax.grad(loss_of)(params, x)
    np.testing.assert_allclose(
        new["up"], params["up"] - 0.1 * grads["up"], rtol=1e-4, atol=1e-7
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict
    count: int
    label: str = dataclasses.field(metadata={"static": True})


def test_dataclasses_scalars_strings_and_none():
    def step(state, x, rate, how, nothing):
        assert nothing is None
        assert how == "down"
        loss, grads = jax.value_and_grad(loss_of)(state.params, x)
        params = jax.tree.map(lambda p, g: p - rate * g, state.params, grads)
        return State(params, state.count + 1, state.label), {"loss": loss, "how": how}

    planned = jit(step)
    state = State(weights(), 0, "run")
    for count in (1, 2):
        state, metrics = planned(state, batch(), 0.1, "down", None)
        assert int(state.count) == count
        assert (state.label, metrics["how"]) == ("run", "down")
    assert planned.plan is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scale:
    """Looks at what it is made of, and takes nothing but arrays."""

    value: jax.Array
    good: jax.Array

    def __post_init__(self):
        for leaf in (self.value, self.good):
            if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
                raise TypeError(f"{type(leaf).__name__} is no array")


@pytest.mark.slow
def test_state_of_a_class_that_takes_arrays_alone():
    def step(state, scale, x):
        loss = lambda params: scale.value * loss_of(params, x)
        loss, grads = jax.value_and_grad(loss)(state)
        new = jax.tree.map(lambda p, g: p - g / scale.value / 10, state, grads)
        return new, Scale(scale.value * 1.5, scale.good + 1), loss

    start = weights(), Scale(jnp.float32(8.0), jnp.int32(0)), batch()
    planned = jit(step, budget="60%")
    expected, given = step(*start), planned(*start)
    np.testing.assert_allclose(given[2], expected[2], rtol=1e-5)
    assert moved(planned.plan) & {"recompute", "offload"}
    assert planned.plan.place(*start[:2])[1].value == 8.0
    assert planned.plan.specs(*start)[1].good.dtype == jnp.int32


def test_an_argument_that_cannot_be_compared():
    class Odd:
        __hash__ = None

    with pytest.raises(ArgumentError, match=r"^args\[1\]\['x'\]: got Odd"):
        jit(train_step)(weights(), {"x": Odd()}, batch())
