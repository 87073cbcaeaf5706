"""Gradients under `jax.vmap` and `jax.jvp`: planned, and equal to the step's own.

Each test is one form of a step: per-example gradients, ensembles, products with the
Hessian. Its layers must be found, with types for all examples or with the tangents
beside the values, and any decisions must give the step's own numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stowax
from layered import LAYERS, WEIGHTS, X, draw, layer, run_layers
from planned_models import target_or_skip
from planned_steps import check

XS = jnp.stack([X, 2 * X, X - 1])  # three examples
ALONG = jax.tree.map(lambda w: draw(5, *w.shape), WEIGHTS)
DECISIONS = {"*": "recompute"}
# Examples share no product of matrices any more, and products with the Hessian are
# taken in the other order: equal to rounding, not to the bit.
SOME = {"seeds": (0,), "choices": ("recompute all", "offload inputs"), "exact": False}


def loss_of(weights, x):
    return jnp.mean(jnp.square(run_layers(layer, x, weights)))


def by_example(loss, weights, xs):
    """Gradients of every example, clipped: what private training does."""
    values, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(weights, xs)
    squares = [
        jnp.sum(g * g, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)
    ]
    scale = 1 / jnp.maximum(1.0, jnp.sqrt(sum(squares)))
    return jax.tree.map(lambda g: jnp.tensordot(scale, g, 1), grads), values


def in_groups(loss, weights, xs):
    """The same, a group of examples at a time."""

    def add(total, group):
        grads, _ = by_example(loss, weights, group)
        return jax.tree.map(jnp.add, total, grads), None

    start = jax.tree.map(jnp.zeros_like, weights)
    return jax.lax.scan(add, start, xs[:, None])[0]


def ensemble(loss, weights, xs):
    """Models of their own weights, each with its own batch."""
    models = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w, w + 0.1]), weights)
    return jax.vmap(jax.value_and_grad(loss))(models, xs)


def other_axes(loss, weights, xs):
    spread = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 1), out_axes=(0, 1))
    return spread(weights, jnp.swapaxes(xs, 0, 1))


def twice(loss, weights, xs):
    per_example = jax.vmap(jax.grad(loss), in_axes=(None, 0))
    return jax.vmap(per_example, in_axes=(None, 0))(weights, jnp.stack([xs, -xs]))


def named_axis(loss, weights, xs):
    def beside(weights, x):
        value = loss(weights, x)
        return value + value * jax.lax.pmean(value, "examples")

    per_example = jax.grad(beside)
    return jax.vmap(per_example, (None, 0), axis_name="examples")(weights, xs)


def by_the_input(loss, weights, xs):
    return jax.vmap(jax.grad(loss, argnums=1), in_axes=(None, 0))(weights, xs)


def jitted_inside(loss, weights, xs):
    return jax.vmap(jax.jit(jax.grad(loss)), in_axes=(None, 0))(weights, xs)


def own_steps(loss, weights, xs):
    """Each example takes steps of its own, another number than the others."""

    def trained(x, steps):
        def step(state):
            weights, k = state
            grads = jax.grad(loss)(weights, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), k + 1

        return jax.lax.while_loop(lambda state: state[1] < steps, step, (weights, 0))

    return jax.vmap(trained)(xs, jnp.asarray([2, 0, 1]))


EXAMPLES = {
    "by_example": by_example,
    "in_groups": in_groups,
    "ensemble": ensemble,
    "other_axes": other_axes,
    "twice": twice,
    "named_axis": named_axis,
    "by_the_input": by_the_input,
    "jitted_inside": jitted_inside,
    "own_steps": own_steps,
}


def along(loss, weights, xs):
    """Gradient and Hessian-vector product, forward over reverse."""
    grads = jax.grad(lambda w: loss(w, xs[0]))
    return jax.jvp(grads, (weights,), (ALONG,))


def probes(loss, weights, xs):
    """Hutchinson's estimate of the Hessian's trace."""
    grads = jax.grad(lambda w: loss(w, xs[0]))

    def add(total, key):
        signs = jax.tree.map(
            lambda w: jax.random.rademacher(key, w.shape, w.dtype), weights
        )
        _, product = jax.jvp(grads, (weights,), (signs,))
        pairs = zip(jax.tree.leaves(signs), jax.tree.leaves(product), strict=True)
        return total + sum(jnp.vdot(a, b) for a, b in pairs), None

    return jax.lax.scan(add, 0.0, jax.random.split(jax.random.key(0), 2))[0]


def several(loss, weights, xs):
    """Products of one Hessian with several vectors."""
    grads = jax.grad(lambda w: loss(w, xs[0]))
    vectors = jax.tree.map(lambda v: jnp.stack([v, v * v]), ALONG)
    return jax.vmap(lambda v: jax.jvp(grads, (weights,), (v,))[1])(vectors)


def of_examples(loss, weights, xs):
    """Products with the Hessian of every example."""
    per_example = jax.vmap(jax.grad(loss), in_axes=(None, 0))
    return jax.jvp(lambda w: per_example(w, xs), (weights,), (ALONG,))


def hessian_free(loss, weights, xs):
    """A few conjugate gradients on the Hessian, from its products alone."""
    grads = jax.grad(lambda w: loss(w, xs[0]))

    def product(v):
        _, found = jax.jvp(grads, (weights,), (v,))
        return jax.tree.map(lambda h, v: h + 10 * v, found, v)

    return jax.scipy.sparse.linalg.cg(product, grads(weights), maxiter=2)[0]


FORWARD = {f.__name__: f for f in (along, probes, several, of_examples)}


@pytest.mark.quick("by_example", "ensemble")
@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients_of_examples(name):
    def step(weights, xs):
        return EXAMPLES[name](stowax.stow(loss_of), weights, xs)

    traced = check(step, (WEIGHTS, XS), [LAYERS], **SOME)
    assert traced.recording.left == ()
    (stack,) = traced.stacks.values()
    lead = {"twice": (2, 3), "in_groups": (1,)}.get(name, (3,))
    carried = stack.stack.carry_inputs
    types = [stack.body.forward.avals[i].shape for i in carried]
    assert (*lead, *X.shape) in types


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARD)
def test_gradients_that_are_differentiated_forwards(name):
    def step(weights, xs):
        return FORWARD[name](stowax.stow(loss_of), weights, xs)

    traced = check(step, (WEIGHTS, XS), [LAYERS], **SOME)
    assert traced.recording.left == ()


@pytest.mark.slow
def test_conjugate_gradients_on_products_with_the_hessian():
    def step(weights, xs):
        return hessian_free(stowax.stow(loss_of), weights, xs)

    traced = check(step, (WEIGHTS, XS), [LAYERS, LAYERS], **SOME)
    assert traced.recording.left == ()


@stowax.stow
def marked_part(weights, x):
    return run_layers(layer, x, weights)


@pytest.mark.slow
def test_a_mark_on_a_part_of_what_is_transformed():
    def loss(weights, x):
        return jnp.mean(jnp.sin(jax.jit(marked_part)(weights, x)) ** 2)

    def step(weights, xs):
        per_example = jax.vmap(jax.grad(loss), in_axes=(None, 0))(weights, xs)
        product = jax.jvp(lambda w: jax.grad(loss)(w, xs[0]), (weights,), (ALONG,))
        return per_example, product

    check(step, (WEIGHTS, XS), [LAYERS, LAYERS], **SOME)


def rows_of_the_jacobian(weights, xs):
    out, pull = jax.vjp(lambda w: run_layers(layer, xs[0], w)[0], weights)
    return jax.vmap(pull)(jnp.eye(len(out)))


def moved_cotangent(weights, xs):
    _, pull = jax.vjp(lambda w: loss_of(w, xs[0]), weights)
    return jax.jvp(pull, (jnp.float32(1),), (jnp.float32(2),))


@jax.custom_vjp
def in_reverse_alone(x):
    return jnp.tanh(x)


in_reverse_alone.defvjp(
    lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),)
)


def own_rule(weights, xs):
    def loss(weights, x):
        own = lambda x, p: in_reverse_alone(x @ p["w"])
        return jnp.mean(run_layers(own, x, weights))

    return along(loss, weights, xs)


def whole_hessian(weights, xs):
    def of_biases(b):
        return jax.grad(lambda b: loss_of({**weights, "b": b}, xs[0]))(b)

    return jax.jacfwd(of_biases)(weights["b"])


LEFT = {
    "it is called under a jax.vmap with out_axes=None for a gradient (as by jax.jacfwd)"
    ": under a plan every gradient has the axis": whole_hessian,
    "its gradient is taken once, and pulled back under jax.vmap (jax.jacrev)": (
        rows_of_the_jacobian
    ),
    "it is differentiated in another way than once, in reverse": moved_cotangent,
    "the gradient is differentiated forwards (by jax.jvp), and a jax.custom_vjp inside "
    "of it has a rule for reverse alone": own_rule,
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_left_as_it_is_written_says_why(why):
    step = LEFT[why]
    found = stowax.plan(step, WEIGHTS, XS, target="cpu")
    assert found.proof.notes[0] == f"what is differentiated runs as written: {why}"
    got, expected = found.apply(step)(WEIGHTS, XS), jax.jit(step)(WEIGHTS, XS)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_gradient_by_the_input_alone_is_no_lost_update():
    """The residual stream has the input's type, and the loss is needed by nothing."""

    def step(weights, x):
        return jax.grad(loss_of, argnums=1)(weights, x)

    found = stowax.plan(step, WEIGHTS, X, target="cpu", pin=DECISIONS)
    got, expected = found.apply(step)(WEIGHTS, X), jax.jit(step)(WEIGHTS, X)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def wide(form, *lead):
    """What `form` is planned for: activations far larger than weights."""
    layers, width, rows = 4, 64, 2048
    shape = jax.ShapeDtypeStruct
    weights = {
        "w": shape((layers, width, width), jnp.float32),
        "b": shape((layers, width), jnp.float32),
    }
    return form, weights, shape((*lead, rows, width), jnp.float32)


