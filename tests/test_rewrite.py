"""What users write into steps and layers keeps its meaning under any decisions.

Each test is one habit: a step that has it, the stacks that must be found in it, and
loss and gradients under several decisions beside those of the plain step
(`planned_steps.check`).
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from layered import (
    LAYERS,
    ROWS,
    WEIGHTS,
    WIDTH,
    X,
    layer,
    run_layers,
)
from planned_steps import check, planned
from stowax._mark import stow
from stowax._step._trace import store_all


@pytest.fixture(params=[False, True], ids=["scan", "loop"])
def unrolled(request):
    return request.param


# --- the step around the marked function --------------------------------------------


@pytest.mark.slow
def test_aux_outputs_of_any_kind():
    def loss(weights, x):
        y = run_layers(layer, x, weights)
        aux = {"none": None, "number": 3, "name": "text", "y": y}
        aux["flag"] = jnp.any(y > 0)
        return jnp.mean(y), aux

    def step(weights, x):
        (value, aux), grads = jax.value_and_grad(stow(loss), has_aux=True)(weights, x)
        assert (aux["none"], aux["number"], aux["name"]) == (None, 3, "text")
        return value, aux["y"], aux["flag"], grads

    check(step, (WEIGHTS, X), [LAYERS])


def test_python_scalars_and_keywords_are_passed_on():
    def loss(weights, x, *, scale, squared):
        y = run_layers(layer, x, weights) * scale
        return jnp.mean(y * y) if squared else jnp.mean(y)

    def step(weights, x):
        return jax.value_and_grad(stow(loss))(weights, x, scale=2.0, squared=True)

    check(step, (WEIGHTS, X), [LAYERS])


def test_two_losses_in_one_step():
    def first(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def second(weights, x):
        return jnp.mean(jnp.sin(run_layers(layer, 2 * x, weights)))

    def step(weights, x):
        one = jax.value_and_grad(stow(first))(weights, x)
        other = jax.value_and_grad(stow(second))(weights, x)
        return one, other

    traced = check(step, (WEIGHTS, X), [LAYERS, LAYERS])
    assert len({name.split(".")[0] for name in traced.stacks}) == 2


def test_one_loss_differentiated_twice_is_one_stack():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        one = jax.value_and_grad(loss)(weights, x)
        other = jax.value_and_grad(loss)(weights, x + 1)
        return one, other

    check(step, (WEIGHTS, X), [LAYERS])


@pytest.mark.slow
def test_one_loss_differentiated_in_two_ways():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        return (
            jax.grad(loss, argnums=0)(weights, x),
            jax.grad(loss, argnums=1)(weights, x),
        )

    check(step, (WEIGHTS, X), [LAYERS, LAYERS])


@pytest.mark.slow
def test_a_marked_function_that_is_also_evaluated():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return value, loss(moved, x), grads

    check(step, (WEIGHTS, X), [LAYERS])


@pytest.mark.slow
def test_gradient_accumulation_under_scan():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, batches):
        def one(total, x):
            value, grads = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(jnp.add, total, grads), value

        return lax.scan(one, jax.tree.map(jnp.zeros_like, weights), batches)

    check(step, (WEIGHTS, jnp.stack([X, 2 * X])), [LAYERS])


@pytest.mark.slow
def test_jit_around_the_gradient(unrolled):
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights, unrolled=unrolled))

    @jax.jit
    def inner(weights, x):
        return jax.value_and_grad(loss)(weights, x)

    def step(weights, x):
        return inner(weights, x)

    check(step, (WEIGHTS, X), [LAYERS])


def of_examples(weights, xs):
    """Loss and gradient of a marked function under `jax.vmap`."""

    @stow
    def one(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def total(weights):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(weights, xs))

    return jax.value_and_grad(total)(weights)


@pytest.mark.slow
def test_the_gradient_of_a_vmapped_marked_function():
    check(of_examples, (WEIGHTS, jnp.stack([X, 2 * X])), [LAYERS])


def test_a_marked_function_in_a_marked_function():
    @stow
    def forward(weights, x):
        return run_layers(layer, x, weights)

    @stow
    def loss(weights, x):
        return jnp.mean(forward(weights, run_layers(layer, x, weights)))

    check(lambda *args: jax.value_and_grad(loss)(*args), (WEIGHTS, X), [LAYERS] * 2)


def test_a_batch_of_examples_makes_one_gradient_of_the_weights():
    examples = 11
    args = (WEIGHTS, jnp.stack([X] * examples))
    program = str(jax.make_jaxpr(planned(of_examples, args, store_all))(*args))
    assert f"[{examples},{WIDTH},{WIDTH}]" not in program
    assert f"[{examples},{ROWS},{WIDTH}]" in program


def test_a_gradient_of_a_gradient():
    @stow
    def loss(weights, x):
        return jnp.mean(run_layers(layer, x, weights))

    def step(weights, x):
        def penalty(weights, x):
            return jnp.sum(jnp.square(jax.grad(loss, argnums=1)(weights, x)))

        return jax.value_and_grad(penalty)(weights, x)

    traced = check(step, (WEIGHTS, X), [], seeds=(), exact=False)
    assert traced.recording.left == (
        "it is differentiated in another way than once, in reverse",
    )


def test_a_marked_part_of_the_loss():
    @stow
    def forward(weights, x):
        return run_layers(layer, x, weights)

    def step(weights, x):
        return jax.value_and_grad(lambda w: jnp.mean(jnp.sin(forward(w, x))))(weights)

    check(step, (WEIGHTS, X), [LAYERS])
