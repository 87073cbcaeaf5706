"""Slices of what a wide product makes, taken before the product."""

import jax
import jax.numpy as jnp
import pytest

from planned_steps import assert_close
from stowax._jaxprs._jaxpr import Program, inline
from stowax._jaxprs._narrowed import narrowed
from tiled_losses import B, D, T, V, inputs, program_of, results, shifted

pytestmark = [pytest.mark.usefixtures("usual_promotion")]


def capped(x, head, labels, mask):
    logits = 30 * jnp.tanh((x @ head).astype(jnp.float32) / 30)
    logp = jax.nn.log_softmax(logits[:, :-1] + mask[:, :1, None])
    picked = jnp.take_along_axis(logp, labels[:, 1:, None], -1)[..., 0]
    return -(picked * mask[:, 1:]).mean()


def flattened(x, head, labels, mask):
    """As Hugging Face's models shift."""
    logits = (x @ head)[..., :-1, :].reshape(-1, V)
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), labels[..., 1:].reshape(-1, 1), -1
    )
    return -picked.mean()


def twice(x, head, labels, mask):
    """A slice of a slice, along another axis."""
    logits = x @ head
    return jnp.sin(logits[:, 2:-1][:, :, 3:]).mean()


def tables(x, head, labels, mask):
    """A part of the words, and of the examples' axis, of a product with a bias."""
    logits = x @ head + jnp.arange(V) / V + mask[..., None]
    part = jax.lax.slice_in_dim(logits, 1, B)
    return jax.nn.logsumexp(part, -1).mean()


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (shifted, (B, T - 1, V)),
        (capped, (B, T - 1, V)),
        (flattened, (B, T - 1, V)),
        (twice, (B, T - 3, V - 3)),
        (tables, (B - 1, T, V)),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_products_of_what_is_read(loss, shape):
    args = inputs()
    program = program_of(loss, *args)
    found = narrowed(program)
    products = [n for n in found.nodes if n.equation.primitive.name == "dot_general"]
    assert [found.avals[n.outputs[0]].shape for n in products] == [shape]
    assert_close(results(found, args), results(program, args))


def whole_too(x, head, labels, mask):
    logits = x @ head
    return jnp.sin(logits[:, :-1]).mean() + logits.max()


def two_parts(x, head, labels, mask):
    logits = x @ head
    return jnp.sin(logits[:, :-1]).mean() + logits[:, 1:].mean()


def with_itself(x, head, labels, mask):
    logits = jnp.einsum("btd,bsd->bts", x, x)
    return jnp.sin((logits + logits.swapaxes(1, 2))[:, :-1]).mean()


def in_steps(x, head, labels, mask):
    return jnp.sin((x @ head)[:, ::2]).mean()


def across(x, head, labels, mask):
    """Sums over tokens on the way: each reads them all."""
    logits = jnp.cumsum(x @ head, axis=1)
    return jnp.sin(logits[:, :-1]).mean()


@pytest.mark.parametrize(
    "loss",
    [whole_too, two_parts, with_itself, in_steps, across],
    ids=lambda f: f.__name__,
)
def test_products_that_are_read_otherwise_stay(loss):
    program = program_of(loss, *inputs())
    assert narrowed(program) is program


def test_tokens_that_are_spread_over_devices_stay():
    """Their type would have to divide after the slice, too."""
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(explicit,))
    whole, spread = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in ((), (None, "data"))
    )

    def loss(x, head):
        logits = jnp.einsum("btd,dv->btv", x, head, out_sharding=whole)
        return jnp.sin(logits[:, :-1]).mean()

    x = jax.ShapeDtypeStruct((B, T, D), jnp.float32, sharding=spread)
    head = jax.ShapeDtypeStruct((D, V), jnp.float32, sharding=whole)
    program = Program(inline(jax.make_jaxpr(loss)(x, head)))
    assert narrowed(program) is program


def test_what_nobody_reads_is_left_out():
    def loss(x, head):
        logits = x @ head
        jnp.tanh(logits).sum()
        return jnp.sin(logits[:, 1:]).sum()

    shapes = jnp.ones((2, 64, D)), jnp.ones((D, V))
    program = Program(inline(jax.make_jaxpr(loss)(*shapes)))
    (product,) = [
        n for n in narrowed(program).nodes if n.equation.primitive.name == "dot_general"
    ]
    assert product.equation.outvars[0].aval.shape == (2, 63, V)