def train_by_example(weights, xs):
    grads, values = by_example(loss_of, weights, xs)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), values


def train_along(weights, x):
    grads, product = jax.jvp(
        jax.grad(loss_of), (weights, x), (weights, jnp.zeros_like(x))
    )
    new = jax.tree.map(lambda w, g, h: w - 0.1 * g - 0.01 * h, weights, grads, product)
    return new, jnp.float32(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "lead"),
    [(train_by_example, (8,)), (train_along, ())],
    ids=["examples", "along"],
)
def test_they_fit_less_memory_than_they_take(form, lead):
    target_or_skip("h200")
    step, *args = wide(form, *lead)
    found = stowax.plan(step, *args, target="h200", budget="60%", progress=False)
    assert found.fits
    assert not any("as it is written" in note for note in found.proof.notes)
    assert {d.decision for d in found.decisions} & {"recompute", "offload"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "seen"), [(train_by_example, False), (train_along, True)]
)
def test_the_gate_passes_them(form, seen):
    """Gradients of examples have an axis more, which JAX puts where it likes."""
    args = WEIGHTS, (XS if form is train_by_example else X)
    found = stowax.plan(form, *args, target="cpu", pin=DECISIONS, progress=False)
    result = stowax.verify(form, found, *args, progress=False)
    assert result.passed
    assert any(leaf.role == "gradient" for leaf in result.leaves) == seen


