"""What a step measures of what its loss hands out, measured in there.

Each step here reads large results of a differentiated function. Where it makes little
of them, they are results no more, and the loss may run in blocks. Where it does
anything else with them, nothing is changed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._jax import open_jaxpr
from stowax._layers._rewrite import Rewriter
from stowax._records._stages import Options
from stowax._step._recording import record_step
from test_unread import ROWS, VOCABULARY, arguments, planned, same_when_planned


def logits_of(params, x):
    return jnp.tanh(x @ params["hidden"]) @ params["head"]


def loss_and_logits(params, x, labels):
    logits = logits_of(params, x)
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - chosen), logits


def step_with(measure, loss=loss_and_logits):
    """A step that returns what `measure` makes of logits, labels and the loss."""

    def step(params, x, labels):
        take = jax.value_and_grad(loss, has_aux=True)
        (value, logits), grads = take(params, x, labels)
        measured = measure(logits, labels, value)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, value, measured

    return step


def accuracy(logits, labels, _):
    return jnp.mean(jnp.argmax(logits, axis=1) == labels)


def cross_entropy(logits, labels, _):
    """As Flax's examples have it: over one-hot labels that are made for it."""
    hot = jax.nn.one_hot(labels, logits.shape[1])
    return -jnp.mean(jnp.sum(hot * jax.nn.log_softmax(logits), axis=1))


@jax.jit
def within_a_jit(logits, labels, loss):
    weights = jnp.where(labels > 3, 1.0, 0.5)
    right = jnp.where(jnp.argmax(logits, axis=1) == labels, weights, 0.0)
    surest = jnp.mean(jnp.max(logits, axis=1))
    return {"right": right.sum() / weights.sum(), "ratio": surest / loss}


def best_of_each(logits, labels, _):
    return jnp.max(logits, axis=1), jnp.argmin(logits, axis=1)


def among_five(logits, labels, _):
    _, best = jax.lax.top_k(logits, 5)
    return jnp.mean(jnp.any(best == labels[:, None], axis=1))


def printed(logits, labels, loss):
    jax.debug.print("{}", accuracy(logits, labels, loss))
    return loss


def of_what_was_measured(logits, labels, _):
    """The second reading depends on the first."""
    most = jnp.max(logits, axis=1)
    near = logits > 0.9 * jnp.log1p(jnp.abs(most))[:, None]
    return jnp.sum(near, axis=1)


MEASURES = {
    "accuracy": accuracy,
    "cross entropy": cross_entropy,
    "in a jit": within_a_jit,
    "by token": best_of_each,
    "among five": among_five,
    "printed": printed,
    "in turn": of_what_was_measured,
}


def nothing(stack, body):
    """Of no layer is anything stored."""
    del stack, body
    return {}


def check_replay(step, *args):
    """The step as it was recorded computes what it does."""
    leaves, structure = jax.tree.flatten(args)
    replay = record_step(step, leaves, structure).replay
    computed = jax.jit(lambda *values: replay(Rewriter(nothing, Options()), values))
    expected = jax.tree.leaves(jax.jit(step)(*args))
    for a, b in zip(expected, computed(*leaves), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def called(step, *args):
    """The types of what the step's only call returns, as it was recorded."""
    leaves, structure = jax.tree.flatten(args)
    (call,) = record_step(step, leaves, structure).calls
    return [v.aval for v in open_jaxpr(call.jaxpr).outvars]


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("jitted", [False, True])
def test_logits_that_are_measured_are_no_result(name, jitted):
    step = step_with(MEASURES[name])
    found = called(jax.jit(step) if jitted else step, *arguments())
    assert max(aval.size for aval in found) <= 5 * ROWS


@pytest.mark.parametrize("name", MEASURES)
def test_a_step_that_measures_computes_what_it_did(name):
    same_when_planned(step_with(MEASURES[name]), *arguments(2048, 2048), budget="50%")


def test_metrics_of_logits_do_not_keep_the_loss_whole():
    found = planned(step_with(cross_entropy), budget=2 * ROWS * VOCABULARY)
    assert found.fits
    assert "blocks of tokens" in str(found)


def returned(logits, labels, _):
    return accuracy(logits, labels, _), logits


def half_of_them(logits, *_):
    return logits.astype(jnp.bfloat16)


def handed_to_the_host(logits, *_):
    jax.debug.callback(lambda logits: None, logits)
    return jnp.max(logits)


WHOLE = {"returned": returned, "cast": half_of_them, "host": handed_to_the_host}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_used_whole_stays_a_result(name):
    found = called(step_with(WHOLE[name]), *arguments())
    assert [aval.size for aval in found] == [1, ROWS * VOCABULARY]


def test_what_a_cotangent_is_made_of_stays_a_result():
    """The gradient by hand: softmax less one-hot is pulled back."""

    def step(params, x, labels):
        logits, back = jax.vjp(lambda params: logits_of(params, x), params)
        hot = jax.nn.one_hot(labels, logits.shape[1])
        (grads,) = back((jax.nn.softmax(logits) - hot) / len(x))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params, accuracy(logits, labels, None)

    found = called(step, *arguments())
    assert ROWS * VOCABULARY in [aval.size for aval in found]


def test_a_measure_of_two_calls_is_in_the_later_one():
    """It is given what the earlier one makes, and that stays a result."""

    def step(params, x, labels):
        take = jax.value_and_grad(loss_and_logits, has_aux=True)
        (_, first), one = take(params, x, labels)
        (_, other), two = take(params, -x, labels)
        params = jax.tree.map(lambda p, a, b: p - 0.1 * (a + b), params, one, two)
        return params, jnp.mean(first * other)

    args = arguments()
    leaves, structure = jax.tree.flatten(args)
    calls = record_step(step, leaves, structure).calls
    sizes = [v.aval.size for c in calls for v in open_jaxpr(c.jaxpr).outvars]
    assert sizes.count(ROWS * VOCABULARY) == 1
    check_replay(step, *arguments(512, 256))


def test_each_round_of_a_loop_measures_its_own_logits():
    def epoch(params, xs, labels):
        def step(params, batch):
            params, *out = step_with(accuracy)(params, *batch)
            return params, out

        return jax.lax.scan(step, params, (xs, labels))

    params, x, labels = arguments(4096, 2048)
    args = params, x.reshape(2, 2048, -1), labels.reshape(2, 2048)
    assert max(aval.size for aval in called(epoch, *args)) <= 2048
    same_when_planned(epoch, *args, budget="60%")


def test_an_infinite_measure_leaves_gradients_alone():
    """Nothing is pulled back through it: 0 * inf would be no number."""

    def unbounded(logits, *_):
        return jnp.sum(1 / jnp.sqrt(jnp.abs(logits - logits)))

    params, x, labels = arguments(2048, 2048)
    step = step_with(unbounded)
    plan = stowax.plan(step, params, x, labels, target="cpu", budget="60%")
    new, loss, measured = jax.jit(plan.apply(step))(params, x, labels)
    assert np.isinf(measured)
    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


def test_a_result_that_is_measured_and_differentiated_keeps_its_gradient():
    """Of a marked model: the loss moves into it, and what is pulled back does not."""
    model = stowax.stow(logits_of)

    def step(params, x, labels):
        loss = lambda params: jnp.mean(3 * model(params, x))
        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    args = arguments(512, 256)
    assert [aval.size for aval in called(step, *args)] == [512 * 256, 1]
    check_replay(step, *args)
