"""What cannot be planned: one clear error each, in words that are tested."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stowax
from planned_models import (
    LAYERS,
    WIDTH,
    arguments,
    compiled_total,
    forward,
    layer,
    mean_square,
    plan,
    spec,
    step_of,
    train,
    weights,
)
from stowax._errors import ArgumentError, CompileError, StepError
from stowax._records._stages import Options
from stowax._step._trace import trace_step

ARGS = arguments(rows=64)


def refused(kind, step, *args, **options):
    with pytest.raises(kind) as caught:
        plan(step, *args, **options)
    assert isinstance(caught.value, stowax.StowaxError)
    return str(caught.value)


def test_nothing_that_is_differentiated():
    def step(params, x):
        return mean_square.__wrapped__(params, x)

    assert refused(StepError, step, *ARGS) == (
        "step: it differentiates nothing, so there are no activations, gradients or "
        "updates to plan. Pass the training step itself: the function that calls "
        "jax.value_and_grad, jax.grad or jax.vjp and updates the parameters."
    )


def test_a_mark_on_something_that_is_never_differentiated():
    def step(params, x):
        return mean_square(params, x)

    assert refused(StepError, step, *ARGS) == (
        "step: mean_square is marked with @stowax.stow, but nothing differentiates it. "
        "Move the mark to the function that jax.value_and_grad or jax.grad is applied "
        "to."
    )


def test_gradients_that_reach_no_output():
    def step(params, x):
        loss, grads = jax.value_and_grad(mean_square)(params, x)
        jax.tree.map(lambda p, g: p - g, params, grads)  # and not returned
        return loss

    text = refused(StepError, step, *ARGS)
    assert text.startswith("step: its gradients reach none of its outputs")
    assert "Return the new parameters and optimizer state" in text


def test_gradients_made_in_a_loop_are_not_missed():
    def step(params, x):
        jax.grad(mean_square)(params, x)  # this one is dropped

        def accumulate(total, part):
            grads = jax.grad(mean_square)(params, part)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(accumulate, zeros, x.reshape(2, -1, WIDTH))[0]

    assert trace_step(step, ARGS, Options()).stacks


def test_no_step_at_all():
    assert refused(ArgumentError, "train", *ARGS) == (
        "step: got 'train', which cannot be called. Pass the training step itself."
    )


@pytest.mark.parametrize(
    ("given", "name", "what"),
    [
        ({"tokens": "hello"}, "args[1]['tokens']", "str 'hello'"),
        ([object], "args[1][0]", "type <class 'object'>"),
        (print, "args[1]", "builtin_function_or_method <built-in function print>"),
    ],
)
def test_an_argument_that_is_no_array(given, name, what):
    message = refused(ArgumentError, train, ARGS[0], given)
    assert message.startswith(f"{name}: got {what}, which is no array, and the step ")
    assert message.endswith(
        "). Give arrays or jax.ShapeDtypeStruct; close over anything else, for example "
        "functools.partial(step, config)."
    )


def instead(name):
    share = ", or '60%' of what the step takes" if name == "budget" else ""
    return f"Write bytes as an int, or text such as '16GiB'{share}."


@pytest.mark.parametrize("name", ["budget", "host_budget", "host_reserve"])
@pytest.mark.parametrize(
    ("given", "got"),
    [
        (-1, "-1, which is not above zero"),
        ("16 GB?", "'16 GB?'"),
        ("60 percent", "'60 percent'"),
        ("-3GiB", "'-3GiB'"),
        ("", "''"),
        (True, "True"),
        ([1], "[1]"),
    ],
)
def test_budgets_that_are_none(name, given, got):
    expected = f"{name}: got {got}. {instead(name)}"
    assert refused(ArgumentError, train, *ARGS, **{name: given}) == expected


def test_budgets_of_no_gibibytes():
    expected = f"budget: got 0.0, which is not above zero. {instead('budget')}"
    assert refused(ArgumentError, train, *ARGS, budget="0GiB") == expected


def test_budgets_of_nothing():
    # Who leaves out the unit hears of it before anything is compiled.
    for few in (16, "16"):
        assert refused(ArgumentError, train, *ARGS, budget=few) == (
            f"budget: got {few!r}, which is 16 bytes. Write a unit: '16GiB'."
        )
    assert refused(ArgumentError, train, *ARGS, budget=0) == (
        f"budget: got 0, which is not above zero. {instead('budget')}"
    )
    instead_ = "To leave the host alone write forbid=('offload',)."
    for none in (0, "0", "0GiB"):
        text = refused(ArgumentError, train, *ARGS, host_budget=none)
        assert text == f"host_budget: got {none!r}. {instead_}"


def test_more_than_the_chip_has():
    assert refused(ArgumentError, train, *ARGS, budget="142GiB") == (
        "budget: got '142GiB', more than the 141.0 GiB that a device of h200 has. "
        "Write at most '141.0 GiB', or leave it out for all of it."
    )
    text = refused(ArgumentError, train, *ARGS, budget="90TiB", target="cpu")
    assert text.startswith("budget: got '90TiB', more than the ")
    assert " that a device of cpu has. " in text


def test_unknown_targets():
    assert refused(ArgumentError, train, *ARGS, target="h20") == (
        "target: got 'h20'. Nearest names: h200, gh200, h200x8, h200x4, h200x2. "
        "stowax.targets(), or `stowax targets` in a terminal, lists all."
    )
    text = refused(ArgumentError, train, *ARGS, target="tpu")
    assert text.startswith("target: got 'tpu', and JAX sees no tpu here. ")


def test_shardings_over_another_machine():
    mesh = stowax.target("h100x8").mesh((2,), ("data",))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32, sharding=spread)
    assert refused(ArgumentError, train, ARGS[0], {"x": x}) == (
        "args[1]['x']: got a sharding over cpu:0, cpu:1, which target h200 does not "
        "have. Build the mesh with stowax.target('h200').mesh(...)."
    )


def test_shardings_that_do_not_divide():
    spread = NamedSharding(
        stowax.target("h200x4").mesh((4,), ("d",)), PartitionSpec("d")
    )
    x = jax.ShapeDtypeStruct((6, WIDTH), jnp.float32, sharding=spread)
    assert refused(ArgumentError, train, ARGS[0], {"x": x}, target="h200x4") == (
        f"args[1]['x']: got shape (6, {WIDTH}) with P('d',) over a mesh {{'d': 4}}, "
        "which does not split it into equal parts. Spread another axis, or make this "
        "one a multiple of the devices it is spread over."
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"pin": "keep"},
            "pin: got 'keep'. Write a dict such as {'*attention*': 'keep'}.",
        ),
        ({"pin": {3: "keep"}}, "pin: got {3: 'keep'}. Write a dict such as"),
        ({"pin": {"*": "stash"}}, "pin['*']: got 'stash'. Write 'keep', 'offload', "),
        (
            {"forbid": ("unload",)},
            "forbid: got 'unload'. Write 'offload', 'recompute', 'host update' or ",
        ),
        ({"forbid": 3}, "forbid: got 3. Write decisions such as ('offload', "),
        ({"donate": 0}, "donate: got 0. Write True, False, or None for where"),
        ({"compiler_options": "fast"}, "compiler_options: got 'fast'. Write a dict of"),
        ({"progress": True}, "progress: got True. Write a function of one text, False"),
    ],
)
def test_arguments_of_the_wrong_kind(options, text):
    assert refused(ArgumentError, train, *ARGS, **options).startswith(text)


def test_a_pattern_that_matches_nothing_names_what_is_near():
    text = refused(ArgumentError, train, *ARGS, pin={"*tanhh*": "keep"})
    assert text.startswith(
        "pin['*tanhh*']: got a pattern that matches no value's name, role or source "
        "line."
    )
    assert "Nearest: 'tanh planned_models.py:" in text


def test_pins_for_what_is_impossible():
    text = refused(ArgumentError, train, *ARGS, pin={"layer input*": "recompute"})
    assert text.startswith(
        "pin['layer input*']: got 'recompute', which is impossible for"
    )
    assert "Pin it to 'keep'" in text
    pin = {"layer input*": "offload"}
    text = refused(ArgumentError, train, *ARGS, target="cpu", pin=pin)
    assert text.startswith("pin['layer input*']: got 'offload', which is impossible")
    assert "so it is not offloaded" in text
    pin = {"parameter": "offload"}
    text = refused(ArgumentError, train, *ARGS, target="cpu", pin=pin)
    assert "the target has no host memory of its own" in text


def test_layers_that_cannot_be_differentiated():
    @stowax.stow
    def called_back(params, x):
        def body(c, w):
            c = jax.pure_callback(
                lambda v: v, jax.ShapeDtypeStruct(c.shape, c.dtype), c
            )
            return layer(c, w), None

        return jnp.mean(jax.lax.scan(body, x, params)[0])

    @stowax.stow
    def while_true(params, x):
        def body(c, w):
            return jax.lax.while_loop(
                lambda s: jnp.all(s < 1), lambda s: layer(s, w), c
            )

        return jnp.mean(jax.lax.scan(lambda c, w: (body(c, w), None), x, params)[0])

    for loss, words in (
        (called_back, "Pure callbacks do not support JVP"),
        (while_true, "Reverse-mode differentiation does not work for lax.while_loop"),
    ):
        for run in (plan, lambda step, *args: jax.jit(step).lower(*args)):
            with pytest.raises(ValueError, match=words):  # JAX's own, either way
                run(step_of(loss), *ARGS)


def test_the_steps_own_exception_goes_through():
    class MyError(Exception):
        pass

    def step(params, x):
        raise MyError("mine")

    with pytest.raises(MyError) as caught:
        plan(step, *ARGS)
    assert str(caught.value) == "mine"
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        plan(lambda params, x: train(params, x), ARGS[0])


def test_a_step_that_returns_nothing():
    def step(params, x):
        train(params, x)

    assert refused(StepError, step, *ARGS) == (
        "step: it returns no array, so nothing that it computes is used. Return the "
        "new state and the loss."
    )


def test_no_arguments():
    def constant():
        return train(*jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), ARGS))

    # Legal, if odd: everything is a constant.
    assert plan(constant, target="cpu").outcome == "unneeded"
    assert "differentiates nothing" in refused(StepError, lambda: jnp.zeros(3))


@pytest.mark.slow
def test_what_is_differentiated_otherwise_runs_as_it_is_written():
    def curvature(params, x):
        _, pull = jax.vjp(lambda p: mean_square(p, x), params)
        return jax.jvp(pull, (jnp.float32(1),), (jnp.float32(2),))[1]

    found = plan(curvature, *arguments(), budget="230MiB")
    assert found.proof.notes[0] == (
        "what is differentiated runs as written: it is differentiated in another way "
        "than once, in reverse"
    )
    assert not found.program.stacks
    unneeded = plan(curvature, *arguments())
    assert unneeded.outcome == "unneeded"
    assert unneeded.proof.notes == found.proof.notes
    total = compiled_total(unneeded, curvature, *arguments())
    assert total == unneeded.device_bytes == found.device_bytes


def test_no_layers_at_all():
    @stowax.stow
    def loss(w, x):
        return jnp.max(layer(x, w) ** 2)  # of all rows: it has no blocks

    one = jax.tree.map(lambda s: spec(*s.shape[1:]), weights())
    args = (one, spec(4096, WIDTH))
    found = plan(step_of(loss), *args, budget="30MiB")
    assert (found.outcome, found.program.stacks, found.decisions) == (
        "infeasible",
        (),
        (),
    )
    assert found.smallest_budget == found.device_bytes
    assert found.baselines == ()
    assert found.proof.notes[0].startswith("no layers repeat in what is differentiated")
    assert "no layers repeat" in str(found)
    roomy = plan(step_of(loss), *args)
    assert roomy.outcome == "unneeded"
    assert not any("no layers repeat" in note for note in roomy.proof.notes)
    with pytest.warns(UserWarning, match="it does not fit 30.0 MiB of the device"):
        jitted = found.apply(step_of(loss))  # still what jax.jit would have returned
    assert jitted.lower(*args)


@pytest.mark.slow
def test_a_compile_out_of_memory_is_survived(monkeypatch):
    """With a prediction that is far too low, the first programs do not compile."""
    from stowax._survey import _survey

    true = _survey.predict_memory
    asked = []

    def hopeful(*args, **kwargs):
        asked.append(args)
        whole = true(*args, **kwargs)
        return dataclasses.replace(whole, device_total=whole.device_total // 4)

    monkeypatch.setattr(_survey, "predict_memory", hopeful)
    args = arguments(layers=8, width=1024, rows=65536)
    found = plan(train, *args, target="v5e-1")
    limit = stowax.target("v5e-1").device_bytes
    first, *others = found.search.trials
    assert asked
    assert first.what == "as written"
    assert first.step_seconds is None  # it never compiled
    assert first.compiled_bytes > limit
    assert any(trial.step_seconds for trial in others)
    assert found.fits
    assert found.device_bytes <= limit


@pytest.mark.slow
def test_a_step_that_can_never_fit():
    args = arguments(layers=2, rows=2**23)
    found = plan(train, *args, target="v5e-1")
    limit = stowax.target("v5e-1").device_bytes
    assert (found.outcome, found.fits) == ("infeasible", False)
    assert found.device_bytes > limit
    assert found.smallest_budget > limit
    for baseline in found.baselines:
        assert baseline.device_bytes >= 4 * 2**23 * WIDTH  # its batch at the least
    assert "DOES NOT FIT" in str(found)


def test_a_compiler_that_refuses_is_quoted():
    asked = {"compiler_options": {"no_such_option": "1"}}
    text = refused(CompileError, train, *arguments(), **asked)
    assert "No such compile option: 'no_such_option'" in text


def test_forward_alone_may_be_marked():
    @stowax.stow
    def model(params, x):
        return forward(params, x)

    step = step_of(lambda params, x: jnp.mean(model(params, x) ** 2))
    found = plan(step, *arguments(), target="cpu")
    (stack,) = found.program.stacks
    assert stack.count == LAYERS