@pytest.mark.quick("AxisType.Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_examples_that_are_spread_over_devices(kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))

    def step(weights, xs):
        spread = jax.vmap(jax.value_and_grad(loss_of), in_axes=(None, 0))
        values, grads = spread(weights, xs)
        return jax.tree.map(lambda w, g: w - jnp.mean(g, 0), weights, grads), values

    def put(tree, *parts):
        return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*parts)))

    args = put(WEIGHTS), put(jnp.concatenate([XS, XS[:1]]), "data")
    expected = jax.jit(step)(*args)
    found = stowax.plan(step, *args, pin=DECISIONS, donate=False, progress=False)
    got = found.apply(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def penalized(loss):
    """A loss with a penalty on its own gradient's norm."""

    def whole(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return value + sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

    def step(weights, x):
        value, grads = jax.value_and_grad(whole)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return step


@pytest.mark.slow
def test_a_gradient_of_a_gradient_is_told_what_a_checkpoint_frees():
    target_or_skip("h200")
    written, *args = wide(penalized(loss_of))
    how = {"target": "h200", "progress": False}
    found = stowax.plan(written, *args, budget="55%", **how)
    assert not found.fits
    note = "a gradient is taken inside of what is differentiated: the loops hand on "
    assert any(n.startswith(note) for n in found.proof.notes)

    def checkpointed(weights, x):
        once = jax.checkpoint(layer)
        return jnp.mean(jnp.square(run_layers(once, x, weights)))

    less = stowax.plan(
        penalized(checkpointed), *args, budget=found.proof.budget_bytes, **how
    )
    assert less.fits
    assert not any(n.startswith(note) for n in less.proof.notes)
